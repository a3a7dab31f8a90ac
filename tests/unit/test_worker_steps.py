"""Every asked row and score of every request, once, whatever the batches look like.

The worker's own steps run here (engine.worker.ScopeWorker with plan, tables, arena
and drain), with a stream whose values say whose they are in place of a model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.oracle import apply, edits_at, first_point, known, level_of
from tests.unit.strategies import VOCAB, is_selected, specs
from vllm_scope import Add, Read, Spec
from vllm_scope.arena import Arena
from vllm_scope.config import ScopeConfig
from vllm_scope.drain import Drain
from vllm_scope.engine.core import HANDLE
from vllm_scope.engine.delivery import NOBODY, Delivery
from vllm_scope.engine.sizes import Limits
from vllm_scope.engine.worker import ScopeWorker
from vllm_scope.host_ring import HostRing
from vllm_scope.plan import Labels, Planner, StepBatch
from vllm_scope.program import RequestProgram
from vllm_scope.registry import Registry
from vllm_scope.sinks import RequestInfo, RowBatch
from vllm_scope.sites import LEVELS, Sites, boundary_of_point
from vllm_scope.spec import Resolved
from vllm_scope.tap import op
from vllm_scope.tap.definition import tap_rows
from vllm_scope.tap.tables import Tables

CPU = torch.device("cpu")
NUM_LAYERS = 2
MAX_ROWS = 12
#: A row holds its request's key, position, boundary and step: exact in float32.
HIDDEN_SIZE = 4
ROW_BYTES = 16
EVERYWHERE = tuple(range(2 * NUM_LAYERS + 1))
SITES = Sites(NUM_LAYERS, HIDDEN_SIZE, "float32", EVERYWHERE)

#: (key, "row" or "score", point or number of the probe, position)
Label = tuple[int, str, int, int]


@dataclass
class Request:
    """A request of the schedule below.

    Attributes:
        key: None for a plain one.
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
    def asked(self) -> Resolved:
        return self.spec.resolve(SITES) if self.key is not None else Resolved()

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.num_prompt]

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
        params = SimpleNamespace(
            extra_args=None if self.key is None else extra,
            max_tokens=len(self.ids) - self.num_prompt,
        )
        return SimpleNamespace(
            req_id=self.req_id, sampling_params=params, prompt_token_ids=self.prompt
        )

    def program(self, here: tuple[int, ...]) -> RequestProgram:
        ids = np.array(self.prompt, np.int64)
        return RequestProgram.compile(self.asked, SITES, frozenset(here), len(ids), ids)

    def due(self, position: int, number: int, here: tuple[int, ...]) -> dict[Label, list[float]]:
        """The rows and scores that a token's computation in one step must deliver."""
        asked, found = self.asked, {}
        assert self.key is not None

        def row(boundary: int, level: int) -> np.ndarray:
            edits = edits_at(asked, SITES, boundary, level, position, self.prompt)
            return apply(edits, np.array([self.key, position, boundary, number]))

        for read in asked.reads:
            for stream in read.streams:
                boundary = SITES.boundary_of(stream)
                if boundary in here and known(read.tokens, position, self.prompt)[1]:
                    point = first_point(asked, SITES, stream, read.when)
                    level = level_of(SITES, stream, read.when)
                    found[self.key, "row", point, position] = row(boundary, level).tolist()
        for i, probe in enumerate(asked.probes):
            boundary = SITES.boundary_of(probe.stream)
            if boundary in here and known(probe.tokens, position, self.prompt)[1]:
                seen = row(boundary, level_of(SITES, probe.stream))
                score = seen @ probe.weight.numpy.astype(np.float64) + probe.bias
                found[self.key, "score", i, position] = [float(score)]
        return found


