"""The scheduler's side: who waits for room, what is found in the KV cache, how requests end.
What is vLLM's own here is replaced by as little as the seams need."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planned import compile_actions, held
from vllm_scope import Add, Gate, Latch, Moments, Read, Spec
from vllm_scope.core.admission import Admission
from vllm_scope.core.news import Heard
from vllm_scope.core.sums_room import SumsRoom
from vllm_scope.engine.core import scheduler as scheduling
from vllm_scope.engine.core.entered import Entered, keep
from vllm_scope.engine.core.verdicts import tell_workers
from vllm_scope.graph.tap.program_tables import capacity
from vllm_scope.program.held import Held
from vllm_scope.program.operations import Cost
from vllm_scope.request.resolved import NOTHING
from vllm_scope.request.sites import Sites
from vllm_scope.sinks.request import Ended
from vllm_scope.worker.watch import Judged


class Config(SimpleNamespace):
    """Can be referenced weakly, as vLLM's configuration can."""


class Request(SimpleNamespace):
    """vLLM's, as far as the seams know it."""


def _request(name: str, **known: Any) -> Request:
    """A request, and what is known of it; a plain one without."""
    request = Request(request_id=name, num_tokens=101)
    if known:
        keep(request, Entered(**{"asked": NOTHING, **known}))
    return request


class Coordinator:
    """vLLM's KV-cache coordinator: notes how long the hits may be that it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def find_longest_cache_hit(self, hashes: Any, most: int) -> str:
        self.asked.append(most)
        return "hit"

    def find_longest_cache_hit_per_group(self, hashes: Any, most: int) -> str:
        self.asked.append(most)
        return "hit of each group"


def _old_lookup(self: Any, request: Any) -> str:
    assert type(self.coordinator) is Coordinator  # vLLM asks which class it is
    return self.coordinator.find_longest_cache_hit("hashes", request.num_tokens - 1)


def _old_lookup_of_groups(self: Any, request: Any) -> str:
    return self.coordinator.find_longest_cache_hit_per_group("hashes", request.num_tokens - 1)


def _old_lookup_of_one_group(self: Any, request: Any) -> str:
    """Where there is one group, the other lookup is as good."""
    return scheduling._capped(_old_lookup, self, request)  # type: ignore[no-any-return]


def _new_lookup(self: Any, request: Any, max_cache_hit_length: int | None = None) -> str:
    most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
    return self.coordinator.find_longest_cache_hit("hashes", most)


@pytest.mark.parametrize(
    "original",
    [
        pytest.param(_old_lookup, id="0.32"),
        pytest.param(_old_lookup_of_groups, id="0.32-for-connectors"),
        pytest.param(_old_lookup_of_one_group, id="0.32-for-connectors-one-in-the-other"),
        pytest.param(_new_lookup, id="0.33"),
    ],
)
@pytest.mark.parametrize(
    ("first_position", "cap"),
    [(None, 100), (0, 0), (7, 7), (200, 100)],
    ids=["reads-nothing", "all", "from-7", "past-the-prompt"],
)
def test_a_reading_request_hits_the_cache_below_its_first_position_only(
    original, first_position, cap
):
    manager = SimpleNamespace(coordinator=Coordinator())
    request = _request("r", first_read=first_position)
    assert scheduling._capped(original, manager, request).startswith("hit")
    assert manager.coordinator.asked == [cap]
    # Nothing is left behind for the next request.
    assert manager.coordinator.__dict__ == {"asked": [cap]}


@pytest.mark.parametrize(("given", "cap"), [(3, 3), (None, 7), (50, 7)])
def test_a_cap_of_vllms_own_holds_too(given, cap):
    manager = SimpleNamespace(coordinator=Coordinator())
    request = _request("r", first_read=7)
    scheduling._capped(_new_lookup, manager, request, given)
    scheduling._capped(_new_lookup, manager, request, max_cache_hit_length=given)
    assert manager.coordinator.asked == [cap, cap]


class Connector:
    """A KV connector that has all of a prompt; some look whether they should."""

    def __init__(self, looks: bool) -> None:
        self.looks, self.asked = looks, 0

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        self.asked += 1
        found = not (self.looks and request.skip_reading_prefix_cache)
        return (100 - num_computed if found else 0), found


@pytest.mark.parametrize("looks", [True, False])
def test_requests_that_read_or_edit_take_nothing_from_a_connector(looks):
    scheduler = Scheduler(Cost(100, 100, 100), connector=Connector(looks))
    plain, ours = _request("plain"), _request("ours", first_read=None)
    for request in (plain, ours, ours):
        request.skip_reading_prefix_cache = False
        scheduling._add_to_scheduler(Scheduler.enqueue, scheduler, request)
    lookup = scheduler.connector.get_num_new_matched_tokens
    assert lookup(plain, 20) == (80, True)
    assert lookup(ours, 20) == (0, False)
    assert not ours.skip_reading_prefix_cache
    assert scheduler.connector.asked == 2


class Pool:
    """vLLM's BlockPool."""


