"""Rows put together by label, in whatever order and number they come."""

from __future__ import annotations

import gc
import pickle
import random
import time
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.delivered import banks_of
from tests.unit.oracle import named_point, scores_of
from tests.unit.roads import SITES, Road, numbers_of
from tests.unit.strategies import VOCAB, is_selected, specs
from vllm_scope import Read, Spec, Union
from vllm_scope.program.layout import Layout
from vllm_scope.request.heads import Head
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.selectors import Selector
from vllm_scope.request.sites import boundary_of_point, point_of
from vllm_scope.results.buffer import Pending
from vllm_scope.results.inbox import Inbox
from vllm_scope.results.result import ScopeResult
from vllm_scope.results.table import ArrivedParts
from vllm_scope.sinks import Manifest
from vllm_scope.transport.ring import HostRing
from vllm_scope.transport.senders import SharedSender

PATIENCE_S = 10


@dataclass
class Sent:
    """What the workers sent for one request, and what its caller should see."""

    spec: Spec
    prompt: list[int]
    output: list[int]
    pending: Pending
    #: (point, position) -> number of the row that was sent last.
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    #: (bank, point, position) -> number of the computation that was sent last.
    scores: dict[tuple[Head, int, int], int] = field(default_factory=dict)

    @property
    def asked(self) -> Resolved:
        return self.pending.asked

    @property
    def num_processed(self) -> int:
        return len(self.prompt) + max(len(self.output) - 1, 0)

    def delivers(self, boundaries: set[int]) -> Layout:
        """All that any token may deliver at some boundaries."""
        points = {
            named_point(SITES, stream, read.when)
            for read in self.asked.reads
            for stream in read.streams
            if stream.boundary in boundaries
        }
        banks = (
            (bank, tuple(p for p in some if boundary_of_point(p) in boundaries))
            for bank, some in banks_of(self.asked)
        )
        return Layout(tuple(sorted(points)), tuple((bank, some) for bank, some in banks if some))

    def wanted(self, selectors: list[Selector]) -> list[int]:
        ids = [*self.prompt, *self.output]
        return [
            position
            for position in range(self.num_processed)
            if any(
                is_selected(
                    selector.to_json(), position, len(self.prompt),
                    ids[position], self.num_processed,
                )
                for selector in selectors
            )
        ]  # fmt: skip

    def streams(self) -> dict[tuple[str, int, str], list[Selector]]:
        """What was asked for, by the key of the result."""
        found: dict[tuple[str, int, str], list[Selector]] = {}
        for read in self.asked.reads:
            for stream in read.streams:
                found.setdefault((*stream, read.when), []).append(read.tokens)
        return found


