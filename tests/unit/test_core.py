"""The scheduler's side: what is stamped on requests, how their KV is keyed, when there is
room. What is vLLM's own here is replaced by as little as the seams need."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope import Add, CapacityError, Probe, Read, Replace, Spec, SpecError, scope
from vllm_scope.arrays import Array
from vllm_scope.compile import BlockKeys
from vllm_scope.engine import core
from vllm_scope.engine.core import HANDLE, CoreScope, handle_of
from vllm_scope.engine.model import foreign_connector
from vllm_scope.ledger import Ledger
from vllm_scope.plan import OVERSHOOT
from vllm_scope.program import OP_ADD, Cost, Op, Program, assemble
from vllm_scope.registry import Registry
from vllm_scope.resolve import Resolved
from vllm_scope.sites import Sites
from vllm_scope.tap.tables import capacity
from vllm_scope.vectors import SteeringModule, to_bytes

SITES = Sites(2, 4, "float32", (0, 2, 4))
V, W = [1.0, 2.0, 0.0, -1.0], [0.0, 3.0, 0.0, 4.0]


def _module(vector: list[float]) -> bytes:
    return to_bytes(SteeringModule({("resid_post", 0): vector}))


def _core(most: Cost | None = None) -> CoreScope:
    """As its constructor leaves it."""
    made = CoreScope.__new__(CoreScope)
    made.sites, made.registry = SITES, Registry(SITES)
    made.most = most or Cost(100, 100, 100)
    made.everywhere, made.connector = Resolved(), None
    return made


def _request(*actions: Any, name: str = "r", num_prompt: int = 8, vectors: bool = True):
    """A request as it enters; without actions a plain one."""
    extra: dict[str, Any] = {"mine": 1}
    if actions:
        handle = {"key": 5, "frontend": "f", "first_position": None, "vectors": vectors}
        extra |= scope(*actions) | {HANDLE: handle}
    params = SimpleNamespace(extra_args=extra, max_tokens=10)
    return SimpleNamespace(
        request_id=name, sampling_params=params, prompt_token_ids=[1] * num_prompt
    )


# What a request is given when it enters


def test_a_request_takes_with_it_what_names_and_the_servers_edits_mean():
    engine = _core()
    digest = engine.registry.register("m", _module(V))
    engine.registry.register("other", _module(W))
    server = engine.registry.set_edits(scope(Add(W, layer=1))["scope"])
    request = _request(Add("m"), Read("embed"))
    before = request.sampling_params
    entry = engine.stamp(request)
    handle = handle_of(request.sampling_params)
    assert handle["modules"] == {"m": digest}
    assert handle["server"] == server
    assert Cost.of(entry.programs) == Cost(2, 1, 3)
    assert (handle["key"], handle["frontend"]) == (5, "f")
    # The caller's own parameters are as they were.
    assert "modules" not in before.extra_args[HANDLE]
    assert request.sampling_params is not before
    assert request.sampling_params.extra_args["mine"] == 1


def test_requests_that_touch_no_vector_enter_as_they_are():
    engine = _core()
    for request in (_request(), _request(Read("embed"), vectors=False)):
        before = request.sampling_params
        assert engine.stamp(request) is None
        assert request.sampling_params is before
    pooling = SimpleNamespace(request_id="p", sampling_params=None, prompt_token_ids=[1])
    assert engine.stamp(pooling) is None


def test_the_servers_edits_are_stamped_on_plain_requests_too():
    engine = _core()
    server = engine.registry.set_edits(scope(Add(W, layer=1))["scope"])
    request = _request()
    entry = engine.stamp(request)
    handle = handle_of(request.sampling_params)
    assert handle == {"server": server, "modules": {}}
    assert Cost.of(entry.programs) == Cost(1, 1, 1)
    assert entry.keys.key(0, 4) is not None
    engine.registry.set_edits(None)
    assert engine.stamp(_request()) is None


def test_prompt_embeddings_enter_as_they_are_and_are_never_edited():
    engine = _core()
    engine.everywhere = Spec((Read("embed"),)).resolve(SITES)
    request = _request()
    request.prompt_token_ids = None
    before = request.sampling_params
    assert engine.stamp(request) is None
    assert request.sampling_params is before
    engine.registry.set_edits(scope(Add(W, layer=1))["scope"])
    with pytest.raises(SpecError, match="prompt embeddings cannot be edited; send text"):
        engine.stamp(request)
    pooling = SimpleNamespace(request_id="p", sampling_params=None, prompt_token_ids=None)
    assert engine.stamp(pooling) is None


def test_the_cost_counts_the_positions_that_a_step_may_overshoot():
    engine = _core()
    last = 8 + 10 + OVERSHOOT - 1
    for position, cost in ((last, Cost(1, 1, 1)), (last + 1, Cost())):
        entry = engine.stamp(_request(Add(V, layer=0, tokens=[position])))
        assert Cost.of(entry.programs) == cost


@pytest.mark.parametrize(
    ("action", "error", "words"),
    [
        pytest.param(Add("m"), SpecError, "'m', which this engine does not hold", id="gone"),
        pytest.param(
            Replace(np.arange(1.0, 25.0).reshape(6, 4), range(6), layer=0), CapacityError,
            "this engine has", id="too-large",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_any_more_is_refused_as_it_enters(action, error, words):
    engine = _core(Cost(5, 5, 5))
    with pytest.raises(error, match=words):
        engine.stamp(_request(action))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_edits_of_the_server_are_refused_where_no_request_could_hold_them(count):
    engine = _core(Cost(3, 5, 10))
    vectors = [[float(i + 1)] * 4 for i in range(count)]
    text = scope(*(Add(vector, layer=0, tokens="generated") for vector in vectors))["scope"]
    if count <= 3:
        engine.check_edits(text)
    else:
        with pytest.raises(SpecError, match=r"take 4 vectors, .* has 3 vectors, "):
            engine.check_edits(text)
    assert engine.registry.server is None


# KV blocks


class _EngineCore(SimpleNamespace):
    """The part of vLLM's EngineCore that the seams touch."""


