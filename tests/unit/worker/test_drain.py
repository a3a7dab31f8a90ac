"""Rows leave the arena in order, whatever the sink does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.unit.delivered import ROW_BYTES, labels_of, reads_at, rows_in
from tests.unit.waiting import until
from vllm_scope.batch.sums import Sums
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.heads import LENS, Likeliest, Strongest, Summed
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.request.selectors import Word
from vllm_scope.request.sites import Place, point_of
from vllm_scope.sinks import RowBatch
from vllm_scope.transport.ring import HostRing
from vllm_scope.worker.arena import Arena
from vllm_scope.worker.deliverer import Waiting
from vllm_scope.worker.drain import Drain
from vllm_scope.worker.drain_items import Finish, Rows, may_join
from vllm_scope.worker.filler import ROWS_LOST
from vllm_scope.worker.score_store import MOST_STEPS_KEPT, Filled
from vllm_scope.worker.watch import Watch

CPU = torch.device("cpu")
#: Generous: what must not hang is cut off here.
PATIENCE_S = 20


class RecordingSink:
    """Keeps what it is given, as (key, position, boundary, value) and (key, error).

    Steps may come joined; here they are rows again.

    Attributes:
        gate: `write` waits for it.
        together: keys of requests whose ends came in one call.
        refuse: keys whose rows make `write` raise.
    """

    def __init__(self) -> None:
        self.events: list[tuple] = []
        self.threads: set[str] = set()
        self.num_batches = 0
        self.together: list[list[int]] = []
        self.refuse: set[int] = set()
        self.closed = 0
        self.gate = threading.Event()
        self.gate.set()

    def write(self, batch: RowBatch) -> None:
        assert self.gate.wait(PATIENCE_S)
        self.threads.add(threading.current_thread().name)
        self.num_batches += 1
        assert batch.widths == Widths((ROW_BYTES,))
        if self.refuse & set(batch.labels.keys.tolist()):
            raise OSError("disk full")
        self.events += rows_in(batch.labels, batch.slots, batch.boundary)

    def finish_all(self, ends) -> None:
        self.together.append([key for key, _ in ends])
        for key, error in ends:
            self.finish(key, error)

    def finish(self, key: int, error: str | None) -> None:
        self.threads.add(threading.current_thread().name)
        if key in self.refuse:
            raise OSError("disk full")
        self.events.append((key, error))

    def close(self) -> None:
        self.closed += 1


@contextmanager
def _drain(
    num_slots: int, host_slots: int = 64, watch: Watch | None = None, store: Any = None
) -> Iterator[tuple[Arena, Drain, RecordingSink]]:
    arena, sink = Arena(num_slots, torch.float32, CPU), RecordingSink()
    ring = HostRing(host_slots, cuda=False)
    drain = Drain(arena, ring, sink, Widths((ROW_BYTES,)), watch, store, moments_bytes=1 << 20)
    try:
        yield arena, drain, sink
    finally:
        drain.close()


def _submit(
    arena: Arena,
    drain: Drain,
    key: int,
    first: int,
    count: int,
    boundary: int | None = None,
    boundaries: tuple[int, ...] = (0,),
    positions: torch.Tensor | None = None,
) -> None:
    found = _rows(key, first, count, boundaries if boundary is None else (boundary,))
    region = arena.acquire(len(found))
    arena.view(region)[:] = torch.tensor([value for *_, value in found])[:, None]
    labels = labels_of([key] * count, range(first, first + count), layouts=(reads_at(*boundaries),))
    drain.submit(region, labels, boundary, positions)


def _rows(key: int, first: int, count: int, boundaries: tuple[int, ...] = (0,)) -> list[tuple]:
    return [
        (key, p, b, 1000.0 * key + 10 * p + b)
        for p in range(first, first + count)
        for b in boundaries
    ]


class Pairs:
    """A PairMaker: the index is 7, the value the first number of the row. It fails for rows below
    `least`.

    Attributes:
        counts: how many rows it was given at once.
    """

    def __init__(self, least: float) -> None:
        self.least = least
        self.counts: list[int] = []

    def pack(self, rows, count):
        self.counts.append(len(rows))
        if rows.min() < self.least:
            raise torch.OutOfMemoryError
        made = torch.full((len(rows), 4), 7, dtype=torch.int32, device=rows.device)
        made[:, 1] = rows[:, 0].view(torch.int32)
        return made.view(torch.uint8)


@pytest.mark.parametrize("boundary", [None, 0])
def test_a_head_that_fails_fails_the_requests_that_asked_for_it_alone(boundary, caplog):
    heads = {"": Likeliest.of_lens(1), "good": Strongest.of_sae("good", 1)}
    heads["bad"] = Strongest.of_sae("bad", 1)
    saes = {LENS: Pairs(5), "good": Pairs(0), "bad": Pairs(99)}
    arena, sink = Arena(8, torch.float32, CPU), RecordingSink()
    slots = []
    sink.write = lambda batch: slots.append((batch.labels.keys.tolist(), batch.slots.clone()))
    drain = Drain(arena, HostRing(64, cuda=False), sink, Widths((ROW_BYTES,)), saes=saes)
    point = point_of(0, 0)
    layouts = tuple(Layout((), ((head, (point,)),)) for head in heads.values())
    try:
        for first in (0.0, 10.0):
            region = arena.acquire(3)
            arena.view(region)[:] = torch.arange(first, first + 3)[:, None]
            keys = np.array([1, 2, 3])
            labels = labels_of(keys, [0, 0, 0], layouts=layouts)
            labels = replace(labels, layout_of=np.arange(3, dtype=np.int32))
            drain.submit(region, labels, boundary)
        for key in (1, 2, 3):
            drain.finish_request(key)
        drain.finish_request(3)
    finally:
        drain.close()
    ends = dict(sink.events[:3])
    assert ends.keys() == {1, 2, 3}
    assert "could not be computed" in ends[1]
    assert "could not be computed" in ends[3]
    assert ends[2] is None
    assert sink.events[3] == (3, None), "it is forgotten with its request"
    words = torch.cat([some for _, some in slots]).view(torch.int32)[:, :2]
    assert [key for keys, _ in slots for key in keys] == [1, 2, 3] * 2
    found = list(zip(words[:, 0].tolist(), words[:, 1].view(torch.float32).tolist(), strict=True))
    assert [found[i] for i in (1, 3, 4)] == [(7, 1.0), (7, 10.0), (7, 11.0)]
    for i in (0, 2, 5):
        assert found[i][0] == -1
        assert found[i][1] != found[i][1], "not a number: never taken for a value"
    assert "the head 'strongest 0 1 bad' failed" in caplog.text


@contextmanager
def of_pairs(
    device: torch.device, num_slots: int, host_slots: int = 400, drafts: bool = False
) -> Iterator[Any]:
    """A drain with a held SAE, `pairs`; what its sink was given, and `submit` of a step."""
    arena, sink, pairs = Arena(num_slots, torch.float32, device), RecordingSink(), Pairs(0)
    found: list[tuple[int, int, float]] = []

    def write(batch: RowBatch) -> None:
        assert sink.gate.wait(PATIENCE_S)
        words = batch.slots.clone().view(torch.int32)
        values = words[:, 1].view(torch.float32).tolist()
        assert words[:, 0].tolist() == [7] * len(values)
        keys, positions = batch.labels.keys.tolist(), batch.labels.positions.tolist()
        found.extend(zip(keys, positions, values, strict=True))

    sink.write = write
    ring = HostRing(host_slots, cuda=device.type == "cuda")
    drain = Drain(
        arena, ring, sink, Widths((ROW_BYTES,)), moments_bytes=1 << 20, saes={"one": pairs},
        joins=True, drafts=drafts,
    )  # fmt: skip
    layouts = (Layout((), ((Strongest.of_sae("one", 1), (point_of(0, 0),)),)),)

    def submit(key: int, step: int, count: int, boundary: int | None = None) -> None:
        region = arena.acquire(count)
        values = torch.arange(count, device=device) + 100.0 * step
        arena.view(region)[:] = values[:, None]
        positions = range(count * step, count * (step + 1))
        drain.submit(region, labels_of([key] * count, positions, layouts=layouts), boundary)

    try:
        yield submit, drain, sink, found, pairs
    finally:
        sink.gate.set()
        drain.close()


def pairs_of(key: int, steps: Iterable[int], count: int) -> list[tuple[int, int, float]]:
    return [(key, count * step + i, 100.0 * step + i) for step in steps for i in range(count)]


def test_a_head_works_on_the_steps_that_wait_at_once():
    with of_pairs(CPU, 100) as (submit, drain, sink, found, pairs):
        sink.gate.clear()
        submit(1, 0, 3)
        deadline = time.monotonic() + PATIENCE_S
        while not pairs.counts and time.monotonic() < deadline:
            time.sleep(0.001)
        # The thread waits at the sink. The ring of 100 slots wraps after 33 steps of 3 rows.
        for step in range(1, 30):
            submit(1, step, 3)
        submit(2, 30, 2, boundary=0)
        drain.finish_request(1)
        submit(2, 31, 2)
    assert found == [*pairs_of(1, range(30), 3), *pairs_of(2, (30, 31), 2)]
    assert pairs.counts == [3, 87, 2, 2]


def test_what_heads_read_may_change_once_the_drain_has_settled():
    """As the model's unembedding does with new weights."""
    with of_pairs(CPU, 100) as (submit, drain, _, found, pairs):
        original, weight = pairs.pack, [1.0]

        def slow(rows, count):
            time.sleep(0.02)
            return original(rows * weight[0], count)

        pairs.pack = slow
        for step in range(20):
            submit(1, step, 3)
        drain.settle()
        weight[0] = 2.0
        submit(1, 20, 3)
    *old, last = (found[i : i + 3] for i in range(0, 63, 3))
    assert [one for some in old for one in some] == pairs_of(1, range(20), 3)
    assert [value for *_, value in last] == [4000.0, 4002.0, 4004.0]
    drain.settle()  # it is closed, and nothing waits