@given(st.lists(specs(SITES.num_layers), min_size=1, max_size=3), st.integers(0, 1 << 30))
def test_any_interleaving_gives_each_wanted_row_and_score_once(road, asked, seed):
    rng = random.Random(seed)
    sent = []
    for spec in asked:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
        max_tokens = max(len(output), rng.randint(1, 200))
        pending = road.inbox.open(spec.resolve(SITES), SITES, prompt, max_tokens, 2)
        sent.append(Sent(spec, prompt, output, pending))
    split = rng.choice([0, 2, 3])  # boundaries up to it are on the first stage
    missing = rng.random() < 0.3

    # Every position at least once on each stage, some twice and some past the end.
    due: dict[int, list[tuple[Sent, int]]] = {0: [], 1: []}
    for tokens in due.values():
        for one in sent:
            positions = list(range(one.num_processed + rng.randint(0, 3)))
            positions += rng.choices(positions, k=rng.randint(0, 4))
            if rng.random() < 0.5:
                rng.shuffle(positions)
            tokens += [(one, p) for p in positions if not (missing and rng.random() < 0.1)]
        if rng.random() < 0.5:
            rng.shuffle(tokens)
    number = 0
    while any(due.values()):
        stage = rng.choice([s for s, tokens in due.items() if tokens])
        here = [b for b in SITES.boundaries if (b <= split) == (stage == 0)]
        boundary = rng.choice([None, None, *here])
        step, due[stage] = due[stage][:6], due[stage][6:]
        tokens = []
        for one, position in step:
            number += 1
            # What a token delivers follows from its position; it may be more than was asked.
            layout = one.delivers(set(here) if position % 3 else set(here[: 1 + position % 2]))
            tokens.append((one.pending.key, position, layout, number))
            came = layout if boundary is None else layout.at(boundary)
            one.rows |= {(point, position): number for point in came.points}
            one.scores |= {(b, p, position): number for b, some in came.encoded for p in some}
        tokens.insert(rng.randint(0, len(tokens)), (-1, 0, tuple(here), 0))  # of nobody
        road.send(tokens, boundary)
    for one in sent:
        road.finish(one.pending, num_stages=2)

    for one in sent:
        result = one.pending.snapshot(one.output, "length")
        expected = delivered = 0
        assert set(result.keys()) == {key[:2] for key in one.streams()}
        for key, selectors in one.streams().items():
            point = named_point(SITES, key[:2], key[2])
            wanted = one.wanted(selectors)
            arrived = [p for p in wanted if (point, p) in one.rows]
            expected, delivered = expected + len(wanted), delivered + len(arrived)
            assert result.positions(*key).tolist() == arrived
            assert result[key].tolist() == [[p, point, one.rows[point, p], 7] for p in arrived]
            assert result[key].shape == (len(arrived), SITES.hidden_size)
        assert list(result.scores) == [probe.name for probe in one.asked.probes]
        for probe in one.asked.probes:
            wanted = one.wanted([probe.tokens])
            cells = {cell.place.point(): cell.bank for cell in probe.cells}
            # A score is there once the numbers of all its layers are.
            arrived = [
                p for p in wanted if all((b, at, p) in one.scores for at, b in cells.items())
            ]
            expected, delivered = expected + len(wanted), delivered + len(arrived)
            assert result.scores.positions(probe.name).tolist() == arrived
            numbers = torch.empty((len(arrived), probe.num_values))
            for i, p in enumerate(arrived):
                numbers[i] = numbers_of(probe, p, lambda at: one.scores[cells[at], at, p])  # noqa: B023
            if probe.pools:
                scores = torch.tensor(scores_of(probe, numbers), dtype=torch.float32)
                torch.testing.assert_close(result.scores[probe.name], scores)
            else:
                assert torch.equal(result.scores[probe.name], numbers[:, 0] + probe.bias)
        assert (result.expected, result.delivered) == (expected, delivered)
        assert result.dropped == expected - delivered
        assert result.status == ("complete" if expected == delivered else "incomplete")