def _preprocess(engine: _EngineCore, request: Any, num_blocks: int = 4) -> tuple[Any, list]:
    """vLLM makes its own request of what came, and hashes its blocks while it does."""
    made = SimpleNamespace(request_id=request.request_id)
    hashed = []

    def original(self, came):
        assert self is engine
        hashed.extend(_extra_keys(made, 4 * b, 4 * b + 4) for b in range(num_blocks))
        return made, 0

    found, _ = core._preprocess(original, engine, request)
    assert found is made
    assert core._entering == {}
    return made, hashed


def _extra_keys(request: Any, start: int, stop: int, own: tuple | None = None) -> Any:
    """What vLLM hashes into a block, beside its tokens."""
    found, following = core._extra_keys(lambda *_: (own, 7), request, start, stop, 0)
    assert following == 7
    return found


def test_edited_blocks_are_keyed_from_their_first_hash_on():
    engine = _EngineCore(scope=_core())
    action = Add(V, layer=0, tokens=[5, 9])
    made, hashed = _preprocess(engine, _request(action))
    (edit,) = _resolved(action)
    keys = BlockKeys((edit,), 8, np.ones(8, np.int64))
    expected = [keys.key(4 * b, 4 * b + 4) for b in range(4)]
    assert [key is None for key in expected] == [True, False, False, True]
    assert hashed == [None if key is None else (("scope", key),) for key in expected]
    # And so are the blocks that are hashed while it runs.
    assert _extra_keys(made, 8, 12) == (("scope", expected[2]),)
    assert Cost.of(made.scope_programs) == Cost(1, 1, 1)


def test_a_request_that_only_probes_holds_places_and_keys_no_block():
    engine = _EngineCore(scope=_core())
    made, hashed = _preprocess(engine, _request(Probe(V, layer=0, name="p")))
    assert hashed == [None] * 4
    assert Cost.of(made.scope_programs) == Cost(1, 1, 1)


