"""Verdicts while the model runs: which requests a probe stops.

Owns:  Watch.
Runs:  `add` and `take` on the worker's thread, behind a step's rows; `judge` where the step's
       output is made, maybe on a thread of vLLM's.
From:  drain (each step's rows, as they leave the arena).   To: engine.core.verdicts.

Promise: a verdict is the one that the front-end finds in the same scores (batch.readout). Each
position counts once, in order: a position that is computed again does not count, and of a token
that may be rejected nothing counts before the step after it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_scope.batch.by_position import Ints, last_of_each
from vllm_scope.batch.by_request import by_key, by_layout
from vllm_scope.batch.labels import Labels
from vllm_scope.batch.readout import Readout, Verdict
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.request.resolved import Cell, ResolvedProbe
from vllm_scope.request.selectors import FAR, Tokens
from vllm_scope.transport.ring import Lease

logger = logging.getLogger(__name__)

#: Numbers of one cell: positions, and float32 [n, numbers of the probe].
_Numbers = tuple[Ints, torch.Tensor]
#: Of one request in one step: its key, positions, and the numbers of each cell of its probes; None
#: for a cell that is not in this batch.
_Found = tuple[int, Ints, list["torch.Tensor | None"]]


@dataclass
class _Probe:
    """One probe of one request.

    Attributes:
        waiting: of each cell, what has arrived at positions that were not read yet.
        next: positions below it were read.
    """

    probe: ResolvedProbe
    readout: Readout
    waiting: list[list[_Numbers]]
    next: int = 0

    def read(self, before: int) -> Verdict | None:
        """Read the positions below `before` that have arrived at every cell."""
        cells = [_joined(some) for some in self.waiting]
        if any(cell is None for cell in cells):
            return None
        known = [cell for cell in cells if cell is not None]
        positions = known[0][0]
        for other, _ in known[1:]:
            positions = np.intersect1d(positions, other)
        positions = positions[(positions >= self.next) & (positions < before)]
        if not len(positions):
            return None
        numbers = sum(values[torch.from_numpy(at.searchsorted(positions))] for at, values in known)
        assert isinstance(numbers, torch.Tensor)
        self.next = int(positions[-1]) + 1
        cuts = [at.searchsorted(self.next) for at, _ in known]
        self.waiting = [
            [(at[cut:], values[cut:])] if cut < len(at) else []
            for (at, values), cut in zip(known, cuts, strict=True)
        ]
        self.readout.read(numbers, positions)
        return self.readout.verdict


@dataclass
class _Watched:
    """A request whose probes may stop it.

    Attributes:
        accepted: positions below it have tokens that were accepted.
    """

    req_id: str
    num_prompt: int
    probes: list[_Probe]
    accepted: int = 0


@dataclass(eq=False)
class Step:
    """Rows on their way.

    Attributes:
        labels: called once the rows are there; the true labels, None if no rows came.
        wait: returns when they are.
        found: what watched requests have there; None until it was copied.
    """

    labels: Callable[[], Labels | None]
    wait: Callable[[], None]
    lease: Lease
    boundary: int | None
    found: list[_Found] | None = None


class Watch:
    """The requests that a probe may stop.

    Args:
        widths: of raw rows.
        drafts: True if a computed token may be rejected (speculative decoding).
    """

    def __init__(self, widths: Widths, drafts: bool) -> None:
        self._widths, self._drafts = widths, drafts
        self._watched: dict[int, _Watched] = {}
        self._steps: list[Step] = []
        self._open: list[Step] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._watched)

    def __contains__(self, req_id: str) -> bool:
        # In a copy: `judge` may remove one on its thread.
        return any(watched.req_id == req_id for watched in tuple(self._watched.values()))

    def add_request(
        self, key: int, req_id: str, num_prompt: int, probes: Sequence[ResolvedProbe]
    ) -> None:
        """Watch a request, whose rows have this key."""
        self._watched[key] = _Watched(
            req_id, num_prompt,
            [_Probe(probe, Readout(probe), [[] for _ in probe.cells]) for probe in probes],
        )  # fmt: skip

    def finish_request(self, key: int) -> None:
        self._watched.pop(key, None)

    def add(
        self,
        labels: Callable[[], Labels | None],
        wait: Callable[[], None],
        lease: Lease,
        boundary: int | None,
    ) -> None:
        """Rows that are on their way to `lease`; arguments as in Step."""
        lease.retain()
        self._steps.append(Step(labels, wait, lease, boundary))
        self._open.append(self._steps[-1])

    def settle(self) -> None:
        """Copy what is watched, and release the leases: `acquire` waits for one."""
        for step in tuple(self._open):
            with _logged():
                self._look(step)

    def _look(self, step: Step) -> None:
        with self._lock:
            if step.found is None:
                step.found = []
                self._open.remove(step)
                try:
                    step.wait()
                    labels = step.labels()
                    if labels is not None:
                        step.found = self._collect(labels, step.lease, step.boundary)
                finally:
                    step.lease.release()

    def take(self) -> list[Step]:
        """The steps that were added since the last call, for `judge`."""
        found, self._steps = self._steps, []
        return found

    def judge(self, steps: Sequence[Step]) -> dict[str, str]:
        """Request -> why it is stopped, each once. Waits for the rows of these steps, the next ones
        in order."""
        reached: dict[int, _Watched] = {}
        for step in steps:
            with _logged():
                self._look(step)
                reached |= self._take_in(step.found or ())
        found: dict[str, str] = {}
        for key, watched in reached.items():
            with _logged():
                reason = self._reason(watched)
                # It may have ended on the other thread.
                if reason is not None and self._watched.pop(key, None) is not None:
                    found[watched.req_id] = reason
        return found

    def _collect(self, labels: Labels, lease: Lease, boundary: int | None) -> list[_Found]:
        """What the watched requests have there."""
        found: list[_Found] = []
        for layout, tokens, data in by_layout(
            labels.layouts, labels.layout_of, boundary, self._widths, lease.slots
        ):
            local = layout if boundary is None else layout.at(boundary)
            for key, some in by_key(labels.keys[tokens]):
                watched = self._watched.get(key)
                if watched is not None:
                    numbers = [
                        self._numbers(local, cell, one.probe.num_values, data[some])
                        for one in watched.probes
                        for cell in one.probe.cells
                    ]
                    found.append((key, labels.positions[tokens[some]], numbers))
        return found

    def _take_in(self, some: Iterable[_Found]) -> dict[int, _Watched]:
        """By key, the requests that got something."""
        found: dict[int, _Watched] = {}
        # A request's tokens of several layouts come apart.
        first, last = dict[int, int](), dict[int, int]()
        for key, positions, numbers in some:
            watched = self._watched.get(key)
            if watched is None:
                continue
            found[key] = watched
            first[key] = min(first.get(key, FAR), int(positions.min()))
            last[key] = max(last.get(key, 0), int(positions.max()) + 1)
            each = iter(numbers)
            for one in watched.probes:
                wanted = _of_tokens(one.probe, positions, watched.num_prompt)
                for waiting in one.waiting:
                    values = next(each)
                    if values is not None and wanted.any():
                        waiting.append((positions[wanted], values[torch.from_numpy(wanted)]))
        for key, watched in found.items():
            sure = last[key]
            if self._drafts:
                # Drafts come after the prompt. A step begins where the accepted tokens end.
                sure = max(first[key], min(sure, watched.num_prompt))
            watched.accepted = max(watched.accepted, sure)
        return found

    def _numbers(
        self, layout: Layout, cell: Cell, count: int, data: np.ndarray
    ) -> torch.Tensor | None:
        """float32 [n, count], in memory of its own; None if they are not in this layout."""
        slot = layout.made_at(cell.bank, cell.place.point(), self._widths)
        if slot is None:
            return None
        start = slot * SLOT_BYTES + 4 * cell.first
        values = np.ascontiguousarray(data[:, start : start + 4 * count])
        return torch.from_numpy(values.view(np.float32).copy())

    @staticmethod
    def _reason(watched: _Watched) -> str | None:
        """The verdict at the first position; of several there, the one of the first probe."""
        each = [(one.read(watched.accepted), one.probe.name) for one in watched.probes]
        found = [(verdict, name) for verdict, name in each if verdict is not None]
        if not found:
            return None
        (position, value), name = min(found, key=lambda x: x[0].position)
        return f"probe {name!r}: {value:.6g} at position {position}"


@contextmanager
def _logged() -> Iterator[None]:
    """A fault of ours must not end the engine, whose outputs are made meanwhile."""
    try:
        yield
    except Exception:
        logger.exception("vllm-scope: verdicts of a step could not be made")


def _of_tokens(probe: ResolvedProbe, positions: Ints, num_prompt: int) -> NDArray[np.bool_]:
    """bool [n]: the tokens that the probe scores; a probe that stops takes whole phases."""
    # The ids are not looked at: the phase alone decides.
    return probe.tokens.select(Tokens(positions, num_prompt, positions, None)).certain


def _joined(some: list[_Numbers]) -> _Numbers | None:
    """Sorted by position; of a position that came several times, the last numbers."""
    if not some:
        return None
    if len(some) == 1 and len(some[0][0]) == 1:  # the usual step of decoding
        return some[0]
    positions, at = last_of_each(np.concatenate([positions for positions, _ in some]))
    return positions, torch.cat([values for _, values in some])[torch.from_numpy(at)]