class RecordingSink:
    """Every row and score it is given, under its label, in order.

    Attributes:
        found: label -> what came.
        finished: (key, error) in order.
    """

    def __init__(self) -> None:
        self.found: dict[Label, list[list[float]]] = {}
        self.finished: list[tuple[int, str | None]] = []

    def add_request(self, key: int, frontend: str) -> None: ...

    def leave_out_rows(self, key: int) -> None: ...

    def write(self, batch: RowBatch) -> None:
        labels: Labels = batch.labels
        words = batch.slots.clone().view(torch.float32)
        slot, per_token = 0, len(words) // len(labels.keys)
        for key, position, at in zip(
            labels.keys.tolist(), labels.positions.tolist(), labels.layout_of, strict=True
        ):
            layout = labels.layouts[at]
            local = layout if batch.boundary is None else layout.at(batch.boundary)
            for i, point in enumerate(local.points):
                self._keep((key, "row", point, position), words[slot + i].tolist())
            scores = words[slot + len(local.points) :].flatten()
            for i, (_, number) in enumerate(local.scores):
                self._keep((key, "score", number, position), [float(scores[i])])
            slot += local.slots(1) if batch.boundary is None else per_token
        assert slot == len(words)

    def _keep(self, label: Label, values: list[float]) -> None:
        self.found.setdefault(label, []).append(values)

    def finish(self, key: int, error: str | None) -> None:
        self.finished.append((key, error))

    def close(self) -> None: ...


def _tables(num_programs: int = 4096) -> Tables:
    return Tables(EVERYWHERE, MAX_ROWS, HIDDEN_SIZE, ROW_BYTES, CPU, 1.0, num_programs)


@contextmanager
def _worker(
    here: tuple[int, ...], num_slots: int, num_programs: int = 4096
) -> Iterator[tuple[ScopeWorker, RecordingSink]]:
    """A ScopeWorker as `load` leaves it, and its sink."""
    worker = ScopeWorker(SimpleNamespace(vllm_config=None), ScopeConfig())
    worker.sites, worker.here = SITES, here
    worker.registry = Registry(SITES)
    worker.limits = Limits(1, 0, num_slots, 1 << 16, num_programs, 1 << 16)
    worker._tables = _tables(num_programs)
    worker._arena = Arena(num_slots, torch.float32, CPU)
    worker._planner = Planner(worker._tables)
    sink: Any = RecordingSink()
    ring = HostRing(num_slots, cuda=False)
    drain = Drain(worker._arena, ring, sink, ROW_BYTES)
    worker._delivery = Delivery(ring, sink, sink, drain, RequestInfo(NOBODY, "", "", ()))
    op.register()
    op.connect(worker._tables.numbers, worker)
    try:
        yield worker, sink
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
    """The taps of one forward; what they leave in the stream and in the arena."""
    rows = step.rows()
    padding = rng.randint(0, MAX_ROWS - len(rows))
    arena, tables = worker._arena.slots, worker._tables
    before = arena.clone()
    for tap, boundary in enumerate(worker.sites.boundaries):
        if boundary not in worker.here:
            continue
        stream = torch.full((len(rows) + padding, HIDDEN_SIZE), -1e9)
        for row, (request, position) in enumerate(rows):
            stream[row] = torch.tensor([request.key or 0, position, boundary, number])
        residual = torch.randint(-9, 9, stream.shape).float() if rng.random() < 0.8 else None
        hidden = stream.clone() if residual is None else stream - residual
        told = (tables.tokens, tables.programs, tables.ops, tables.vectors, tables.numbers[tap])
        torch.ops.vllm_scope.tap(hidden, residual, arena, *told, tables.host)
        if worker._step is None:
            # A replayed graph runs its taps whatever the host thinks of the step.
            tap_rows(hidden, residual, arena, *told, tables.host, 0, 0)
        after = hidden if residual is None else hidden + residual
        for row, (request, position) in enumerate(rows):
            edits = edits_at(request.asked, SITES, boundary, 2, position, request.prompt)
            expected = apply(edits, stream[row].numpy())
            np.testing.assert_allclose(after[row], expected, rtol=1e-4, atol=2e-3)
            if not edits:
                assert torch.equal(after[row], stream[row])
        assert torch.equal(after[len(rows) :], stream[len(rows) :])
    if worker._step is None or worker._step.num_slots == 0:
        assert torch.equal(arena, before), "a step that delivers nothing wrote to the arena"
    elif worker._region is not None:
        region = worker._region
        outside = torch.ones(len(arena), dtype=torch.bool)
        outside[region.start : region.stop] = False
        assert torch.equal(arena[outside], before[outside]), "a slot outside the plan was written"


