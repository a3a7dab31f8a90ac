"""Every asked row of every request, once, whatever the batches look like.

The worker's own steps run here (engine.worker.ScopeWorker with plan, tables, arena
and drain), with a stream whose values say whose they are in place of a model.
"""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.strategies import VOCAB, is_selected, specs
from vllm_scope import CapacityError, Except, Read, Spec, TokenIds, Union
from vllm_scope.arena import Arena
from vllm_scope.config import ScopeConfig
from vllm_scope.drain import Drain
from vllm_scope.engine.core import HANDLE
from vllm_scope.engine.worker import ScopeWorker
from vllm_scope.host_ring import HostRing
from vllm_scope.plan import Labels, Planner, StepBatch
from vllm_scope.program import RequestProgram
from vllm_scope.selectors import Tokens
from vllm_scope.sinks import RowBatch
from vllm_scope.spec import Sites
from vllm_scope.tap import op
from vllm_scope.tap.definition import tap_rows
from vllm_scope.tap.tables import Tables

CPU = torch.device("cpu")
NUM_LAYERS = 3
MAX_ROWS = 12
#: A row holds its request's key, position, boundary and step: exact in float32.
HIDDEN_SIZE = 4


@dataclass
class Request:
    """A request of the schedule below.

    Attributes:
        key: None for one that reads nothing.
        ids: prompt and generated tokens; the last generated one is never processed.
    """

    req_id: str
    key: int | None
    spec: Spec
    num_prompt: int
    ids: list[int]
    num_sampled: int = 0
    num_computed: int = 0

    @property
    def num_known(self) -> int:
        return self.num_prompt + self.num_sampled

    @property
    def num_processed(self) -> int:
        return max(len(self.ids) - 1, self.num_prompt)

    @property
    def running(self) -> bool:
        return self.num_computed < self.num_processed

    def as_vllm_sends_it(self) -> SimpleNamespace:
        extra = {"scope": self.spec.to_json(), HANDLE: {"key": self.key, "frontend": "f"}}
        params = SimpleNamespace(extra_args=None if self.key is None else extra)
        return SimpleNamespace(
            req_id=self.req_id,
            sampling_params=params,
            prompt_token_ids=self.ids[: self.num_prompt],
        )

    def tokens(self, first: int, count: int) -> Tokens:
        """What a worker knows of some tokens while it processes them."""
        positions = np.arange(first, first + count)
        ids = np.where(positions < self.num_prompt, np.array(self.ids)[positions], -1)
        return Tokens(positions, self.num_prompt, ids, None)