# Room


@dataclass(eq=False)
class Scheduler:
    """vLLM's scheduler, as far as the seams know it."""

    most: Cost
    added: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    requests: dict[str, Any] = field(default_factory=dict)
    connector: Any = None

    def __post_init__(self) -> None:
        hidden_size = 4
        additional = {"scope": {"vectors_mib": self.most.vectors * 4 * hidden_size / 2**20}}
        pool = Pool()
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.vllm_config = Config(
            parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
            additional_config=additional,
            num_speculative_tokens=0,
            model_config=SimpleNamespace(
                get_hidden_size=lambda: hidden_size,
                get_total_num_hidden_layers=lambda: 1,
                dtype="float32",
            ),
        )

    def enqueue(self, request: Any) -> None:
        self.added.append(request.request_id)
        self.requests.setdefault(request.request_id, request)  # a piece joins its session

    def free(self, request: Any) -> str:
        self.finished.append(request.request_id)
        return f"freed {request.request_id}"

    def finish(self, request_ids: Any, status: Any) -> None:
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        for name in list(self.requests) if request_ids is None else request_ids:
            if name in self.requests:
                end(self, name)

    @property
    def admission(self) -> Admission:
        found = scheduling.admission_of(self)
        assert found is not None
        return found


def _adding(name: str, num_vectors: int) -> Held:
    """What a request holds whose vectors no request of another name has."""
    numbers = [*name.encode().ljust(3), 0]
    adds = [Add([*numbers[:3], i + 1], layer=0, tokens="all") for i in range(num_vectors)]
    found = held(compile_actions(*adds), 4, name)
    assert found is not None
    assert found.cost == Cost(num_vectors, 1, num_vectors + 1)  # each token is checked too
    return found


def add(
    scheduler: Scheduler, name: str, num_vectors: int | None, content: str | None = None
) -> None:
    known = {"held": _adding(content or name, num_vectors)} if num_vectors else {}
    request = _request(name, **known)
    scheduling._add_to_scheduler(Scheduler.enqueue, scheduler, request)


def end(scheduler: Scheduler, name: str) -> None:
    request = scheduler.requests.pop(name)
    assert scheduling._free(Scheduler.free, scheduler, request) == f"freed {name}"


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    monkeypatch.setattr(scheduling, "_enqueue", Scheduler.enqueue)
    return Scheduler(Cost(4))


def test_requests_that_do_not_fit_wait_first_come_first_served(scheduler):
    for name, size in (("a", 3), ("b", 2), ("c", 1), ("plain", None)):
        add(scheduler, name, size)
    # "c" would fit, but does not overtake.
    assert scheduler.added == ["a", "plain"]
    assert scheduler.admission.num_waited == 2
    end(scheduler, "plain")
    assert scheduler.added == ["a", "plain"]
    end(scheduler, "a")
    assert scheduler.added == ["a", "plain", "b", "c"]
    add(scheduler, "d", 1)
    assert scheduler.added[-1] == "d"
    rows = Cost(lens_rows=1 << 20)
    assert scheduler.admission.most == capacity(4, 4 * 16 / 2**20) + rows