def _resolved(action):
    return Spec(edits=(action,)).resolve(SITES).edits


def test_vllms_own_keys_stay_beside_the_edits():
    engine = _EngineCore(scope=_core())
    made, _ = _preprocess(engine, _request(Add(V, layer=0)))
    own = ("lora-a", "salt")
    assert _extra_keys(made, 0, 4, own)[:2] == own
    assert _extra_keys(made, 0, 4, own)[2][0] == "scope"


def test_plain_requests_share_blocks_as_ever():
    engine = _EngineCore(scope=_core())
    for request in (_request(), _request(Read("embed"), vectors=False)):
        made, hashed = _preprocess(engine, request)
        assert hashed == [None] * 4
        assert not hasattr(made, "scope_keys")
        assert _extra_keys(made, 0, 4, ("salt",)) == ("salt",)


def test_until_something_is_asked_nothing_is_set_up(monkeypatch):
    monkeypatch.setattr(core, "CoreScope", lambda config: pytest.fail("set up"))
    engine = _EngineCore(vllm_config=SimpleNamespace(additional_config={}))
    _preprocess(engine, _request())
    assert not hasattr(engine, "scope")


def test_a_request_that_fails_while_it_enters_leaves_nothing_behind():
    engine = _EngineCore(scope=_core())

    def original(self, request):
        raise RuntimeError("vLLM refused it")

    with pytest.raises(RuntimeError):
        core._preprocess(original, engine, _request(Add(V, layer=0)))
    assert core._entering == {}


def test_the_scheduler_hears_of_names_before_any_worker():
    engine = _EngineCore(scope=_core())
    heard = []

    def original(self, method, timeout, args, kwargs):
        heard.append((method, args, len(self.scope.registry.names)))
        return ["answer"]

    def call(method, *args, **kwargs):
        return core._collective_rpc(original, engine, method, None, args, kwargs)

    assert call("scope_register", "m", _module(V)) == ["answer"]
    with pytest.raises(SpecError):
        call("scope_register", "m", b"noise")
    call("scope_set_edits", text=scope(Add(V, layer=0))["scope"])
    call("anything", 1)
    call("scope_unregister", "m")
    methods = ["scope_register", "scope_set_edits", "anything", "scope_unregister"]
    assert [(m, n) for m, _, n in heard] == list(zip(methods, [1, 1, 1, 0], strict=True))
    assert engine.scope.registry.server is not None


def test_what_a_worker_refuses_the_scheduler_takes_back():
    engine = _EngineCore(scope=_core())
    held = engine.scope.registry
    before = held.register("m", _module(V)), held.set_edits(scope(Add(V, layer=0))["scope"])

    def original(self, method, timeout, args, kwargs):
        raise RuntimeError("a worker refused")

    for method, args in (
        ("scope_register", ("m", _module(W))),
        ("scope_register", ("new", _module(W))),
        ("scope_unregister", ("m",)),
        ("scope_set_edits", (None,)),
        ("scope_set_edits", (scope(Add(W, layer=0))["scope"],)),
    ):
        with pytest.raises(RuntimeError, match="a worker refused"):
            core._collective_rpc(original, engine, method, None, args, None)
        assert held.names == {"m": before[0]}
        assert held.server == before[1]
        assert held.server_text == scope(Add(V, layer=0))["scope"]


def test_two_threads_share_one_registry(monkeypatch):
    def slow(config):
        time.sleep(0.2)
        return _core()

    monkeypatch.setattr(core, "CoreScope", slow)
    engine = _EngineCore(vllm_config=None)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(core._scope_of, [engine, engine])
    assert first is second is engine.scope