class RecordingSink:
    """Every row it is given, under its label, in order.

    Attributes:
        batches: (labels, rows, boundary) in order.
        finished: (key, error) in order.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[Labels, torch.Tensor, int | None]] = []
        self.finished: list[tuple[int, str | None]] = []

    def add_request(self, key: int, frontend: str) -> None: ...

    def write(self, batch: RowBatch) -> None:
        self.batches.append((batch.labels, batch.rows.clone(), batch.boundary))

    def rows(self) -> dict[tuple[int, int, int], list[list[float]]]:
        """(key, boundary, position) -> the rows."""
        found: dict[tuple[int, int, int], list[list[float]]] = {}
        for labels, rows, tap in self.batches:
            slot = 0
            for key, position, at in zip(
                labels.keys.tolist(), labels.positions.tolist(), labels.program_of, strict=True
            ):
                boundaries = labels.programs[at].boundaries
                for boundary in boundaries if tap is None else (tap,):
                    if boundary in boundaries:
                        found.setdefault((key, boundary, position), []).append(rows[slot].tolist())
                    slot += 1
            assert slot == len(rows)
        return found

    def finish(self, key: int, error: str | None) -> None:
        self.finished.append((key, error))

    def close(self) -> None: ...


@contextmanager
def _worker(boundaries, here, num_slots: int, num_programs: int = 4096):
    """A ScopeWorker as `load` leaves it, and its sink."""
    worker = ScopeWorker(SimpleNamespace(vllm_config=None), ScopeConfig())
    worker.sites = Sites(NUM_LAYERS, HIDDEN_SIZE, "float32", boundaries)
    worker.here = here
    worker._tables = Tables(boundaries, MAX_ROWS, CPU, num_programs)
    worker._arena = Arena(num_slots, HIDDEN_SIZE, torch.float32, CPU)
    worker._planner = Planner(worker._tables)
    worker._sink = RecordingSink()
    ring = HostRing(num_slots, HIDDEN_SIZE, torch.float32, cuda=False)
    worker._drain = Drain(worker._arena, ring, worker._sink)
    op.register()
    op.connect(worker._tables.numbers, worker)
    try:
        yield worker, worker._sink
    finally:
        worker.close()


@dataclass
class Step:
    """One batch: (request, first position, count), in row order."""

    parts: list[tuple[Request, int, int]]
    #: By how much each request's positions are guessed too high.
    guesses: list[int]

    @property
    def optimistic(self) -> bool:
        return any(self.guesses)

    def batch(self) -> StepBatch:
        counts = [count for *_, count in self.parts]
        guessed = [p + g for (_, p, _), g in zip(self.parts, self.guesses, strict=True)]
        return StepBatch(
            [request.req_id for request, *_ in self.parts],
            np.cumsum([0, *counts]),
            np.array(guessed),
            self.optimistic,
        )

    def rows(self) -> list[tuple[Request, int]]:
        return [(r, p) for r, first, n in self.parts for p in range(first, first + n)]


def _draw_step(
    rng: random.Random, requests: list[Request], speculates: bool, before: Step | None
) -> Step | None:
    """Some of the running requests, in any order, with chunks of any size."""
    running = [r for r in requests if r.running]
    if not running:
        return None
    chosen = rng.sample(running, rng.randint(1, len(running)))
    if before is not None and rng.random() < 0.7:  # mostly a step is the last one, one on
        chosen = [r for r, *_ in before.parts if r.running] or chosen
    step, room = Step([], []), MAX_ROWS
    for request in chosen:
        if request.num_computed > 0 and rng.random() < 0.1:
            request.num_computed = 0  # preempted: computed again from the start
        decodes = request.num_computed >= request.num_prompt
        most = min(request.num_known, request.num_processed) - request.num_computed
        if speculates and decodes:  # draft tokens, here all accepted but not known
            most = min(3, request.num_processed - request.num_computed)
        count = rng.randint(1, min(most, room)) if room else 0
        if count:
            step.parts.append((request, request.num_computed, count))
            step.guesses.append(rng.randint(0, 3) if speculates and decodes else 0)
            room -= count
    return step


def _forward(worker: ScopeWorker, step: Step, number: int, rng: random.Random) -> None:
    """The taps of one forward, and what they leave in the arena."""
    rows = step.rows()
    padding = rng.randint(0, MAX_ROWS - len(rows))
    arena = worker._arena.rows
    before = arena.clone()
    for tap, boundary in enumerate(worker.sites.boundaries):
        if boundary not in worker.here:
            continue
        stream = torch.full((len(rows) + padding, HIDDEN_SIZE), -1e9)
        for row, (request, position) in enumerate(rows):
            stream[row] = torch.tensor([request.key or 0, position, boundary, number])
        residual = torch.randint(-9, 9, stream.shape).float() if rng.random() < 0.8 else None
        hidden = stream if residual is None else stream - residual
        tables = worker._tables
        arguments = (hidden, residual, arena, tables.tokens, tables.programs, tables.ops)
        torch.ops.vllm_scope.tap(*arguments, tables.numbers[tap])
        if worker._step is None:
            # A replayed graph runs its taps whatever the host thinks of the step.
            tap_rows(*arguments, tables.numbers[tap], 0, 1)
    if worker._step is None:
        assert torch.equal(arena, before), "a step without reads wrote to the arena"
    elif worker._region is not None:
        region = worker._region
        outside = torch.ones(len(arena), dtype=torch.bool)
        outside[region.start : region.stop] = False
        assert torch.equal(arena[outside], before[outside]), "a slot outside the plan was written"
        assert (arena[region.start : region.stop, 3] == number).all(), "a slot was left out"


#: Selectors of phases alone, whose decode rows are planned as columns.
_UNIFORM = st.lists(
    st.builds(
        Read,
        st.sampled_from(["resid_post", "resid_pre"]),
        st.lists(st.integers(0, NUM_LAYERS - 1), min_size=1),
        st.sampled_from(["all", "generated", "prompt"]),
    ),
    min_size=1,
    max_size=2,
).map(lambda found: Spec(tuple(found)))


@st.composite
def schedules(draw):
    requests = []
    for i in range(draw(st.integers(1, 5))):
        num_prompt, num_generated = draw(st.integers(1, 14)), draw(st.integers(1, 9))
        ids = st.lists(st.integers(0, VOCAB - 1), min_size=23, max_size=23)
        requests.append(
            Request(
                f"request-{i}",
                None if draw(st.integers(0, 3)) == 0 else 100 + i,
                draw(specs(NUM_LAYERS) | _UNIFORM),
                num_prompt,
                draw(ids)[: num_prompt + num_generated],
            )
        )
    return requests, draw(st.integers(0, 1 << 30))


@settings(max_examples=2 * settings().max_examples)
@given(
    schedules(),
    st.sampled_from([MAX_ROWS, 20, 200]),
    st.sampled_from([(0, 1, 2, 3), (0, 1), (2, 3), (3,), ()]),
    st.booleans(),
)
def test_every_asked_row_comes_once_for_each_time_it_is_computed(
    schedule, num_slots, here, speculates
):
    requests, seed = schedule
    rng = random.Random(seed)
    boundaries = (0, 1, 2, 3)
    #: What must come: label -> the steps that computed it; and what may come besides.
    due: dict[tuple[int, int, int], list[int]] = {}
    may: set[tuple[int, int, int]] = set()
    twin_tables = Tables(boundaries, MAX_ROWS, CPU)
    twin = Planner(twin_tables)
    with _worker(boundaries, here, num_slots) as (worker, sink):
        resolved = {r.req_id: r.spec.resolve(worker.sites) for r in requests}
        step = None
        for number in range(1_000):
            step = _draw_step(rng, requests, speculates, step)
            if step is None:
                break
            new = [r for r, *_ in step.parts if r.req_id not in worker._planner]
            worker.add_requests([r.as_vllm_sends_it() for r in new])
            for request in new:
                if request.key is not None and request.req_id not in twin:
                    twin.add_request(request.req_id, request.key, _program(request, worker))
            positions = torch.tensor([p for _, p in step.rows()])
            planned = worker.num_steps_planned
            if worker.reading():
                worker.begin_step(step.batch(), positions)
            else:
                worker.clear()
            _assert_same_plan(worker._step, twin.begin_step(step.batch())[0])
            reads = [r for r, *_ in step.parts if r.key is not None]
            assert worker.num_steps_planned <= planned + bool(reads)
            _forward(worker, step, number, rng)
            worker.end_step()
            for request, first, count in step.parts:
                request.num_computed = first + count
                if request.num_computed >= request.num_prompt:
                    sampled = request.num_computed + 1 - request.num_prompt
                    request.num_sampled = max(request.num_sampled, sampled)
                if request.key is None:
                    continue
                for read in resolved[request.req_id]:
                    wanted = read.tokens.select(request.tokens(first, count)).possible
                    read_at = {worker.sites.boundary_of(s) for s in read.streams} & set(here)
                    for position in range(first, first + count):
                        for b in read_at:
                            label = (request.key, b, position)
                            if wanted[position - first]:
                                due.setdefault(label, []).append(number)
                            if speculates:
                                may.add(label)
            worker.finish_requests([r.req_id for r, *_ in step.parts if not r.running])
        assert not any(r.running for r in requests)
        assert len(worker._planner) == 0

    found = sink.rows()
    for label, steps in due.items():
        expected = [[*_label_order(label), number] for number in sorted(set(steps))]
        assert found[label] == expected
    for label, rows in found.items():
        assert label in due or label in may, f"nobody asked for {label}"
        assert all(row[:3] == _label_order(label) for row in rows)
        assert len({row[3] for row in rows}) == len(rows), "a row came twice for one step"
    keys = [r.key for r in requests if r.key is not None]
    assert sorted(sink.finished) == [(key, None) for key in keys]

    # And what turns out to be asked for, once everything is known, is among them.
    for request in requests:
        for read, streams in zip(request.spec.reads, resolved.get(request.req_id, ()), strict=True):
            for position in range(request.num_processed if request.key else 0):
                if is_selected(
                    read.tokens.to_json(), position, request.num_prompt,
                    request.ids[position], request.num_processed,
                ):  # fmt: skip
                    for stream in streams.streams:
                        boundary = worker.sites.boundary_of(stream)
                        assert boundary not in here or (request.key, boundary, position) in due


def _label_order(label: tuple[int, int, int]) -> list[float]:
    key, boundary, position = label
    return [key, position, boundary]


def _program(request: Request, worker: ScopeWorker) -> RequestProgram:
    return _compile(request.spec, worker.sites, worker.here, request.ids[: request.num_prompt])


def _compile(spec: Spec, sites: Sites, here: tuple[int, ...], prompt: list[int]) -> RequestProgram:
    ids = np.array(prompt, np.int64)
    return RequestProgram.compile(spec.resolve(sites), sites, frozenset(here), len(ids), ids)


def _assert_same_plan(one, other) -> None:
    """Tensor-parallel ranks plan alike without a message."""
    assert (one is None) == (other is None)
    if one is not None:
        for a, b in (
            (one.program_ids, other.program_ids),
            (one.offsets, other.offsets),
            (one.labels.rows, other.labels.rows),
            (one.labels.positions, other.labels.positions),
        ):
            assert a.tolist() == b.tolist()
        assert one.num_slots == other.num_slots
        assert one.labels.programs == other.labels.programs


# A request at a time

SITES = Sites(12, HIDDEN_SIZE, "float32", tuple(range(13)))


@dataclass
class Engine:
    """A planner and its tables, without arena and drain."""

    num_programs: int = 4096
    tables: Tables = field(init=False)
    planner: Planner = field(init=False)

    def __post_init__(self) -> None:
        self.tables = Tables(SITES.boundaries, 1024, CPU, self.num_programs)
        self.planner = Planner(self.tables)

    def add(self, req_id: str, *reads: Read, num_prompt: int = 4) -> None:
        program = _compile(Spec(reads), SITES, SITES.boundaries, [1] * num_prompt)
        self.planner.add_request(req_id, zlib.crc32(req_id.encode()), program)

    def step(self, **at: tuple[int, int]):
        """Plan a batch of name=(first position, count)."""
        counts = [count for _, count in at.values()]
        first = np.array([position for position, _ in at.values()])
        return self.planner.begin_step(StepBatch(list(at), np.cumsum([0, *counts]), first))


def _asked(plan) -> dict[int, tuple[int, ...]]:
    """Row -> boundaries."""
    labels = plan.labels
    return {
        row: labels.programs[at].boundaries
        for row, at in zip(labels.rows.tolist(), labels.program_of, strict=True)
    }


@pytest.mark.parametrize(
    ("tokens", "num_computed", "num_scheduled", "rows"),
    [
        pytest.param("all", 0, 10, list(range(10)), id="whole-prompt"),
        pytest.param([0, 9], 0, 10, [0, 9], id="two-of-the-prompt"),
        pytest.param([0, 9], 5, 5, [4], id="second-chunk"),
        pytest.param([0, 9], 9, 1, [0], id="last-chunk-of-one"),
        pytest.param([0, 9], 10, 1, [], id="decode-past-every-position"),
        pytest.param("last_prompt", 0, 9, [], id="chunk-before-the-last"),
        pytest.param("generated", 5, 5, [], id="prompt-when-generated-is-asked"),
        pytest.param("generated", 10, 1, [0], id="decode"),
        pytest.param("generated", 8, 6, [2, 3, 4, 5], id="recompute-across-the-prompt's-end"),
        pytest.param("last", 5, 5, [4], id="the-prompt's-end-may-be-the-last"),
        pytest.param("last", 12, 1, [0], id="any-generated-token-may-be-the-last"),
        pytest.param(TokenIds(7), 8, 4, [2, 3], id="ids-of-generated-tokens-are-not-known"),
        pytest.param(Except("all", slice(0, 10, 2)), 0, 10, [1, 3, 5, 7, 9], id="every-other"),
    ],
)
def test_asked_positions_become_rows(tokens, num_computed, num_scheduled, rows):
    engine = Engine()
    engine.add("a", Read("embed", tokens=tokens), num_prompt=10)
    plan, failures = engine.step(a=(num_computed, num_scheduled))
    assert failures == []
    assert (_asked(plan) if plan else {}) == dict.fromkeys(rows, (0,))
    if plan:
        assert plan.labels.positions.tolist() == [num_computed + row for row in rows]
        assert plan.offsets.tolist() == list(range(len(rows)))


@pytest.mark.parametrize(
    ("tokens", "read"),
    [
        pytest.param([12], True, id="one-position"),
        pytest.param("last", True, id="last"),
        pytest.param(Except("all", [12]), True, id="all-but-one-position"),
        pytest.param("generated", True, id="generated"),
        pytest.param("prompt", False, id="prompt"),
    ],
)
def test_where_positions_are_guessed_a_generated_token_is_read_if_it_may_be_asked(tokens, read):
    engine = Engine()
    engine.add("a", Read("embed", tokens=tokens), num_prompt=10)
    batch = StepBatch(["a"], np.array([0, 3]), np.array([14]), optimistic=True)
    plan, failures = engine.planner.begin_step(batch)
    assert failures == []
    assert (_asked(plan) if plan else {}) == dict.fromkeys(range(3) if read else (), (0,))


def test_decode_and_prefill_rows_are_planned_in_the_order_of_the_batch():
    engine = Engine()
    for name, tokens in (("column", "all"), ("run", [0, 2]), ("late", "generated")):
        engine.add(name, Read("embed", tokens=tokens))
    for names in (["column", "run", "late"], ["run", "late", "column"], ["late", "column", "run"]):
        at = {"column": (6, 1), "run": (0, 4), "late": (5, 2)}
        plan, _ = engine.step(**{name: at[name] for name in names})
        first = dict(zip(names, np.cumsum([0, *(at[n][1] for n in names)]).tolist(), strict=False))
        assert plan.labels.rows.tolist() == sorted(
            [first["column"], first["run"], first["run"] + 2, first["late"], first["late"] + 1]
        )
        keys = dict(zip(plan.labels.rows.tolist(), plan.labels.keys.tolist(), strict=True))
        assert all(keys[first[name]] == zlib.crc32(name.encode()) for name in names)


#: One decode step after another: (positions and counts by request, finished before it).
_STEPS = {
    "one-on": [({"a": (6, 1), "b": (9, 1)}, ""), ({"a": (7, 1), "b": (10, 1)}, "")],
    "three-on": [({"a": (p, 1), "plain": (p + 2, 1), "b": (p, 1)}, "") for p in (6, 7, 8, 9)],
    "beside-a-chunked-prompt": [({"a": (p, 1), "plain": (4 * p, 4)}, "") for p in (6, 7, 8)],
    "several-tokens-a-step": [({"a": (6, 2), "b": (9, 2)}, ""), ({"a": (8, 2), "b": (11, 2)}, "")],
    "computed-again": [({"a": (6, 1), "b": (9, 1)}, ""), ({"a": (6, 1), "b": (9, 1)}, "")],
    "one-waits": [({"a": (6, 1), "b": (9, 1)}, ""), ({"b": (10, 1)}, "")],
    "the-other-way-round": [({"a": (6, 1), "b": (6, 1)}, ""), ({"b": (7, 1), "a": (7, 1)}, "")],
    "another-joins": [({"a": (6, 1)}, ""), ({"a": (7, 1), "b": (6, 1)}, "")],
    "one-of-them-no-longer-reads": [
        ({"a": (6, 1), "b": (9, 1)}, ""), ({"a": (7, 1), "b": (10, 1)}, "a"),
        ({"a": (8, 1), "b": (11, 1)}, ""),
    ],
    "the-same-names-now-in-the-prompt": [({"a": (6, 1)}, ""), ({"a": (0, 1)}, "")],
}  # fmt: skip


@pytest.mark.parametrize("steps", _STEPS.values(), ids=list(_STEPS))
def test_a_step_is_planned_alike_whatever_the_one_before_it_was(steps):
    engine, finished = Engine(), set()
    reads = {"a": Read("resid_pre", [1]), "b": Read("resid_pre", [2, 3], "generated")}
    for name, read in reads.items():
        engine.add(name, read)
    for at, done in steps:
        anew = Engine()
        finished.update(done)
        for name in reads:
            if name in finished:
                engine.planner.finish_request(name)
            else:
                anew.add(name, reads[name])
        plan, fresh = engine.step(**at)[0], anew.step(**at)[0]
        assert _asked(plan) == _asked(fresh)
        assert plan.labels.positions.tolist() == fresh.labels.positions.tolist()
        assert plan.labels.keys.tolist() == fresh.labels.keys.tolist()
        assert plan.offsets.tolist() == fresh.offsets.tolist()
        assert plan.num_slots == fresh.num_slots


def test_a_token_of_two_reads_gets_both_and_each_row_once():
    engine = Engine()
    engine.add(
        "a",
        Read("resid_post", [0, 1], "last_prompt"),
        Read("resid_pre", [1, 2], Union("last_prompt", [0])),
    )
    plan, _ = engine.step(a=(0, 4))
    assert _asked(plan) == {0: (1, 2), 3: (1, 2)}
    assert plan.num_slots == 4


def test_a_request_whose_layers_are_all_on_another_stage_takes_no_row():
    engine = Engine()
    program = _compile(Spec((Read("resid_post", [9]),)), SITES, (0, 1, 2), [1] * 4)
    engine.planner.add_request("a", 1, program)
    assert engine.step(a=(0, 4)) == (None, [])
    assert engine.step(a=(4, 1)) == (None, [])


class _Untouchable(list):
    def __iter__(self):
        raise AssertionError("a request was looked at")

    __len__ = __getitem__ = __iter__


def test_without_reading_requests_a_step_looks_at_no_request():
    engine = Engine()
    engine.add("a", Read("embed"))
    engine.planner.finish_request("a")
    uploads = engine.tables.num_uploads
    batch = StepBatch(_Untouchable(), np.array([0, 1]), np.array([0]))
    assert engine.planner.begin_step(batch) == (None, [])
    assert engine.planner.num_requests_planned == 0
    assert engine.tables.num_uploads == uploads


def test_plain_requests_in_the_batch_are_not_planned():
    engine = Engine()
    engine.add("a", Read("embed", tokens="generated"))
    uploads = engine.tables.num_uploads
    assert engine.step(b=(0, 5), c=(9, 1)) == (None, [])
    assert engine.planner.num_requests_planned == 0
    plan, _ = engine.step(b=(0, 5), a=(7, 1), c=(9, 1))
    assert plan.labels.rows.tolist() == [5]
    assert engine.planner.num_requests_planned == 1
    assert engine.tables.num_uploads == uploads


@pytest.mark.parametrize("b_does", [(2, 2), (5, 1)], ids=["prefill", "decode"])
@pytest.mark.parametrize("tokens", ["all", [0]], ids=["all", "one-position"])
def test_a_request_without_a_row_in_the_batch_leaves_its_neighbour_alone(tokens, b_does):
    engine = Engine()
    engine.add("a", Read("embed", tokens=tokens))
    engine.add("b", Read("embed"))
    plan, failures = engine.step(a=(5, 0), b=b_does)
    assert failures == []
    assert plan.labels.rows.tolist() == list(range(b_does[1]))
    assert set(plan.labels.keys.tolist()) == {zlib.crc32(b"b")}
    assert engine.step(a=(5, 0)) == (None, [])


def _nth(n: int) -> Read:
    """One of 8191 reads with different boundaries."""
    return Read("resid_pre", [layer for layer in range(12) if n >> layer & 1])


def test_more_programs_than_ids_work_one_after_another():
    engine = Engine()
    for n in range(1, 4096):  # 8190 programs: each request has one for its prompt too
        name = f"r{n}"
        engine.add(name, _nth(n), Read("resid_post", [11], tokens=[0]))
        plan, failures = engine.step(**{name: (0, 2)})
        assert failures == []
        layers = tuple(_nth(n).layers)
        assert _asked(plan) == {0: (*layers, 12), 1: layers}
        for i, program in enumerate(plan.labels.programs):
            found = int(plan.program_ids[plan.labels.program_of.tolist().index(i)])
            on_device = engine.tables.programs[found, :, 1].nonzero().flatten().tolist()
            assert on_device == list(program.boundaries)
        engine.planner.finish_request(name)


def test_a_finished_request_gives_its_program_back():
    engine = Engine(num_programs=2)
    for n in range(1, 50):
        engine.add("a", _nth(n))
        engine.add("b", _nth(n + 50))
        with pytest.raises(CapacityError, match="all 2 tap programs are in use"):
            engine.add("c", _nth(n + 100))
        assert "c" not in engine.planner
        assert len(engine.planner) == 2
        plan, failures = engine.step(a=(4, 1), b=(6, 1), c=(5, 1))
        assert failures == []
        assert _asked(plan) == {0: tuple(_nth(n).layers), 1: tuple(_nth(n + 50).layers)}
        assert engine.planner.finish_request("a") == zlib.crc32(b"a")
        assert engine.planner.finish_request("b") == zlib.crc32(b"b")
        assert engine.planner.finish_request("c") is None


def test_finished_requests_leave_nothing_behind():
    engine = Engine()
    program = _compile(Spec((Read("embed"),)), SITES, SITES.boundaries, [1])
    tracemalloc.start()
    for i in range(20_000):
        engine.planner.add_request(f"r{i}", i, program)
        engine.planner.finish_request(f"r{i}")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100_000


def test_a_request_without_room_for_its_programs_fails_alone():
    engine = Engine(num_programs=2)
    for n, name in enumerate("abc", start=1):
        engine.add(name, Read("resid_pre", [n], tokens=[0, 1, 2, 3]))
    plan, failures = engine.step(a=(0, 4), b=(2, 2), c=(0, 4))
    ((name, error),) = failures
    assert name == "c"
    assert isinstance(error, CapacityError)
    assert _asked(plan) == dict.fromkeys(range(4), (1,)) | dict.fromkeys((4, 5), (2,))
    plan, failures = engine.step(c=(0, 4))
    assert failures == []
    assert _asked(plan) == dict.fromkeys(range(4), (3,))


def test_a_worker_answers_a_request_that_cannot_be_planned_and_serves_the_others():
    with _worker((0, 1, 2, 3), (0, 1, 2, 3), 100, num_programs=1) as (worker, sink):
        requests = [
            Request(f"r{i}", 10 + i, Spec((Read("resid_post", [i], tokens=[0]),)), 2, [1] * 3)
            for i in range(2)
        ]
        worker.add_requests([r.as_vllm_sends_it() for r in requests])
        step = Step([(r, 0, 2) for r in requests], [0, 0])
        worker.begin_step(step.batch(), torch.tensor([0, 1, 0, 1]))
        _forward(worker, step, 5, random.Random(0))
        worker.end_step()
        worker.finish_requests(["r0", "r1"])
    assert sink.rows() == {(10, 1, 0): [[10, 0, 1, 5]]}
    assert [key for key, _ in sink.finished] == [11, 10]
    assert "tap programs are in use" in sink.finished[0][1]
    assert sink.finished[1][1] is None


def test_a_worker_answers_a_spec_that_is_wrong():
    with _worker((0, 1, 2, 3), (0, 1, 2, 3), 100) as (worker, sink):
        request = Request("a", 10, Spec((Read("resid_post", [99]),)), 2, [1] * 3)
        worker.add_requests([request.as_vllm_sends_it()])
        assert len(worker._planner) == 0
    ((key, error),) = sink.finished
    assert key == 10
    assert "layers 0 to 2" in error


@pytest.mark.parametrize(
    ("tokens", "most_ms"),
    [
        pytest.param("all", 5, id="every-token"),
        pytest.param(Union("prompt", "last"), 50, id="single-tokens"),
    ],
)
def test_256_decoding_requests_are_planned_in_little_time(tokens, most_ms, capsys):
    engine = Engine()
    names = [f"r{i}" for i in range(256)]
    for i, name in enumerate(names):
        engine.add(name, Read("resid_post", [i % 12], tokens))
    took = []
    for step in range(30):
        start = time.perf_counter()
        plan, failures = engine.step(**dict.fromkeys(names, (4 + step, 1)))
        took.append((time.perf_counter() - start) * 1e3)
        assert failures == []
        assert plan.num_slots == 256
    with capsys.disabled():
        print(f"\n  plan of 256 decoding requests, {tokens}: {statistics.median(took):.2f} ms")
    assert statistics.median(took) < most_ms