def test_equal_vectors_have_one_place_and_no_request_waits_for_them(scheduler):
    for i in range(9):
        add(scheduler, f"same-{i}", 3, content="same")
    add(scheduler, "other", 2)
    assert scheduler.added == [f"same-{i}" for i in range(9)]
    for i in range(8):
        end(scheduler, f"same-{i}")
        assert scheduler.added[-1] != "other"
    end(scheduler, "same-8")
    assert scheduler.added[-1] == "other"


def test_a_request_that_fills_the_tables_runs_alone(scheduler):
    add(scheduler, "huge", 9)  # its like is refused by front-ends
    add(scheduler, "small", 1)
    assert scheduler.added == ["huge"]
    end(scheduler, "huge")
    assert scheduler.added == ["huge", "small"]


def test_pieces_of_streamed_input_hold_the_places_of_one_request(scheduler):
    for _ in range(4):
        add(scheduler, "stream", 1)
    add(scheduler, "other", 3)
    assert scheduler.added == [*["stream"] * 4, "other"]
    end(scheduler, "stream")
    end(scheduler, "other")
    add(scheduler, "fills", 4)
    assert scheduler.added[-1] == "fills"


def test_pieces_of_streamed_input_that_wait_stay_in_their_order(scheduler):
    add(scheduler, "first", 4)
    for name in ("stream", "stream", "last"):
        add(scheduler, name, 3)
    end(scheduler, "first")
    assert scheduler.added == ["first", "stream", "stream"]
    end(scheduler, "stream")
    assert scheduler.added[-1] == "last"


def test_a_piece_without_vectors_waits_behind_its_session(scheduler):
    """As the last piece, which closes the session, and those that come when the server's edits
    are gone: vLLM knows no session of their id yet."""
    add(scheduler, "first", 4)
    add(scheduler, "stream", 3)
    add(scheduler, "stream", None)
    add(scheduler, "plain", None)
    assert scheduler.added == ["first", "plain"]
    end(scheduler, "first")
    assert scheduler.added == ["first", "plain", "stream", "stream"]
    add(scheduler, "large", 2)
    end(scheduler, "stream")
    assert scheduler.added[-1] == "large"


def test_a_session_keeps_what_it_entered_with(scheduler):
    """Its pieces join the request that vLLM keeps, and the workers hear of that one."""
    edits = Spec(edits=(Add([1.0] * 4, layer=0),)).resolve(Sites(1, 4, "float32", (0, 2)))
    began, came = _request("s", asked=edits), _request("s", asked=NOTHING)
    for piece in (began, came):
        scheduling._add_to_scheduler(Scheduler.enqueue, scheduler, piece)
    news = [step(scheduler, new=["s"]) for _ in range(2)]
    heard = Heard()
    for one in news:
        heard.take(one)
        assert heard[one.entrants["s"].spec] == edits


# Garbage


class Seldom:
    """Counts each `begin` without an `end`."""

    num = 0

    def begin(self) -> None:
        self.num += 1

    def end(self) -> None:
        self.num -= 1


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> Seldom:
    gc.collect()  # schedulers of earlier tests end their own
    seldom = Seldom()
    monkeypatch.setattr(scheduling, "seldom", seldom)
    return seldom


def test_collections_of_garbage_are_rarer_while_requests_with_taps_run(seldom):
    scheduler = Scheduler(Cost(4))
    add(scheduler, "plain", None)
    scheduling._add_to_scheduler(Scheduler.enqueue, scheduler, _request("reads", first_read=0))
    for _ in range(2):  # the pieces of streamed input are one request
        add(scheduler, "edits", 1)
    assert seldom.num == 1
    end(scheduler, "plain")
    end(scheduler, "reads")
    assert seldom.num == 1
    end(scheduler, "edits")
    assert seldom.num == 0
    add(scheduler, "other", 1)
    assert seldom.num == 1
    del scheduler
    gc.collect()
    assert seldom.num == 0, "nobody else can end them"


def test_a_piece_with_taps_of_a_plain_session_makes_no_collection_rarer(seldom):
    """vLLM frees the session, which is the first piece."""
    scheduler = Scheduler(Cost(4))
    add(scheduler, "session", None)
    add(scheduler, "session", 1)
    assert seldom.num == 0
    end(scheduler, "session")
    assert seldom.num == 0