def _transfer(name: str | None, path: str | None = None) -> SimpleNamespace:
    found = SimpleNamespace(kv_connector=name, kv_connector_module_path=path)
    return SimpleNamespace(kv_transfer_config=found)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(SimpleNamespace(kv_transfer_config=None), None, id="none"),
        pytest.param(_transfer(None), None, id="unnamed"),
        pytest.param(_transfer("OffloadingConnector"), None, id="by-hash"),
        pytest.param(_transfer("OffloadingConnector", "mine"), "OffloadingConnector", id="other"),
        pytest.param(_transfer("LMCacheConnectorV1"), "LMCacheConnectorV1", id="by-tokens"),
        pytest.param(_transfer("MultiConnector"), "MultiConnector", id="several"),
    ],
)
def test_connectors_that_do_not_key_by_block_hashes_are_known(config, name):
    assert foreign_connector(config) == name


def test_edited_kv_is_never_shared_under_plain_tokens():
    engine = _core()
    engine.connector = "LMCacheConnectorV1"
    text = scope(Add(V, layer=0))["scope"]
    for refused in (
        lambda: engine.stamp(_request(Add(V, layer=0))),
        lambda: engine.check_edits(text),
    ):
        with pytest.raises(SpecError, match=r"through 'LMCacheConnectorV1'.* edits need"):
            refused()
    engine.check_edits(None)
    assert engine.stamp(_request(Probe(V, layer=0, name="p"))).keys is None
    assert engine.stamp(_request(Read("embed"), vectors=False)) is None


@pytest.mark.parametrize(
    ("first_position", "cap"),
    [(None, 100), (0, 0), (7, 7), (200, 100)],
    ids=["reads-nothing", "all", "from-7", "past-the-prompt"],
)
def test_a_reading_request_hits_the_cache_below_its_first_position_only(first_position, cap):
    asked = []

    class Coordinator:
        num_groups = 3

        def find_longest_cache_hit(self, hashes, most):
            asked.append((hashes, most))
            return "hit"

    coordinator = Coordinator()
    manager = SimpleNamespace(coordinator=coordinator)

    def original(self, request):
        assert self.coordinator.num_groups == 3
        return self.coordinator.find_longest_cache_hit("hashes", 100)

    request = _request(Read("embed"))
    request.sampling_params.extra_args[HANDLE]["first_position"] = first_position
    assert core._get_computed_blocks(original, manager, request) == "hit"
    assert asked == [("hashes", cap)]
    assert manager.coordinator is coordinator


# Room


@dataclass
class Scheduler:
    """vLLM's scheduler, as far as the seams know it."""

    most: Cost
    added: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    requests: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hidden_size = 4
        additional = {"scope": {"vectors_mib": self.most.vectors * 4 * hidden_size / 2**20}}
        self.vllm_config = SimpleNamespace(
            additional_config=additional,
            model_config=SimpleNamespace(get_hidden_size=lambda: hidden_size),
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
    def ledger(self) -> Ledger:
        return self.scope_ledger  # type: ignore[attr-defined, no-any-return]


def _adding(name: str, num_vectors: int) -> Program:
    """A program whose vectors no request of another name has."""
    rows = [f"{name}-{i}".encode().ljust(16, b" ") for i in range(num_vectors)]
    return assemble((), {}, {(0, 0): [Op(OP_ADD, 0, Array((4,), row), 1.0) for row in rows]})


def add(
    scheduler: Scheduler, name: str, num_vectors: int | None, content: str | None = None
) -> None:
    request = _request(name=name)
    if num_vectors:
        request.scope_programs = (_adding(content or name, num_vectors),)
    core._add_to_scheduler(Scheduler.enqueue, scheduler, request)


def end(scheduler: Scheduler, name: str) -> None:
    request = scheduler.requests.pop(name)
    assert core._free(Scheduler.free, scheduler, request) == f"freed {name}"


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    monkeypatch.setattr(core, "_enqueue", Scheduler.enqueue)
    return Scheduler(Cost(4))


def test_requests_that_do_not_fit_wait_first_come_first_served(scheduler):
    for name, size in (("a", 3), ("b", 2), ("c", 1), ("plain", None)):
        add(scheduler, name, size)
    # "c" would fit, but does not overtake.
    assert scheduler.added == ["a", "plain"]
    assert scheduler.ledger.num_waited == 2
    end(scheduler, "plain")
    assert scheduler.added == ["a", "plain"]
    end(scheduler, "a")
    assert scheduler.added == ["a", "plain", "b", "c"]
    add(scheduler, "d", 1)
    assert scheduler.added[-1] == "d"
    assert scheduler.ledger.most == capacity(4, 4 * 16 / 2**20)


def test_equal_vectors_have_one_place_and_nobody_waits_for_them(scheduler):
    for i in range(9):
        add(scheduler, f"same-{i}", 3, content="same")
    add(scheduler, "other", 2)
    assert scheduler.added == [f"same-{i}" for i in range(9)]
    for i in range(8):
        end(scheduler, f"same-{i}")
        assert scheduler.added[-1] != "other"
    end(scheduler, "same-8")
    assert scheduler.added[-1] == "other"


def test_one_that_fills_everything_runs_alone(scheduler):
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


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("began", "came"), [(None, {"server": "b"}), ({"server": "a"}, None),
                                            ({"server": "a"}, {"server": "b"})])  # fmt: skip