@pytest.mark.parametrize("num_slots", [6, 7, 100])
def test_steps_that_heads_work_on_at_once_are_where_they_belong(num_slots):
    with of_pairs(CPU, num_slots) as (submit, drain, _, found, pairs):
        for step in range(200):
            submit(step % 3, step, 2)
            if step % 50 == 49:
                drain.finish_request(0)
    assert found == [one for step in range(200) for one in pairs_of(step % 3, [step], 2)]
    assert sum(pairs.counts) == 400


@pytest.mark.parametrize("drafts", [False, True])
def test_rows_that_the_sink_does_not_take_fail_their_requests_if_drafts_can_be_rejected(drafts):
    with of_pairs(CPU, 100, drafts=drafts) as (submit, drain, sink, found, _):
        take = sink.write

        def refuse_some(batch: RowBatch) -> None:
            if 9 in batch.labels.keys:
                raise OSError("disk full")
            take(batch)

        sink.write = refuse_some
        for key in (1, 9):
            submit(key, 0, 2, boundary=0)
            drain.finish_request(key)
    assert found == pairs_of(1, [0], 2)
    assert sink.events == [(1, None), (9, ROWS_LOST if drafts else None)]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("num_slots", [10, 100])
def test_a_step_that_cannot_be_copied_loses_its_own_rows_only(num_slots, drafts, caplog):
    """Others of the same look are delivered, and their regions are free again: of 10 slots, the
    first steps fill the arena to its end. With drafts, a request that lost rows fails, because the
    row of a rejected draft could have come before a lost row."""
    with of_pairs(CPU, num_slots, drafts=drafts) as (submit, drain, sink, found, _):
        fill = drain.filler._fill

        def fail(region, labels, *more):
            if 9 in labels.keys:
                raise torch.OutOfMemoryError
            fill(region, labels, *more)

        drain.filler._fill = fail
        sink.gate.clear()
        submit(1, 0, 1)
        until = time.monotonic() + PATIENCE_S
        while drain._items and time.monotonic() < until:
            time.sleep(0.001)
        keys = [9 if step % 4 == 2 else step % 4 for step in range(1, 41)]
        threading.Timer(0.2, sink.gate.set).start()
        for step, key in enumerate(keys, 1):
            submit(key, step, 2)
        drain.finish_request(9)
        drain.finish_request(1)
    kept = [one for step, key in enumerate(keys, 1) if key != 9 for one in pairs_of(key, [step], 2)]
    assert found == [*pairs_of(1, [0], 1), *kept]
    assert sink.events == [(9, ROWS_LOST if drafts else None), (1, None)]
    assert caplog.text.count("rows could not be delivered") == keys.count(9)