def test_collections_are_usual_again_after_the_last_request_that_waited_is_aborted(
    seldom, scheduler
):
    add(scheduler, "a", 4)
    add(scheduler, "b", 3)
    assert scheduler.added == ["a"]
    scheduling._finish(
        lambda self, ids, status: self.finish(ids, status) or [], scheduler, ["b"], "aborted"
    )
    assert seldom.num == 1
    end(scheduler, "a")
    assert seldom.num == 0


# News for the workers


def step(
    scheduler: Scheduler, new: Sequence[str] = (), finished: Sequence[str] = (),
    resumed: Sequence[str] = (),
) -> Any:  # fmt: skip
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
        finished_req_ids=set(finished), num_scheduled_tokens=dict.fromkeys(new, 1),
    )  # fmt: skip
    scheduling._schedule(lambda _: output, scheduler)
    return scheduling.news_in(output)


def test_workers_are_told_how_many_tokens_a_request_has_that_was_preempted(scheduler):
    sites = Sites(2, 4, "float32", (0, 2, 4))
    for name, state in (("latched", Latch()), ("stateless", None)):
        gate = Gate([1.0] * 4, 0, state=state)
        asked = Spec(edits=(Add([1.0] * 4, layer=1, gate=gate),)).resolve(sites)
        scheduling._add_to_scheduler(Scheduler.enqueue, scheduler, _request(name, asked=asked))
    add(scheduler, "plain", None)
    assert step(scheduler, resumed=["stateless", "plain"]) is None
    news = step(scheduler, resumed=["stateless", "latched", "plain"])
    assert news.resumed == {"latched": 101}
    # Model Runner V2 gets the whole request again.
    assert step(scheduler, new=["latched", "stateless"]).resumed == {"latched": 101}


def test_a_request_that_begins_has_room_for_sums_that_were_dropped_since_it_entered(scheduler):
    sites = Sites(2, 4, "float32", (0, 2, 4))
    asked, room = Spec(moments=(Moments(),)).resolve(sites), SumsRoom(sites, 1)
    request = _request("r", asked=asked, sums=room)
    request.num_output_tokens = 0
    room.enter(asked.moments)
    size = room.num_bytes
    scheduling._add_to_scheduler(Scheduler.enqueue, scheduler, request)
    room.drop("moments")
    step(scheduler, new=["r"])
    assert room.num_bytes == size > 0
    # Model Runner V2 gets a preempted request again. The workers do not make dropped sums again.
    room.drop("moments")
    step(scheduler, new=["r"])
    assert room.num_bytes == 0


def test_a_step_without_requests_of_ours_has_no_news(scheduler):
    add(scheduler, "plain", None)
    assert step(scheduler, new=["plain"], finished=["other"]) is None


def test_workers_hear_how_requests_with_sinks_end(scheduler):
    sites = Sites(1, 4, "float32", (0, 2))
    for name, to in (("mine", "memory"), ("sunk", "filesystem")):
        asked = Spec((Read("embed", to=to),)).resolve(sites)
        request = _request(name, asked=asked, num_prompt=2)
        request.all_token_ids, request.get_finished_reason = [5, 6, 7, 8], lambda: "stop"
        scheduling._add_to_scheduler(Scheduler.enqueue, scheduler, request)
    step(scheduler, new=["mine", "sunk"])
    end(scheduler, "mine")
    end(scheduler, "sunk")
    assert step(scheduler, finished=["mine"]) is None
    news = step(scheduler, finished=["mine", "sunk"])
    assert news.ended == {"sunk": Ended((7, 8), "stop")}
    assert step(scheduler, finished=["mine", "sunk"]) is None


