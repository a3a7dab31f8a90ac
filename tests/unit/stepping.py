"""The worker's own steps, with a stream whose values say whose they are in place of a model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from tests.unit.oracle import (
    apply,
    edits_at,
    known,
    level_of,
    named_point,
    numbers_of,
    terms_of,
)
from vllm_scope import Spec
from vllm_scope.batch.labels import Labels, StepBatch
from vllm_scope.config import ScopeConfig
from vllm_scope.control.running import Policies
from vllm_scope.core.news import Entrant, StepNews, Told
from vllm_scope.engine.worker.delivery import NOBODY, WorkerDelivery
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.engine.worker.worker import ScopeWorker
from vllm_scope.graph.tap import op
from vllm_scope.graph.tap.definition import tap_rows
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.compiler import OVERSHOOT, RequestProgram
from vllm_scope.program.layout import Widths
from vllm_scope.request.resolved import NOTHING, Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.request.ticket import Recipient
from vllm_scope.sinks import RequestInfo, RowBatch
from vllm_scope.transport.ring import HostRing
from vllm_scope.worker.arena import Arena
from vllm_scope.worker.drain import Drain
from vllm_scope.worker.score_store import ScoreStore
from vllm_scope.worker.watch import Watch

CPU = torch.device("cpu")
NUM_LAYERS = 2
MAX_ROWS = 12
#: A row holds its request's key, position, boundary and step: exact in float32.
HIDDEN_SIZE = 4
WIDTHS = Widths((16,))
EVERYWHERE = tuple(range(2 * NUM_LAYERS + 1))
SITES = Sites(NUM_LAYERS, HIDDEN_SIZE, "float32", EVERYWHERE)

#: (key, "row" or a bank's text, point, position)
Label = tuple[int, str, int, int]


@dataclass
class Sent:
    """A request as vLLM sends it to a worker, and what EngineCore says of it.

    Attributes:
        recipient, unchecked: as in Entrant.
        asked: as EngineCore resolved it.
    """

    req_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    recipient: Recipient | None
    asked: Resolved
    unchecked: bool = False

    @property
    def sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(extra_args=None, max_tokens=self.max_tokens)


def news_of(worker: ScopeWorker, *sent: Sent) -> StepNews:
    """What EngineCore tells a worker of these requests."""
    news, told = StepNews(), _told.setdefault(worker, Told())
    for one in sent:
        if one.asked != NOTHING:
            number = told.number_of(one.asked, news)
            ids = np.array(one.prompt_token_ids or [], np.int64)
            whole = RequestProgram.compile(one.asked, SITES, frozenset(EVERYWHERE), len(ids), ids)
            columns = whole.columns(len(ids) + one.max_tokens + OVERSHOOT)
            news.entrants[one.req_id] = Entrant(one.recipient, number, columns, one.unchecked)
    return news


_told: WeakKeyDictionary[ScopeWorker, Told] = WeakKeyDictionary()


def add(worker: ScopeWorker, *sent: Sent) -> None:
    worker.add_requests(list(sent), news_of(worker, *sent))


class Due(NamedTuple):
    """What must come, and by how much it may differ, [n] each."""

    values: np.ndarray
    slack: np.ndarray


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

    def sent(self) -> Sent:
        recipient = None if self.key is None else Recipient(self.key, "f")
        most = len(self.ids) - self.num_prompt
        return Sent(self.req_id, self.prompt, most, recipient, self.asked)

    def program(self, here: tuple[int, ...]) -> RequestProgram:
        ids = np.array(self.prompt, np.int64)
        return RequestProgram.compile(self.asked, SITES, frozenset(here), len(ids), ids)

    def due(self, position: int, number: int, here: tuple[int, ...]) -> dict[Label, Due]:
        """The rows and numbers of banks that a token's computation in one step must deliver."""
        asked, found = self.asked, {}
        assert self.key is not None

        def row(boundary: int, level: int) -> np.ndarray:
            edits = edits_at(asked, SITES, boundary, level, position, self.prompt)
            return apply(edits, np.array([self.key, position, boundary, number]))

        for read in asked.reads:
            for stream in read.streams:
                boundary = stream.boundary
                if boundary in here and known(read.tokens, position, self.prompt)[1]:
                    point = named_point(SITES, stream, read.when)
                    level = level_of(SITES, stream, read.when)
                    values = row(boundary, level)
                    slack = 2e-3 + 1e-4 * np.abs(values)
                    found[self.key, "row", point, position] = Due(values, slack)
        for probe in asked.probes:
            for cell in probe.cells:
                boundary, bank = cell.place.boundary, cell.bank
                if boundary not in here or not known(probe.tokens, position, self.prompt)[1]:
                    continue
                seen, nets = row(boundary, level_of(SITES, cell.place)), asked.banks[bank]
                values = np.concatenate([numbers_of(net, seen) for net in nets])
                # Of the products, and of the row that they see.
                terms = np.concatenate([terms_of(net, np.abs(seen) + 20) for net in nets])
                label = self.key, bank.text, cell.place.point(), position
                found[label] = Due(values, 1e-4 * terms)
        return found