def test_a_position_computed_again_keeps_its_last_row(road):
    pending = road.open("embed")
    road.send([(pending.key, p, (0,), 1) for p in (0, 1, 2)])
    road.send([(pending.key, p, (0,), 2) for p in (0, 1)])
    road.send([(pending.key, 1, (0,), 3)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert result["embed"][:, 2].tolist() == [2, 3, 1]
    assert result.status == "complete"


def test_a_missing_row_is_counted_and_reported(road):
    pending = road.open(Read("resid_post", layers=[0, 1]))
    road.send([(pending.key, p, (2, 4), 0) for p in (0, 2)])
    road.send([(pending.key, 1, (2,), 0)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert (result.expected, result.delivered, result.dropped) == (6, 5, 1)
    assert result.status == "incomplete"
    assert result.positions("resid_post", 0).tolist() == [0, 1, 2]
    assert result.positions("resid_post", 1).tolist() == [0, 2]
    assert repr(result) == "ScopeResult(incomplete, 2 streams, 0 probes, 5 of 6 values)"


def test_a_request_without_a_single_row_has_empty_tensors(road):
    pending = road.open("embed")
    road.finish(pending)
    result = pending.snapshot([5], "length")
    assert result["embed"].shape == (0, 4)
    assert result["embed"].dtype == torch.float32
    assert result.positions("embed").tolist() == []
    assert result.status == "incomplete"


@pytest.mark.parametrize(
    ("finish_reason", "finished", "error", "status"),
    [
        pytest.param(None, False, None, "streaming", id="running"),
        pytest.param("length", True, None, "complete", id="length"),
        pytest.param("stop", True, None, "complete", id="stop"),
        pytest.param("stop", False, None, "incomplete", id="workers-were-too-slow"),
        pytest.param("abort", True, None, "aborted", id="abort"),
        pytest.param("stop", True, "no room", "failed", id="a-worker-refused"),
        pytest.param(None, True, "no room", "failed", id="a-worker-refused-while-running"),
    ],
)
def test_the_status_says_how_the_request_ended(road, finish_reason, finished, error, status):
    pending = road.open("embed")
    road.send([(pending.key, p, (0,), 0) for p in (0, 1, 2)])
    if finished:
        road.finish(pending, error=error)
    road.settle()
    result = pending.snapshot([5], finish_reason)
    assert result.status == status
    assert result.error == error


def test_a_request_is_done_when_its_last_stage_is(road):
    pending = road.open("embed", num_stages=3)
    for stage in (2, 0, 0, 2):
        road.sender.send_finish(pending.key, stage, None)
    road.settle()
    assert not pending.done.done()
    road.sender.send_finish(pending.key, 1, None)
    pending.done.result(PATIENCE_S)


def test_stages_that_hold_different_boundaries_are_one_result(road):
    pending = road.open("embed", Read("resid_post"), num_stages=2)
    road.send([(pending.key, p, (4, 6), 20) for p in (0, 1, 2)])
    road.send([(pending.key, p, (0, 2), 10) for p in (0, 1, 2)])
    road.finish(pending, num_stages=2)
    result = pending.snapshot([5], "stop")
    assert [result[s][0, 1:3].tolist() for s in result.keys()] == [
        [point_of(0, 1), 10], [point_of(2, 1), 10], [point_of(4, 1), 20], [point_of(6, 1), 20],
    ]  # fmt: skip
    assert result.status == "complete"


def test_one_boundary_asked_under_two_names_keeps_the_tokens_of_each(road):
    pending = road.open(
        Read("resid_post", layers=[0], tokens=[0]),
        Read("resid_pre", layers=[1], tokens="last_prompt"),
    )
    exit_, entry = point_of(2, 1), point_of(2, 2)
    layouts = [Layout((exit_,)), Layout(), Layout((entry,))]
    road.send([(pending.key, p, layouts[p], 0) for p in (0, 2)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert result.positions("resid_post", 0).tolist() == [0]
    assert result.positions("resid_pre", 1).tolist() == [2]
    assert (result.expected, result.delivered, result.status) == (2, 2, "complete")


def test_a_snapshot_stays_as_it_was_while_rows_keep_coming(road):
    pending = road.open(Read("embed", tokens=Union("all", "last")))
    road.send([(pending.key, p, (0,), 1) for p in (0, 1, 2)])
    road.settle()
    early = pending.snapshot([5], None)
    road.send([(pending.key, p, (0,), 2) for p in (2, 3)])
    road.finish(pending)
    late = pending.snapshot([5, 6], "stop")
    assert early.status == "streaming"
    assert early.positions("embed").tolist() == [0, 1, 2]
    assert early["embed"][:, 2].tolist() == [1, 1, 1]
    assert late.positions("embed").tolist() == [0, 1, 2, 3]
    assert late["embed"][:, 2].tolist() == [1, 1, 2, 2]


def test_a_snapshot_during_which_the_values_are_lost_says_why(road, monkeypatch):
    pending = road.open(Read("embed"))

    class Parts(ArrivedParts):
        """Another thread drops the values just before they are taken."""

        def __init__(self, tables) -> None:
            pending.lose("they came too late", over=True)
            super().__init__({})

    monkeypatch.setattr("vllm_scope.results.buffer.ArrivedParts", Parts)
    result = pending.snapshot([5], "length")
    assert (result.status, result.error) == ("failed", "they came too late")


@pytest.mark.parametrize("status", ["ok", "error"])
def test_an_error_of_the_request_comes_before_those_of_its_sinks(road, status):
    pending = road.open(Read("embed"))
    pending.manifests = {"files": Manifest(status, "no room", 3, 0, 3)}
    reason = "no room" if status == "error" else None
    assert pending.snapshot([5], None).error == reason
    pending.error = "its own"
    assert pending.snapshot([5], None).error == "its own"


def test_a_streaming_result_counts_only_what_cannot_change(road):
    pending = road.open(
        Read("embed", tokens="last"), Read("resid_post", layers=[0], tokens="generated")
    )
    road.send([(pending.key, p, (0, 2), 0) for p in (0, 1, 2, 3)])
    road.settle()
    running = pending.snapshot([5, 6], None)
    assert running.positions("embed").tolist() == []  # who is last is not known yet
    assert running.positions("resid_post", 0).tolist() == [3]
    assert (running.expected, running.delivered, running.dropped) == (1, 1, 0)
    # Rows that are still on their way are not dropped.
    behind = pending.snapshot([5, 6, 7], None)
    assert (behind.expected, behind.delivered, behind.dropped) == (2, 1, 0)
    road.finish(pending)
    ended = pending.snapshot([5, 6], "length")
    assert ended.positions("embed").tolist() == [3]
    assert ended.status == "complete"


def _full(road: Road) -> tuple[Pending, ScopeResult]:
    pending = road.open("embed", Read("resid_post", layers=[1]), max_tokens=4000)
    road.send([(pending.key, p, (0, 4), 7) for p in (0, 1, 2)] + [(-1, 0, (2,), 0)] * 5000)
    road.finish(pending)
    return pending, pending.snapshot([5], "stop")


def test_a_pickled_result_is_the_same_result(road):
    _, result = _full(road)
    text = pickle.dumps(result)
    again = pickle.loads(text)
    for stream in result.keys():
        assert torch.equal(again[stream], result[stream])
        assert torch.equal(again.positions(*stream), result.positions(*stream))
    assert repr(again) == repr(result)
    assert again.keys() == result.keys()
    assert len(text) < 5000, "rows of other requests were pickled too"


def test_a_result_is_the_callers_after_its_request_and_the_ring_went_on(road):
    pending, result = _full(road)
    del pending
    gc.collect()
    for _ in range(3):  # the ring comes round
        road.send([(-1, 0, (0, 2, 4, 6), 0)] * (road.ring.num_slots // 4 // 2))
    road.settle()
    assert result["resid_post", 1].tolist() == [[p, point_of(4, 1), 7, 7] for p in (0, 1, 2)]
    assert (result.expected, result.delivered, result.status) == (6, 6, "complete")


@pytest.mark.parametrize("num_tokens", [1, 500, 5000], ids=["short", "longer", "longer-than-room"])
@pytest.mark.parametrize("tap_by_tap", [False, True], ids=["whole-programs", "tap-by-tap"])
def test_a_result_grows_with_its_request(num_tokens, tap_by_tap, road):
    pending = road.open(
        "embed", Read("resid_post", layers=[1]), num_prompt=2, max_tokens=num_tokens
    )
    road.send([(pending.key, p, (0, 4), p) for p in (0, 1)])
    road.settle()
    early = pending.snapshot([], None)
    for first in range(2, num_tokens + 1, 97):
        step = [(pending.key, p, (0, 4), p) for p in range(first, min(first + 97, num_tokens + 1))]
        for tap in (0, 4) if tap_by_tap else (None,):
            road.send(step, tap)
    road.finish(pending)
    result = pending.snapshot([1] * num_tokens, "length")
    assert result.status == "complete"
    for stream, boundary in ((("embed", 0), 0), (("resid_post", 1), 4)):
        assert result[stream].tolist() == [
            [p, point_of(boundary, 1), p, 7] for p in range(num_tokens + 1)
        ]
        assert early[stream].tolist() == [[p, point_of(boundary, 1), p, 7] for p in range(2)]


def test_a_result_may_be_looked_at_before_the_first_of_its_taps_has_come(road):
    # Drained tap by tap, a batch of the embedding names also who reads another tap only.
    pending = road.open(Read("resid_post", layers=[1]))
    road.send([(pending.key, p, (4,), 1) for p in (0, 1, 2)], boundary=0)
    road.settle()
    assert pending.snapshot([], None)["resid_post", 1].shape == (0, SITES.hidden_size)
    road.send([(pending.key, p, (4,), 1) for p in (0, 1, 2)], boundary=4)
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert result["resid_post", 1].tolist() == [[p, point_of(4, 1), 1, 7] for p in (0, 1, 2)]
    assert result.status == "complete"


@pytest.mark.parametrize("lost", [0, 4], ids=["the-first", "the-second"])
def test_a_tap_whose_rows_were_lost_leaves_the_others_in_their_places(lost, road):
    pending = road.open("embed", Read("resid_post", layers=[1]))
    road.send([(pending.key, p, (0, 4), 1) for p in (0, 1)], boundary=4 - lost)
    road.send([(pending.key, 2, (0, 4), 2)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    streams = {0: result["embed"].tolist(), 4: result["resid_post", 1].tolist()}
    assert streams[lost] == [[2, point_of(lost, 1), 2, 7]]
    assert streams[4 - lost] == [
        [p, point_of(4 - lost, 1), number, 7] for p, number in ((0, 1), (1, 1), (2, 2))
    ]
    assert (result.dropped, result.status) == (2, "incomplete")


def test_a_prompt_longer_than_the_first_room_is_kept_whole(road):
    pending = road.open(Read("embed", tokens=slice(None)), num_prompt=500, max_tokens=1)
    road.send([(pending.key, p, (0,), p) for p in range(500)])
    road.finish(pending)
    assert pending.snapshot([5], "stop")["embed"].tolist() == [[p, 1, p, 7] for p in range(500)]


def test_tokens_of_two_requests_may_be_mixed_in_any_way(road):
    one, other = road.open("embed", num_prompt=4), road.open("embed", num_prompt=4)
    order = [one, other, one, one, other, other, one, other]  # unevenly spaced
    place = {id(one): 0, id(other): 0}
    tokens = []
    for number, pending in enumerate(order):
        tokens.append((pending.key, place[id(pending)], (0,), number))
        place[id(pending)] += 1
    road.send(tokens)
    road.finish(one)
    road.finish(other)
    assert one.snapshot([5], "stop")["embed"][:, 2].tolist() == [0, 2, 3, 6]
    assert other.snapshot([5], "stop")["embed"][:, 2].tolist() == [1, 4, 5, 7]


@pytest.mark.parametrize("joined", [False, True], ids=["step-by-step", "joined-steps"])
@pytest.mark.parametrize(
    "layouts", [((0, 4), (0,)), ((0,), (0, 4))], ids=["wide-first", "wide-last"]
)
def test_the_last_computed_row_holds_in_any_layout(layouts, joined, road):
    # A draft was rejected: its row, read under the program of guessed positions, stands
    # at a position that is later computed again under that position's own program.
    pending = road.open(Read("embed", tokens=[0, 3]), Read("resid_post", layers=[1], tokens=[9]))
    steps = [
        (pending.key, 0, (0,), 1),
        *((pending.key, 3, p, i) for i, p in enumerate(layouts, 2)),
    ]
    for step in [steps] if joined else [[token] for token in steps]:
        road.send(step)
    road.finish(pending)
    result = pending.snapshot([1, 1], "stop")
    assert result["embed"][:, 2].tolist() == [1, 3]


def test_a_stream_that_went_to_a_sink_is_a_key_error_that_names_the_sink(road):
    pending = road.open(Read("embed"))
    pending.manifests = {"files": Manifest("ok", None, 3, 3, 0)}
    road.finish(pending)
    result = pending.snapshot([1, 1], "stop")
    for act in (lambda: result["resid_post", 1], lambda: result.positions("resid_post", 1)):
        with pytest.raises(KeyError, match=r"this request read 'embed' 0 to memory\. .*\(files\)"):
            act()


def test_a_stream_that_was_not_asked_for_is_a_key_error_that_names_those_that_were(road):
    _, result = _full(road)
    with pytest.raises(KeyError) as caught:
        result["resid_post", 2]
    assert caught.value.args == (
        "('resid_post', 2) was not asked for; this request read 'embed' 0, 'resid_post' 1.",
    )
    with pytest.raises(KeyError, match="0 was not asked for"):
        result[0]
    assert list(result) == result.keys()
    with pytest.raises(KeyError, match="was not asked for"):
        result.positions("resid_pre", 1)
    for take in (lambda: result["resid_post"], lambda: result.positions("resid_post")):
        with pytest.raises(KeyError, match="'resid_post' has rows in each layer; name one, as in"):
            take()
    assert torch.equal(result["embed"], result["embed", 0])
    assert ("resid_post", 1) in result
    assert "embed" in result
    assert ("resid_post", 2) not in result
    assert len(result) == len(list(result)) == len(result.keys())
    assert "resid_pre" not in result


def test_a_request_that_nobody_holds_is_forgotten_with_its_rows(road):
    gone, kept = road.open("embed"), road.open("embed")
    key, freed, before = gone.key, weakref.ref(gone), len(road.inbox)
    road.send([(key, 0, (0,), 1), (kept.key, 0, (0,), 1)])
    road.settle()
    rows = weakref.ref(gone.snapshot([], None)["embed"])
    del gone
    deadline = time.monotonic() + PATIENCE_S
    while freed() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)  # the road's thread may hold it for its last message
    assert freed() is None
    assert rows() is None
    assert len(road.inbox) == before - 1
    road.send([(key, 1, (0,), 2), (kept.key, 1, (0,), 2), (key, 2, (0,), 2)])
    road.sender.send_finish(key, 0, None)
    road.send([(kept.key, 2, (0,), 3)])
    road.finish(kept)
    result = kept.snapshot([5], "stop")
    assert result["embed"].tolist() == [[p, 1, p + 1, 7] for p in (0, 1, 2)]
    assert len(road.inbox) == before - 1


def test_two_requests_never_share_a_key(road):
    pendings = [road.open("embed") for _ in range(100)]
    assert len({pending.key for pending in pendings}) == 100


@pytest.mark.parametrize("during", [False, True], ids=["before", "while-it-is-copied"])
def test_rows_that_are_read_after_the_worker_revoked_the_reader_are_dropped(during, monkeypatch):
    """The span may hold others' rows by then; nobody sees it, and the request says why."""
    inbox, ring = Inbox(), HostRing(64, cuda=False)
    sender = SharedSender(inbox.address, ring)
    road = Road(inbox, sender, ring)
    try:
        pending = road.open("embed")
        generation, seen = inbox.generation, []
        lose = pending.lose

        def seen_before(*arguments, **named):
            seen.append(pending.snapshot([], None))
            lose(*arguments, **named)

        monkeypatch.setattr(pending, "lose", seen_before)
        if during:
            on_rows = inbox._receiver._on_rows

            def revoked_meanwhile(message):
                ring.revoke(sender._reader)
                on_rows(message)

            monkeypatch.setattr(inbox._receiver, "_on_rows", revoked_meanwhile)
        else:
            ring.revoke(sender._reader)
        road.send([(pending.key, 0, (0,), 1)])
        pending.done.result(PATIENCE_S)
        (before,), after = seen, pending.snapshot([], None)
        assert (before.status, before.delivered) == ("streaming", 0)
        assert (after.status, after.delivered) == ("failed", 0)
        assert "did not read its rows" in after.error
        assert inbox.generation == generation + 1
    finally:
        sender.close()
        inbox.close()
        ring.close()