def test_workers_hear_all_tokens_after_the_first_piece_of_streamed_input(scheduler):
    """vLLM moves them to the prompt, except those that follow the last piece."""
    asked = Spec((Read("embed", to="filesystem"),)).resolve(Sites(1, 4, "float32", (0, 2)))
    session = _request("session", asked=asked, num_prompt=2)
    session.all_token_ids, session.get_finished_reason = [5, 6, 7, 8, 9], lambda: "abort"
    session.prompt_token_ids, session.output_token_ids = [5, 6, 7, 8], [9]
    scheduling._add_to_scheduler(Scheduler.enqueue, scheduler, session)
    step(scheduler, new=["session"])
    end(scheduler, "session")
    news = step(scheduler, finished=["session"])
    assert news.ended == {"session": Ended((7, 8, 9), "abort")}


def test_new_scales_are_told_with_the_next_step_unless_their_token_is_computed_already(scheduler):
    for name in ("in time", "late", "ended"):
        add(scheduler, name, 1)
        scheduler.requests[name].num_computed_tokens = 10
    changes = (10, {"e": 2.0}), (12, {"e": 3.0})
    told = {"in time": changes[:1], "late": ((9, {"e": 1.0}),), "ended": changes, "gone": changes}
    told = {name: Judged(scales=scales) for name, scales in told.items()}
    assert tell_workers(scheduler, told) == {"late"}
    assert tell_workers(scheduler, {"in time": Judged(scales=changes[1:])}) == set()
    end(scheduler, "ended")
    assert step(scheduler).scales == {"in time": changes}
    assert step(scheduler) is None


def test_if_the_first_in_line_ends_those_behind_it_enter(scheduler):
    for name, size in (("a", 3), ("b", 3), ("c", 1)):
        add(scheduler, name, size)
    scheduling._finish(Scheduler.finish, scheduler, "b", "aborted")
    assert scheduler.finished == ["b"]
    assert scheduler.added == ["a", "b", "c"]


def test_without_edits_no_admission_is_kept(scheduler):
    add(scheduler, "plain", None)
    end(scheduler, "plain")
    scheduling._finish(Scheduler.finish, scheduler, "plain", "aborted")
    assert scheduling.admission_of(scheduler) is None


@pytest.mark.parametrize(
    ("ended", "finished", "added"),
    [
        pytest.param("b", ["b"], ["a", "b"], id="one-that-waits"),
        pytest.param(["b", "a"], ["b", "a"], ["a", "b", "c"], id="one-of-each"),
        pytest.param({"c"}, ["c"], ["a", "c"], id="the-last-in-line"),
        pytest.param(None, ["a", "b", "c"], ["a", "b", "c"], id="all"),
        pytest.param("nobody", [], ["a"], id="nobody"),
    ],
)
def test_requests_that_wait_end_as_others_do(ended, finished, added, scheduler):
    for name in "abc":
        add(scheduler, name, 3)
    scheduling._finish(Scheduler.finish, scheduler, ended, "aborted")
    assert sorted(scheduler.finished) == sorted(finished)
    assert sorted(scheduler.added) == sorted(added)
    waiting = [request.request_id for request in scheduler.admission.waiting]
    assert waiting == [name for name in "abc" if name not in added]


def test_a_generator_of_requests_is_ended_whole(scheduler):
    for name in "abc":
        add(scheduler, name, 3)
    scheduling._finish(Scheduler.finish, scheduler, (name for name in "ab"), "aborted")
    assert sorted(scheduler.finished) == ["a", "b"]
    assert scheduler.added[-1] == "c"


@given(st.data())
def test_running_requests_always_fit_and_all_requests_run_in_the_end(data):
    most = Cost(4)
    scheduler, before = Scheduler(most), scheduling._enqueue
    scheduling._enqueue = Scheduler.enqueue
    try:
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
        names = [f"{i}-{size}" for i, size in enumerate(sizes)]
        for name, size in zip(names, sizes, strict=True):
            add(scheduler, name, size)
            if scheduler.requests and data.draw(st.booleans()):
                end(scheduler, data.draw(st.sampled_from(sorted(scheduler.requests))))
            running = sum(int(name.split("-")[1]) for name in scheduler.requests)
            assert running <= most.vectors
        while scheduler.requests:
            end(scheduler, next(iter(scheduler.requests)))
        assert scheduler.added == names
        assert not scheduler.admission.waiting
    finally:
        scheduling._enqueue = before