@pytest.mark.parametrize("host_slots", [8, 20, 400])
def test_rows_come_in_the_order_of_their_steps_and_finish_after_them(host_slots):
    expected = []
    with _drain(8, host_slots) as (arena, drain, sink):
        for step in range(40):
            # Runs of steps that may be joined, then another program, then single taps.
            boundaries = ((0,), (0, 1), (1,), (0, 1, 2))[step // 5 % 4]
            boundary = boundaries[-1] if step % 7 == 6 else None
            _submit(arena, drain, 1, 2 * step, 2, boundary, boundaries)
            asked = boundaries if boundary is None else (boundary,)
            expected += _rows(1, 2 * step, 2, asked)
            if step % 10 == 9:
                drain.finish_request(step)
                expected.append((step, None))
        drain.finish_request(1, "no room")
    assert sink.events == [*expected, (1, "no room")]
    assert sink.threads == {"vllm-scope-drain"}


def test_steps_that_wait_together_come_joined():
    with _drain(400, 400) as (arena, drain, sink):
        sink.gate.clear()
        for step in range(50):
            _submit(arena, drain, 1, 2 * step, 2, boundaries=(0, 2))
        drain.finish_request(1)
        sink.gate.set()
    assert sink.events == [*_rows(1, 0, 100, (0, 2)), (1, None)]
    assert sink.num_batches < 50


class Store:
    """Stands for a ScoreStore. It records the positions that it collects, and what it is told.

    Attributes:
        rows: (the sizes of the steps that came at once, their tap or None, their rows).
    """

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.rows: list[tuple[list[int], int | None, list[tuple]]] = []

    def collect(self, labels, lease, boundary, sizes) -> None:
        self.told += [("collect", p) for p in labels.positions.tolist()]
        self.rows.append((sizes, boundary, rows_in(labels, lease.slots, boundary)))

    def keep(self, filled) -> None:
        self.told += [("keep", one.first) for one in filled]

    def begin(self, key: int, layout, block_size: int) -> None:
        self.told.append(("begin", key))

    def forget(self, keys) -> None:
        self.told.append(("forget", sorted(keys)))

    def end(self, key: int) -> None:
        self.told.append(("end", key))


@contextmanager
def _collecting() -> Iterator[tuple[Arena, Drain, RecordingSink, Any]]:
    """A drain and its store. What is submitted waits together until the sink's gate is set."""
    store: Any = Store()
    with _drain(400, 400, store=store) as (arena, drain, sink):
        sink.gate.clear()
        _submit(arena, drain, 9, 99, 1)  # the thread waits here, after the store
        until(lambda: store.told, PATIENCE_S)
        store.told.clear()
        store.rows.clear()
        yield arena, drain, sink, store


def test_scores_are_kept_after_their_steps_and_soon_and_do_not_part_joined_steps():
    with _collecting() as (arena, drain, sink, store):
        for step in range(3 * MOST_STEPS_KEPT):
            _submit(arena, drain, 1, step, 1)
            drain.keep([Filled(1, step, [b"hash"], b"probes")])
        drain.finish_request(1)
        sink.gate.set()
        until(lambda: (1, None) in sink.events, PATIENCE_S)
        assert sink.events == [*_rows(9, 99, 1), *_rows(1, 0, 3 * MOST_STEPS_KEPT), (1, None)]
        assert sink.num_batches <= 1 + 4
        assert store.told[-1] == ("end", 1)
        for step in range(3 * MOST_STEPS_KEPT):
            kept = store.told.index(("keep", step))
            before = [p for what, p in store.told[:kept] if what == "collect"]
            assert step < len(before) <= step + MOST_STEPS_KEPT


def test_requests_that_come_and_go_and_blocks_that_are_forgotten_do_not_part_joined_steps():
    with _collecting() as (arena, drain, sink, store):
        for step in range(6):
            _submit(arena, drain, 1, step, 1)
            drain.keep([Filled(1, step, [b"new%d" % step], b"probes")])
            drain.forget([(b"old%d" % step, b"probes")])
            drain.finish_request(10 + step)
            drain.collect(20 + step, reads_at(0), 4)
        sink.gate.set()
        until(lambda: (15, None) in sink.events, PATIENCE_S)
    assert sink.num_batches == 2
    assert sink.events[1:] == [*_rows(1, 0, 6), *((10 + step, None) for step in range(6))]
    forgotten = [(b"old%d" % step, b"probes") for step in range(6)]
    # The scores of a request that comes are in later steps.
    assert store.told[:6] == [("begin", 20 + step) for step in range(6)]
    assert store.told[6:] == [
        *(("collect", step) for step in range(6)),
        *(("keep", step) for step in range(6)),
        ("forget", forgotten),
        *(("end", 10 + step) for step in range(6)),
    ]


def test_a_block_that_is_kept_again_stays_and_stored_scores_come_after_what_was_told_before():
    with _collecting() as (_, drain, sink, store):
        a, b = (b"a", b"probes"), (b"b", b"probes")
        drain.forget([a, b])
        drain.keep([Filled(1, 0, [b"b"], b"other"), Filled(1, 1, [b"a"], b"probes")])
        told: list[Any] = []

        def write(lease) -> bool:
            told.extend(store.told)
            return bool(lease.slots.fill_(0).numel())

        drain.submit_stored(labels_of([2], [0], layouts=(reads_at(0),)), write)
        drain.forget([a])
        drain.finish_request(2)
        sink.gate.set()
        until(lambda: (2, None) in sink.events, PATIENCE_S)
    assert told == [("keep", 0), ("keep", 1), ("forget", [b])]
    assert store.told[3:] == [("forget", [a]), ("end", 2)]
    assert sink.events[-2:] == [(2, 0, 0, 0.0), (2, None)]


def test_an_end_does_not_wait_for_a_step_that_came_later():
    with _collecting() as (arena, drain, sink, _):
        drain.finish_request(10)
        _submit(arena, drain, 1, 0, 1)
        sink.gate.set()
        until(lambda: len(sink.events) == 3, PATIENCE_S)
    assert sink.events[1:] == [(10, None), *_rows(1, 0, 1)]


@pytest.mark.parametrize("name", ["copied", "tapped"])
def test_an_end_does_not_wait_for_a_step_that_the_device_has_not_finished(name):
    with _collecting() as (arena, drain, sink, _):
        _submit(arena, drain, 1, 0, 1)
        _submit(arena, drain, 1, 1, 1)
        first, later = drain._items
        waiting = Waiting([first])
        assert waiting.may_take(replace(later, **{name: Event(done=False)}))
        waiting.add(Finish(1, None))
        assert waiting.may_take(later)
        assert waiting.may_take(replace(later, **{name: Event()}))
        assert not waiting.may_take(replace(later, **{name: Event(done=False)}))
        assert not waiting.may_take(replace(later, **{name: Event(done=None)}))
        sink.gate.set()


def test_stored_scores_come_before_the_rows_of_later_steps():
    with _collecting() as (arena, drain, sink, _):
        labels = labels_of([2], [0], layouts=(reads_at(0),))
        drain.submit_stored(labels, lambda lease: bool(lease.slots.fill_(0).numel()))
        _submit(arena, drain, 1, 0, 1)
        sink.gate.set()
        until(lambda: len(sink.events) == 3, PATIENCE_S)
    assert sink.events[1:] == [(2, 0, 0, 0.0), *_rows(1, 0, 1)]


def test_blocks_are_forgotten_although_no_rows_follow_and_a_store_that_fails_harms_no_row(caplog):
    store: Any = Store()
    with _drain(64, store=store) as (arena, drain, sink):
        until(lambda: drain._pace.sleeping, PATIENCE_S)
        drain.forget([(b"a", b"probes")])
        until(lambda: store.told == [("forget", [(b"a", b"probes")])], PATIENCE_S)

        def fail(*_) -> None:
            raise ZeroDivisionError("the store")

        store.begin = store.forget = fail
        drain.collect(1, reads_at(0), 4)
        drain.forget([(b"a", b"probes")])
        _submit(arena, drain, 1, 0, 1)
        drain.finish_request(1)
        until(lambda: (1, None) in sink.events, PATIENCE_S)
    assert sink.events == [*_rows(1, 0, 1), (1, None)]
    assert caplog.text.count("the store") >= 2


def test_joined_steps_come_to_the_store_with_their_sizes_rows_and_true_positions():
    with _collecting() as (arena, drain, sink, store):
        _submit(arena, drain, 1, 0, 2)
        _submit(arena, drain, 1, 2, 3, positions=torch.tensor([12, 13, 14]))
        _submit(arena, drain, 1, 5, 4)
        _submit(arena, drain, 1, 9, 1, boundary=0)
        sink.gate.set()
    moved = [(key, p + 10, b, value) for key, p, b, value in _rows(1, 2, 3)]
    assert store.rows == [
        ([2, 3, 4], None, [*_rows(1, 0, 2), *moved, *_rows(1, 5, 4)]),
        ([1], 0, _rows(1, 9, 1)),
    ]


def test_close_delivers_what_waits_and_closes_the_sink_once():
    with _drain(64) as (arena, drain, sink):
        sink.gate.clear()
        for step in range(10):
            _submit(arena, drain, 1, 2 * step, 2)
        drain.finish_request(1)
        threading.Timer(0.05, sink.gate.set).start()
    assert sink.events == [*_rows(1, 0, 20), (1, None)]
    assert sink.closed == 1


def test_a_sink_that_fails_loses_its_own_batch_only():
    # Arena and ring hold one batch: a span that was not given back would stop the next.
    with _drain(3, 3) as (arena, drain, sink):
        sink.refuse = {1}
        for key in (1, 2, 1, 3):
            _submit(arena, drain, key, 0, 3)
            drain.finish_request(key)
    assert sink.events == [*_rows(2, 0, 3), (2, None), *_rows(3, 0, 3), (3, None)]


@pytest.mark.parametrize(
    ("num_slots", "host_slots", "least", "most"),
    [
        # Three steps in the arena, and as many as three joined ones at the sink.
        pytest.param(6, 4096, 4, 6, id="the-arena-is-full"),
        pytest.param(4096, 6, 3, 3, id="the-host-ring-is-full"),
    ],
)
def test_a_slow_sink_makes_the_worker_wait_and_loses_nothing(num_slots, host_slots, least, most):
    submitted, num_steps = 0, 100
    with _drain(num_slots, host_slots) as (arena, drain, sink):
        sink.gate.clear()

        def work() -> None:
            nonlocal submitted
            for step in range(num_steps):
                _submit(arena, drain, 1, 2 * step, 2)
                submitted += 1
            drain.finish_request(1)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        deadline = time.monotonic() + PATIENCE_S
        while submitted < least and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert least <= submitted <= most
        assert worker.is_alive()
        assert sink.events == []
        sink.gate.set()
        worker.join(PATIENCE_S)
        assert not worker.is_alive()
    assert sink.events == [*_rows(1, 0, 2 * num_steps), (1, None)]


def test_true_positions_replace_guessed_ones_by_batch_row():
    with _drain(8) as (arena, drain, sink):
        sink.gate.clear()
        _submit(arena, drain, 6, 0, 1, boundary=0)  # the drain is busy with it
        region = arena.acquire(2)
        arena.view(region).fill_(5)
        labels = replace(labels_of([7, 8], [104, 209]), rows=np.array([3, 1]))
        positions = torch.tensor([-1, 208, -1, 102, -1])
        drain.submit(region, labels, None, positions)
        positions.fill_(-77)  # vLLM reuses its buffer in the next step
        sink.gate.set()
    assert sink.events == [*_rows(6, 0, 1), (7, 102, 0, 5.0), (8, 208, 0, 5.0)]
    assert labels.positions.tolist() == [104, 209]


def test_a_finished_request_does_not_wait_for_further_steps(monkeypatch):
    """While a request runs its rows are handed on a few steps at a time; its end is not."""
    monkeypatch.setattr("vllm_scope.worker.pace.LINGER_S", PATIENCE_S)
    with _drain(8) as (arena, drain, sink):
        _submit(arena, drain, 1, 0, 2)  # at once: nothing was handed on before
        until(lambda: len(sink.events) == 2, PATIENCE_S)
        _submit(arena, drain, 1, 2, 2)
        time.sleep(0.1)
        assert len(sink.events) == 2, "rows of a running request wait"
        drain.finish_request(1)
        started = time.monotonic()
        until(lambda: (1, None) in sink.events, PATIENCE_S)
        assert time.monotonic() - started < PATIENCE_S / 2
        assert sink.events == [*_rows(1, 0, 4), (1, None)]


@pytest.mark.parametrize(
    ("followed", "count", "waits"),
    [
        pytest.param([], 2, True, id="nobody-looks-before-the-end"),
        pytest.param([2], 2, False, id="somebody-looks"),
        pytest.param([], 20, False, id="much-waits"),
    ],
)
def test_a_few_rows_that_no_caller_follows_wait_longer(monkeypatch, followed, count, waits):
    monkeypatch.setattr("vllm_scope.worker.pace.LINGER_UNSEEN_S", PATIENCE_S)
    with _drain(64) as (arena, drain, sink):
        for key in followed:
            drain.follow(key)
        _submit(arena, drain, 1, 0, 2)
        until(lambda: len(sink.events) == 2, PATIENCE_S)
        _submit(arena, drain, 1, 2, count)
        if waits:
            time.sleep(0.2)
            assert len(sink.events) == 2
            drain.finish_request(1)
        until(lambda: sink.events[: 2 + count] == _rows(1, 0, 2 + count), PATIENCE_S / 2)


def test_rows_that_wait_do_not_wait_longer_than_the_first_caller_that_follows(monkeypatch):
    monkeypatch.setattr("vllm_scope.worker.pace.LINGER_UNSEEN_S", PATIENCE_S)
    with _drain(64) as (arena, drain, sink):
        _submit(arena, drain, 1, 0, 2)
        until(lambda: len(sink.events) == 2, PATIENCE_S)
        time.sleep(0.05)  # the thread rests, and nobody follows
        drain.follow(2)
        _submit(arena, drain, 1, 2, 2)
        until(lambda: len(sink.events) == 4, PATIENCE_S / 2)


def test_requests_that_end_together_are_told_in_one_call_after_their_rows():
    with _drain(64) as (arena, drain, sink):
        sink.gate.clear()
        _submit(arena, drain, 9, 0, 1)  # the thread waits here
        for key in (1, 2, 3):
            _submit(arena, drain, key, 0, 2)
        for key in (1, 2, 3):
            drain.finish_request(key)
        sink.gate.set()
        until(lambda: (3, None) in sink.events, PATIENCE_S)
        assert sink.together == [[1, 2, 3]]
        assert sink.events[-3:] == [(1, None), (2, None), (3, None)]


def test_a_thread_that_owes_much_rest_looks_at_once_if_nothing_else_runs(monkeypatch):
    for name, value in {"REST": 1e12, "MOST_REST_S": 10 * PATIENCE_S, "MOST_OWED_S": 0.0}.items():
        monkeypatch.setattr(f"vllm_scope.worker.pace.{name}", value)
    with _drain(64) as (arena, drain, sink):
        for key in range(3):
            _submit(arena, drain, key, 0, 1)
            drain.finish_request(key)
            drain.hurry()
            until(lambda key=key: (key, None) in sink.events, PATIENCE_S)


def test_kept_scores_do_not_wait_for_the_end_of_their_request(monkeypatch):
    monkeypatch.setattr("vllm_scope.worker.pace.LINGER_UNSEEN_S", PATIENCE_S)
    with _drain(64) as (arena, drain, sink):
        _submit(arena, drain, 1, 0, 1)
        until(lambda: len(sink.events) == 1, PATIENCE_S)
        labels = labels_of([2], [0], layouts=(reads_at(0),))
        drain.submit_stored(labels, lambda lease: bool(lease.slots.fill_(0).numel()))
        until(lambda: len(sink.events) == 2, PATIENCE_S / 2)


def test_kept_scores_wait_for_the_launch_of_their_step():
    with _drain(64) as (_, drain, sink):
        drain.defers = True  # as on a GPU
        until(lambda: drain._pace.sleeping, PATIENCE_S)
        labels = labels_of([2], [0], layouts=(reads_at(0),))
        drain.collect(2, reads_at(0), 4)
        drain.submit_stored(labels, lambda lease: bool(lease.slots.fill_(0).numel()))
        time.sleep(0.05)
        assert drain._pace.sleeping
        assert not sink.events
        drain.nudge()
        until(lambda: len(sink.events) == 1, PATIENCE_S)


@pytest.mark.parametrize(
    ("followed", "count", "waits"),
    [
        pytest.param([], 1, True, id="nobody-looks-before-the-end"),
        pytest.param([2], 1, False, id="somebody-looks"),
        pytest.param([], 20, False, id="much-waits"),
    ],
)
def test_kept_scores_that_no_caller_follows_wait_for_the_next_rows(
    monkeypatch, followed, count, waits
):
    monkeypatch.setattr("vllm_scope.worker.pace.LINGER_UNSEEN_S", PATIENCE_S)
    with _drain(64) as (arena, drain, sink):
        drain.defers = True  # as on a GPU
        for key in followed:
            drain.follow(key)
        _submit(arena, drain, 1, 0, 1)  # after this the thread rests
        until(lambda: len(sink.events) == 1, PATIENCE_S)
        labels = labels_of([2] * count, range(count), layouts=(reads_at(0),))
        drain.submit_stored(labels, lambda lease: bool(lease.slots.fill_(0).numel()))
        drain.nudge()
        if waits:
            time.sleep(0.2)
            assert len(sink.events) == 1
            drain.finish_request(1)
        until(lambda: len(sink.events) >= 1 + count, PATIENCE_S / 2)


def test_kept_scores_that_need_room_of_others_before_them_wake_the_thread():
    with _drain(64, host_slots=8) as (_, drain, sink):
        drain.defers, drain._ring.reclaim = True, drain.hurry
        for key in range(20):
            labels = labels_of([key] * 3, range(3), layouts=(reads_at(0),))
            drain.submit_stored(labels, lambda lease: bool(lease.slots.fill_(0).numel()))
        drain.nudge()
        until(lambda: len(sink.events) == 60, PATIENCE_S)


def test_kept_scores_that_lie_side_by_side_come_as_one_batch_and_those_missing_are_left_out():
    layouts = (reads_at(0),)
    with _drain(64) as (arena, drain, sink):
        sink.gate.clear()
        _submit(arena, drain, 9, 0, 1)  # the thread waits here
        time.sleep(0.05)

        missing = {3}

        def write(lease, key) -> bool:
            lease.slots.view(torch.float32)[:] = 1000.0 * key
            return key not in missing

        for key in (1, 2, 3, 4, 5):
            drain.later(lambda key=key: missing.add(key - 1))  # what came before is in the ring
            labels = labels_of([key] * 2, [0, 1], layouts=layouts)
            drain.submit_stored(labels, lambda lease, key=key: write(lease, key))
        drain.finish_request(5)
        sink.gate.set()
        until(lambda: (5, None) in sink.events, PATIENCE_S)
        told = [(key, p, 0, 1000.0 * key) for key in (1, 2, 4, 5) for p in (0, 1)]
        assert sink.events[1:] == [*told, (5, None)]
        assert sink.num_batches == 3  # the rows, the two before the missing one, the two after


class Event:
    """A CUDA event, as far as the drain thread knows one."""

    def __init__(self, done: bool | None = True) -> None:
        self.waited, self.done = False, done

    def query(self) -> bool:
        if self.done is None:
            raise RuntimeError("an illegal memory access")
        return self.done

    def synchronize(self) -> None:
        self.waited = True


@pytest.mark.parametrize("order", ["copied-then-written", "written-then-copied"])
def test_joined_steps_wait_for_copies_and_for_taps_that_wrote_themselves(order):
    """They are on two streams: the last step's event says nothing of the other kind's."""
    arena, ring = Arena(8, torch.float32, CPU), HostRing(64, cuda=False)
    steps, events, seen = [], [Event(), Event()], []
    for i, event in enumerate(events):
        copies = (i == 0) is (order == "copied-then-written")
        region = arena.acquire(1) if copies else None
        steps.append(Rows(labels_of([1], [i]), None, region, ring.acquire(1), event, None))
    assert may_join(steps[:1], steps[1])

    class Sink(RecordingSink):
        def write(self, batch: RowBatch) -> None:
            seen.extend(event.waited for event in events)

    drain = Drain(arena, ring, Sink(), Widths((ROW_BYTES,)))
    drain._deliverer.write(steps)
    assert seen == [True, True]
    drain.close()


@pytest.mark.parametrize(
    ("copied", "held"), [(None, 8), (Event(), 1)], ids=["copied-later", "copy-enqueued"]
)
def test_only_rows_that_hold_their_part_of_the_arena_count_as_held_there(copied, held):
    with _drain(64) as (arena, drain, sink):
        sink.gate.clear()
        _submit(arena, drain, 9, 0, 1)
        time.sleep(0.05)  # the thread waits in the sink
        region = arena.acquire(8)
        # Eight slots of rows in the arena, of which a head has made one slot in the ring.
        lease, labels = drain._ring.acquire(1), labels_of([1], [0], layouts=(reads_at(0),))
        drain._num_unseen = 0
        drain._put(Rows(labels, None, region, lease, copied, None))
        assert drain._num_unseen == held
        drain._items.clear()
        sink.gate.set()


def test_a_thread_that_worked_long_rests_no_longer_than_rows_may_wait(monkeypatch):
    monkeypatch.setattr("vllm_scope.worker.pace.REST", 1e6)
    with _drain(64) as (arena, drain, sink):
        for position in range(3):
            _submit(arena, drain, 1, position, 1)
            until(lambda seen=position + 1: len(sink.events) == seen, PATIENCE_S)


@pytest.mark.parametrize("owes_little", [True, False])
def test_the_end_of_a_request_waits_only_for_a_thread_that_owes_much_rest(owes_little, monkeypatch):
    # If the end waited for a whole rest, it would come after all patience, or at least after 3 s.
    rest_s = 10 * PATIENCE_S if owes_little else 3.0
    for name, value in {
        "REST": 1e12, "MOST_REST_S": rest_s, "MOST_OWED_S": 1e18 if owes_little else 0.0,
    }.items():  # fmt: skip
        monkeypatch.setattr(f"vllm_scope.worker.pace.{name}", value)
    took = []
    with _drain(64) as (arena, drain, sink):
        for key in range(3):  # the thread has something to rest from, then a request that is short
            _submit(arena, drain, key, 0, 1)
            drain.finish_request(key)
            started = time.monotonic()
            until(lambda key=key: (key, None) in sink.events, PATIENCE_S)
            took.append(time.monotonic() - started)
    assert owes_little or min(took[1:]) > 2.0


def test_rows_are_summed_in_order_if_a_watched_request_enters_beside_them():
    """From then on steps are filled at once; those before wait for the drain thread."""
    place, gate = Place("resid_post", 0), threading.Event()
    layout = Layout((), ((Summed.of(0), (place.point(),)),))
    watch = Watch(Widths((ROW_BYTES,)), False, lambda *_: None)
    with _drain(512, watch=watch) as (arena, drain, _):
        drain.add_moments(1, 30, [ResolvedMoments("m", (place,), Word("all"), "a")])
        for first in (0, 10, 20):
            if first == 10:
                watched = SimpleNamespace(watched=(), firsts=frozenset())
                watch.add_request(2, "r2", 10, watched, None)
                threading.Timer(0.1, gate.set).start()
            region = arena.acquire(10)
            arena.view(region)[:] = 1.0
            positions = range(first, first + 10)
            if not first:
                drain.later(lambda: gate.wait(5) and None)
            drain.submit(region, labels_of([1] * 10, positions, layouts=(layout,)))
        found = drain.of_sums(lambda sums: sums.read("m", place, "a"))
    assert (found.count, found.missing) == (30, 0)


@pytest.mark.parametrize("boundary", [None, 2])
def test_rows_that_are_summed_are_not_delivered(boundary):
    """Alone a step of them makes no batch; beside rows that are read they take no room in it."""
    place = Place("resid_post", 0)
    summed = Layout((), ((Summed.of(0), (place.point(),)),))
    both = reads_at(2, encoded=summed.encoded)
    asked = ResolvedMoments("m", (place,), Word("all"), "a")
    with _drain(64) as (arena, drain, sink):
        drain.add_moments(1, 4, [asked])
        for first, layouts in ((0, (summed,)), (2, (summed, both))):
            region = arena.acquire(2)
            arena.view(region)[:] = torch.tensor([[first + 1.0], [first + 2.0]])
            labels = labels_of([1, 1], [first, first + 1], range(len(layouts)) if first else None,
                               layouts)  # fmt: skip
            drain.submit(region, labels, boundary)
        found = Sums.of_packed(drain.of_sums(lambda sums: sums.read("m", place, "a")))
        drain.finish_request(1)
    assert (found.count, found.x.tolist()) == (4, [10.0] * 4)
    assert sink.events == [(1, 3, 2, 4.0), (1, None)]
    assert sink.num_batches == 1