class RecordingSink:
    """Every row, and all numbers of a bank, that it is given, under its label, in order.

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
            for i, row in enumerate(local.points):
                for point in local.names_of(row):
                    self._keep((key, "row", point, position), words[slot + i].tolist())
            for head, points, first, size in local.encoded_at(WIDTHS):
                for i, row in enumerate(points):
                    at = slot + first + i * size
                    numbers = words[at : at + size].flatten()[: head.row_bytes // 4].tolist()
                    for point in local.names_of(row):
                        self._keep((key, head.text, point, position), numbers)
            slot += local.slots(WIDTHS) if batch.boundary is None else per_token
        assert slot == len(words)

    def _keep(self, label: Label, values: list[float]) -> None:
        self.found.setdefault(label, []).append(values)

    def finish_all(self, ends) -> None:
        for key, error in ends:
            self.finish(key, error)

    def finish(self, key: int, error: str | None) -> None:
        self.finished.append((key, error))

    def close(self) -> None: ...


def worker_tables(num_programs: int = 4096) -> Tables:
    return Tables(EVERYWHERE, MAX_ROWS, HIDDEN_SIZE, WIDTHS, CPU, 1.0, num_programs)


@contextmanager
def running_worker(
    here: tuple[int, ...], num_slots: int, num_programs: int = 4096
) -> Iterator[tuple[ScopeWorker, RecordingSink]]:
    """A ScopeWorker as `load` leaves it, and its sink."""
    worker = ScopeWorker(SimpleNamespace(vllm_config=None), ScopeConfig())
    worker.sites, worker.here = SITES, here
    worker.stage, worker.num_stages = 0, 1
    worker.limits = Limits(WIDTHS.row_bytes, 0, num_slots, 1 << 16, num_programs, 1 << 16)
    worker._tables = worker_tables(num_programs)
    worker._arena = Arena(num_slots, torch.float32, CPU)
    sink: Any = RecordingSink()
    ring = HostRing(num_slots, cuda=False)
    watch, store = Watch(WIDTHS, False), ScoreStore(WIDTHS)
    drain = Drain(worker._arena, ring, sink, WIDTHS, watch, store)
    info = RequestInfo(NOBODY, "", "", ())
    worker._delivery = WorkerDelivery(
        ring, sink, sink, drain, watch, store, WIDTHS, info, frozenset(here), Policies({}, 0)
    )
    op.register()
    worker._begin_steps()
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


def draw_step(
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


def run_taps(worker: ScopeWorker, step: Step, number: int, rng: random.Random) -> None:
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
        told = (tables.tokens, tables.programs, tables.ops, tables.vectors, tables.taps[tap])
        torch.ops.vllm_scope.tap(hidden, residual, arena, *told, tables.host)
        if worker.steps._step is None:
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
    if worker.steps._step is None or worker.steps._step.num_slots == 0:
        assert torch.equal(arena, before), "a step that delivers nothing wrote to the arena"
    elif worker.steps._region is not None:
        region = worker.steps._region
        outside = torch.ones(len(arena), dtype=torch.bool)
        outside[region.start : region.stop] = False
        assert torch.equal(arena[outside], before[outside]), "a slot outside the plan was written"