#: Selectors of phases alone, whose decode rows are planned as columns.
_PHASES = st.sampled_from(["all", "generated", "prompt"])
_LAYERS = st.lists(st.integers(0, NUM_LAYERS - 1), min_size=1)
_UNIFORM = st.lists(
    st.builds(Read, st.sampled_from(["resid_post", "resid_pre"]), _LAYERS, _PHASES),
    min_size=1,
    max_size=2,
).map(lambda found: Spec(tuple(found)))
#: Edits alone, which need no slots.
_EDITING = st.builds(
    lambda layers, tokens: Spec(edits=(Add([1.0, 2.0, 0.0, -1.0], layer=layers, tokens=tokens),)),
    _LAYERS,
    _PHASES,
)


@st.composite
def schedules(draw):
    """Requests, whether they are decoded speculatively, and a seed.

    With speculation they only read; edits have a test of their own.
    """
    requests = []
    speculates = draw(st.booleans())
    some = _UNIFORM | specs(NUM_LAYERS, only_reads=True)
    if not speculates:
        some = st.one_of(some, _EDITING, specs(NUM_LAYERS))
    for i in range(draw(st.integers(1, 5))):
        num_prompt, num_generated = draw(st.integers(1, 14)), draw(st.integers(1, 9))
        ids = st.lists(st.integers(0, VOCAB - 1), min_size=23, max_size=23)
        requests.append(
            Request(
                f"request-{i}",
                None if draw(st.integers(0, 3)) == 0 else 100 + i,
                draw(some),
                num_prompt,
                draw(ids)[: num_prompt + num_generated],
            )
        )
    return requests, speculates, draw(st.integers(0, 1 << 30))


@given(
    schedules(),
    # Room for one tap of the largest step: three points and two scores; or for more.
    st.sampled_from([4 * MAX_ROWS, 60, 600]),
    st.sampled_from([EVERYWHERE, (0, 1, 2), (3, 4), (4,)]),
)
def test_every_asked_row_comes_once_for_each_time_it_is_computed(schedule, num_slots, here):
    requests, speculates, seed = schedule
    # A worker that has nothing to do for a request: test_plan.
    assume(not any(r.program(here).empty for r in requests if r.key is not None))
    rng = random.Random(seed)
    #: What must come: label -> what each step that computed it gives; and what may come.
    due: dict[Label, list[list[float]]] = {}
    may: set[tuple[int, int]] = set()
    twin = Planner(_tables())
    with _worker(here, num_slots) as (worker, sink):
        step = None
        for number in range(1_000):
            step = _draw_step(rng, requests, speculates, step)
            if step is None:
                break
            new = [r for r, *_ in step.parts if r.req_id not in worker._planner]
            worker.add_requests([r.as_vllm_sends_it() for r in new])
            for request in new:
                if request.key is not None:
                    most = len(request.ids)
                    twin.add_request(request.req_id, request.key, request.program(here), most)
            positions = torch.tensor([p for _, p in step.rows()])
            planned = worker.num_steps_planned
            if worker.has_requests():
                worker.begin_step(step.batch(), positions)
            else:
                worker.clear()
            _assert_same_plan(worker._step, twin.begin_step(step.batch()))
            asking = [r for r, *_ in step.parts if r.key is not None]
            assert worker.num_steps_planned <= planned + bool(asking)
            _forward(worker, step, number, rng)
            worker.end_step()
            for request, first, count in step.parts:
                request.num_computed = first + count
                if request.num_computed >= request.num_prompt:
                    sampled = request.num_computed + 1 - request.num_prompt
                    request.num_sampled = max(request.num_sampled, sampled)
                if request.key is None:
                    continue
                for position in range(first, first + count):
                    for label, values in request.due(position, number, here).items():
                        due.setdefault(label, []).append(values)
                    if speculates:
                        may.add((request.key, position))
            ended = [r.req_id for r, *_ in step.parts if not r.running]
            worker.finish_requests(ended)
            for req_id in ended:
                twin.finish_request(req_id)
        assert not any(r.running for r in requests)
        assert len(worker._planner) == 0

    for label, values in due.items():
        np.testing.assert_allclose(sink.found[label], values, rtol=1e-4, atol=2e-3)
    for label, rows in sink.found.items():
        if label in due:
            continue
        key, _, point, position = label
        assert (key, position) in may, f"nobody asked for {label}"
        for row in rows:
            assert row[:3] == [key, position, boundary_of_point(point)]
        assert len({row[3] for row in rows}) == len(rows), "a row came twice for one step"
    keys = [r.key for r in requests if r.key is not None]
    assert sorted(sink.finished) == [(key, None) for key in keys]
    for request in requests:
        if request.key is not None:
            _assert_covers(request, here, due)