def test_a_session_keeps_what_it_entered_with(began, came, waits, scheduler):
    def piece(handle):
        request = _request(name="session")
        if handle is not None:
            request.sampling_params.extra_args[HANDLE] = handle
        if waits:
            request.scope_programs = (_adding("session", 2),)
        return request

    if waits:
        add(scheduler, "fills", 4)
    core._add_to_scheduler(Scheduler.enqueue, scheduler, piece(began))
    second = piece(came)
    before = second.sampling_params
    core._add_to_scheduler(Scheduler.enqueue, scheduler, second)
    if waits:
        end(scheduler, "fills")
    assert scheduler.added[-2:] == ["session", "session"]
    assert handle_of(second.sampling_params) == began
    assert second.sampling_params.extra_args["mine"] == 1
    assert handle_of(before) == came, "the caller's own parameters are as they were"


def test_where_the_first_in_line_is_ended_those_behind_it_are_let_in(scheduler):
    for name, size in (("a", 3), ("b", 3), ("c", 1)):
        add(scheduler, name, size)
    core._finish(Scheduler.finish, scheduler, "b", "aborted")
    assert scheduler.finished == ["b"]
    assert scheduler.added == ["a", "b", "c"]


def test_to_let_one_in_takes_as_long_whatever_is_held():
    ledger, took = Ledger(Cost(1 << 20, 1 << 20, 1 << 20)), []
    for i in range(512):
        program = _adding(f"r{i}", 64)
        started = time.perf_counter()
        assert ledger.admit(str(i), (program,))
        took.append(time.perf_counter() - started)
    assert ledger.held.vectors == 64 * 512
    assert statistics.median(took[-64:]) < 5 * statistics.median(took[:64])


def test_without_edits_no_ledger_is_kept(scheduler):
    add(scheduler, "plain", None)
    end(scheduler, "plain")
    core._finish(Scheduler.finish, scheduler, "plain", "aborted")
    assert not hasattr(scheduler, "scope_ledger")


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
    core._finish(Scheduler.finish, scheduler, ended, "aborted")
    assert sorted(scheduler.finished) == sorted(finished)
    assert sorted(scheduler.added) == sorted(added)
    waiting = [request.request_id for request in scheduler.ledger.waiting]
    assert waiting == [name for name in "abc" if name not in added]


def test_a_generator_of_requests_is_ended_whole(scheduler):
    for name in "abc":
        add(scheduler, name, 3)
    core._finish(Scheduler.finish, scheduler, (name for name in "ab"), "aborted")
    assert sorted(scheduler.finished) == ["a", "b"]
    assert scheduler.added[-1] == "c"


@given(st.data())
def test_what_runs_always_fits_and_all_run_in_the_end(data):
    most = Cost(4)
    scheduler, before = Scheduler(most), core._enqueue
    core._enqueue = Scheduler.enqueue
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
        assert not scheduler.ledger.waiting
    finally:
        core._enqueue = before