def _assert_covers(request: Request, here: tuple[int, ...], due: dict[Label, list]) -> None:
    """What turns out to be asked for, once everything is known, is among what was due."""
    asked, key = request.asked, request.key
    for item in (*asked.reads, *asked.probes):
        streams = item.streams if hasattr(item, "streams") else (item.stream,)
        for stream in streams:
            if SITES.boundary_of(stream) not in here:
                continue
            for position in range(request.num_processed):
                if is_selected(
                    item.tokens.to_json(), position, request.num_prompt,
                    request.ids[position], request.num_processed,
                ):  # fmt: skip
                    if hasattr(item, "when"):
                        point = first_point(asked, SITES, stream, item.when)
                        assert point // LEVELS == SITES.boundary_of(stream)
                        assert (key, "row", point, position) in due
                    else:
                        assert (key, "score", asked.probes.index(item), position) in due


def _assert_same_plan(one, found) -> None:
    """Tensor-parallel ranks plan alike without a message."""
    other, failures = found
    assert failures == []
    assert (one is None) == (other is None)
    if one is not None:
        for a, b in (
            (one.rows, other.rows),
            (one.program_ids, other.program_ids),
            (one.offsets, other.offsets),
            (one.delivers, other.delivers),
            (one.labels.rows, other.labels.rows),
            (one.labels.positions, other.labels.positions),
            (one.labels.layout_of, other.labels.layout_of),
        ):
            assert a.tolist() == b.tolist()
        assert one.num_slots == other.num_slots
        assert one.labels.layouts == other.labels.layouts


# What goes wrong


def test_a_request_that_cannot_be_planned_is_answered_and_the_others_are_served():
    with _worker(EVERYWHERE, 100, num_programs=1) as (worker, sink):
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
    assert sink.found == {(10, "row", 2 * LEVELS, 0): [[10, 0, 2, 5]]}
    assert [key for key, _ in sink.finished] == [11, 10]
    assert "tap programs are in use" in sink.finished[0][1]
    assert sink.finished[1][1] is None


def test_a_spec_that_is_wrong_is_answered():
    with _worker(EVERYWHERE, 100) as (worker, sink):
        request = Request("a", 10, Spec((Read("resid_post", [99]),)), 2, [1] * 3)
        worker.add_requests([request.as_vllm_sends_it()])
        assert len(worker._planner) == 0
    ((key, error),) = sink.finished
    assert key == 10
    assert "layers 0 to 1" in error


def test_server_edits_reach_plain_requests_and_deliver_nothing():
    with _worker(EVERYWHERE, 100) as (worker, sink):
        edits = Spec(edits=(Add([1.0, 0, 0, 0], layer=0),))
        server = worker.registry.set_edits(edits.to_json())
        request = Request("a", 0, edits, 2, [1] * 3)
        sent = request.as_vllm_sends_it()
        sent.sampling_params.extra_args = {HANDLE: {"server": server}}
        worker.add_requests([sent])
        step = Step([(request, 0, 2)], [0])
        worker.begin_step(step.batch(), torch.tensor([0, 1]))
        _forward(worker, step, 5, random.Random(0))
        worker.end_step()
        worker.finish_requests(["a"])
    assert sink.found == {}
    assert sink.finished == []


def test_edits_alone_upload_once_while_the_batch_stays_the_same():
    with _worker(EVERYWHERE, 100) as (worker, _):
        request = Request("a", 10, Spec(edits=(Add([1.0, 0, 0, 0], layer=0),)), 2, [1] * 20)
        worker.add_requests([request.as_vllm_sends_it()])
        uploads = []
        for position in range(2, 8):
            step = Step([(request, position, 1)], [0])
            worker.begin_step(step.batch(), torch.tensor([position]))
            _forward(worker, step, position, random.Random(0))
            worker.end_step()
            uploads.append(worker._tables.num_uploads)
        assert len(set(uploads[1:])) == 1
        worker.clear()  # a dummy forward comes between
        worker.begin_step(Step([(request, 8, 1)], [0]).batch(), torch.tensor([8]))
        assert worker._tables.num_uploads == uploads[-1] + 1
