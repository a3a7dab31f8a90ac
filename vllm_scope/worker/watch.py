"""Reads scores while requests run, so that probes can stop requests, later stages can begin, and
policies can decide.

Owns:  Watch, and Judged (the results of `judge`).
Runs:  `add` and `take` on the worker's thread, for each step. `judge` runs on the thread that makes
       the step's output, which can be another thread of vLLM.
From:  drain (each step's rows).   To: engine.core.verdicts.

Promise: from the same scores, the watch and the front-end find the same verdicts (batch.readout).
The scores of each position are read one time, in the order of positions. If a position is computed
again after its scores were read, its new scores are not read. If a token can still be rejected, its
scores are not read before the request's next step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_scope.batch.by_position import Ints, last_of_each
from vllm_scope.batch.by_request import by_key, by_layout
from vllm_scope.batch.labels import Labels
from vllm_scope.batch.readout import Readout
from vllm_scope.control.policy import Changes, Decided
from vllm_scope.control.running import Steering
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.request.resolved import Cell, Resolved, ResolvedProbe
from vllm_scope.request.selectors import FAR, Tokens
from vllm_scope.transport.ring import Lease

logger = logging.getLogger("vllm.vllm_scope")

#: The numbers of one cell: the positions [n], and the numbers at these positions, float32 [n,
#: numbers of the probe].
_Numbers = tuple[Ints, torch.Tensor]
#: The scores of one request in one step: the request's key, the positions, and a list with the
#: numbers of each cell of the request's probes. If the batch has no numbers of a cell, for example
#: because the batch has the rows of one tap only, the list has None for this cell.
_Found = tuple[int, Ints, list["torch.Tensor | None"]]
#: Positions [n], and the values at these positions, float32 [n].
_Values = tuple[Ints, torch.Tensor]
#: Maps each position to a dict, which maps each probe's name to the probe's value there.
_Seen = dict[int, dict[str, float]]


class Judged(NamedTuple):
    """The consequences of a step's scores for a request.

    Attributes:
        stops: the reason why the request is stopped; None if the request continues.
        firsts: names of the first stages that got their verdict in this step.
        scales: the new scales of edits that the request's policy has decided.
    """

    stops: str | None = None
    firsts: tuple[str, ...] = ()
    scales: Changes = ()


@dataclass
class _Probe:
    """One probe of one request.

    Attributes:
        waiting: for each cell, the received numbers at positions that were not read yet.
        first: the probe (a first stage) for whose verdict this probe waits, or None.
        next: a position. The values at all smaller positions were read.
        told: True after `judge` has returned the probe's verdict.
    """

    probe: ResolvedProbe
    readout: Readout
    waiting: list[list[_Numbers]]
    first: _Probe | None
    next: int = 0
    told: bool = False

    def wants(self, positions: Ints, num_prompt: int, seen: bool) -> NDArray[np.bool_]:
        """bool [n]: True for tokens whose scores must be read for this probe.

        Args:
            seen: True if a policy sees the probe's values.
        """
        if self.readout.verdict is not None and not seen:
            return np.zeros(len(positions), bool)  # no later value changes the verdict
        # A watched probe scores all prompt tokens, all generated tokens, or all tokens. The probe's
        # selector therefore reads no token ids. The call passes the positions in place of the ids.
        found = self.probe.tokens.select(Tokens(positions, num_prompt, positions, None)).certain
        if self.first is not None:
            verdict = self.first.readout.verdict
            begins = FAR if verdict is None else self.probe.begins(verdict.position, num_prompt)
            found &= positions >= begins
        return found

    def read(self, before: int) -> _Values | None:
        """The new values at positions below `before`, with their positions; None if there are no
        new values. A position has a value only after the numbers of all cells were received for
        this position."""
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
        found = self.readout.read(numbers, positions)
        return positions, found.scores if found.aggregates is None else found.aggregates


@dataclass
class _Watched:
    """A request with a policy, with a first stage, or with a probe that can stop the request.

    Attributes:
        firsts: the same as in Resolved.
        accepted: a position. The tokens at all smaller positions are accepted.
    """

    req_id: str
    num_prompt: int
    probes: list[_Probe]
    firsts: frozenset[str]
    steering: Steering | None = None
    accepted: int = 0

    @property
    def sees(self) -> bool:
        """True if a policy still sees the values of the request's probes."""
        return self.steering is not None and not self.steering.over

    def read(self) -> _Seen:
        """Read the received values. Returns the values that the policy sees. If no policy sees the
        values, the result is empty."""
        seen: _Seen = {}
        sees = self.sees
        for one in self.probes:
            values = one.read(self.accepted)
            if values is not None and sees:
                for position, value in zip(*(x.tolist() for x in values), strict=True):
                    seen.setdefault(position, {})[one.probe.name] = value
        return seen


@dataclass(eq=False)
class Step:
    """Rows that are written to a lease.

    Attributes:
        labels: a function that returns the rows' labels with actual positions, or None if there are
            no rows. Call this function after `wait`.
        wait: a function that returns as soon as the rows are in the lease.
        found: the scores of watched requests; None until the scores are copied.
    """

    labels: Callable[[], Labels | None]
    wait: Callable[[], object]
    lease: Lease
    boundary: int | None
    found: list[_Found] | None = None


class Watch:
    """All running requests with a policy, a first stage, or a probe that can stop the request.

    Args:
        widths: Bytes of a raw row, by kind.
        drafts: True if a computed token can be rejected (speculative decoding).
        tell: The watch calls this function with a request's key and each decision of the request's
            policy.
    """

    def __init__(
        self,
        widths: Widths,
        drafts: bool,
        tell: Callable[[int, Decided], None] = lambda key, decided: None,
    ) -> None:
        self._widths, self._drafts, self._tell = widths, drafts, tell
        self._watched: dict[int, _Watched] = {}
        self._steps: list[Step] = []
        self._open: list[Step] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._watched)

    def __contains__(self, req_id: str) -> bool:
        # The requests are copied first, because `judge` can remove a request on another thread.
        return any(watched.req_id == req_id for watched in tuple(self._watched.values()))

    def add_request(
        self,
        key: int,
        req_id: str,
        num_prompt: int,
        asked: Resolved,
        steering: Steering | None = None,
    ) -> None:
        """Watch the probes `asked.watched` of a request. `key` is the key of the request's rows."""
        known: dict[str | None, _Probe] = {}
        probes = asked.watched
        while len(known) < len(probes):  # the list can have a first stage after its later stages
            for probe in probes:
                if probe.name not in known and (probe.after is None or probe.after in known):
                    waiting: list[list[_Numbers]] = [[] for _ in probe.cells]
                    first = known.get(probe.after)
                    known[probe.name] = _Probe(probe, Readout(probe), waiting, first)
        each = [known[probe.name] for probe in probes]
        self._watched[key] = _Watched(req_id, num_prompt, each, asked.firsts, steering)

    def finish_request(self, key: int) -> None:
        self._watched.pop(key, None)

    def add(
        self,
        labels: Callable[[], Labels | None],
        wait: Callable[[], object],
        lease: Lease,
        boundary: int | None,
    ) -> None:
        """Record that rows are written to `lease`. The arguments are the same as for Step."""
        lease.retain()
        self._steps.append(Step(labels, wait, lease, boundary))
        self._open.append(self._steps[-1])

    def settle(self) -> None:
        """Copy the scores of watched requests, and release the leases of their steps. If the ring
        is full, `HostRing.acquire` calls this method while it waits for room."""
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

    @property
    def has_steps(self) -> bool:
        """True if `take` would return a step."""
        return bool(self._steps)

    def take(self) -> list[Step]:
        """The steps that were added since the last call, for `judge`."""
        found, self._steps = self._steps, []
        return found

    def judge(self, steps: Sequence[Step]) -> dict[str, Judged]:
        """Maps the id of a request to the consequences of the request's new scores. This method
        waits for the rows of `steps`. The caller passes each step one time, in order."""
        reached: dict[int, _Watched] = {}
        for step in steps:
            with _logged():
                self._look(step)
                reached |= self._take_in(step.found or ())
        found: dict[str, Judged] = {}
        for key, watched in reached.items():
            with _logged():
                judged = self._judged(key, watched)
                # True if no later score can have a consequence for the request.
                told = not watched.sees and all(
                    one.told or not (one.probe.stops or one.probe.name in watched.firsts)
                    for one in watched.probes
                )
                over = judged.stops is not None or told
                # Another thread may have ended the request.
                here = (self._watched.pop if over else self._watched.get)(key, None) is not None
                if here and judged != Judged():
                    found[watched.req_id] = judged
        return found

    def _collect(self, labels: Labels, lease: Lease, boundary: int | None) -> list[_Found]:
        """The scores in a lease that belong to watched requests."""
        found: list[_Found] = []
        for layout, tokens, data in by_layout(
            labels.layouts, labels.layout_of, boundary, self._widths, lease.slots
        ):
            local = layout.at(boundary)
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
        """Give scores to the probes that need them. Returns the scores' requests by key."""
        found: dict[int, _Watched] = {}
        # If a request's tokens have several layouts, `some` has several items for this request.
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
                wanted = one.wants(positions, watched.num_prompt, watched.sees)
                for waiting in one.waiting:
                    values = next(each)
                    if values is not None and wanted.any():
                        waiting.append((positions[wanted], values[torch.from_numpy(wanted)]))
        for key, watched in found.items():
            sure = last[key]
            if self._drafts:
                # Only generated tokens of this step can still be rejected. All tokens of the prompt
                # and all tokens before this step are accepted.
                sure = max(first[key], min(sure, watched.num_prompt))
            watched.accepted = max(watched.accepted, sure)
        return found

    def _numbers(
        self, layout: Layout, cell: Cell, count: int, data: np.ndarray
    ) -> torch.Tensor | None:
        """A copy of a cell's numbers, float32 [n, count]; None if the layout has no such cell."""
        slot = layout.made_at(cell.bank, cell.place.point(), self._widths)
        if slot is None:
            return None
        start = slot * SLOT_BYTES + 4 * cell.first
        values = np.ascontiguousarray(data[:, start : start + 4 * count])
        return torch.from_numpy(values.view(np.float32).copy())

    def _judged(self, key: int, watched: _Watched) -> Judged:
        """The consequences of a request's new scores. The policy decides first."""
        seen = watched.read()
        new = []
        for one in watched.probes:
            if one.readout.verdict is not None and not one.told:
                one.told = True
                new.append((one.readout.verdict, one.probe))
        firsts = tuple(probe.name for _, probe in new if probe.name in watched.firsts)
        # The verdict at the lowest position stops the request. If several verdicts are at this
        # position, the verdict of the first probe stops the request.
        stops = [(verdict, probe.name) for verdict, probe in new if probe.stops]
        first = min(stops, key=lambda x: x[0].position, default=None)
        stopped, scales = self._decided(key, watched, seen, FAR if first is None else first[0][0])
        if stopped is None and first is not None:
            (position, value), name = first
            stopped = f"probe {name!r}: {value:.6g} at position {position}"
        return Judged(stopped, firsts, scales)

    def _decided(
        self, key: int, watched: _Watched, seen: _Seen, last: int
    ) -> tuple[str | None, Changes]:
        """Give a request's policy the values at positions up to `last`. Returns the reason why the
        policy stops the request (or None), and the new scales."""
        scales: dict[int, dict[str, float]] = {}
        if watched.steering is not None:
            watched.steering.begin_step()
        for position in sorted(seen):
            if position > last:
                break
            assert watched.steering is not None
            decided = watched.steering.observe(position, seen[position])
            if decided is None:
                continue
            self._tell(key, decided)
            if decided.acts_from is not None:
                scales.setdefault(decided.acts_from, {}).update(decided.scale)
            if decided.stop:
                reason = f"policy {watched.steering.name!r} at position {position}"
                return reason, tuple(scales.items())
        return None, tuple(scales.items())


@contextmanager
def _logged() -> Iterator[None]:
    """A context that logs an exception and raises no error, so that the engine continues."""
    try:
        yield
    except Exception:
        logger.exception("vllm-scope: verdicts of a step could not be made")


def _joined(some: list[_Numbers]) -> _Numbers | None:
    """The numbers of one cell, sorted by position. If a position was received several times, the
    last numbers are used."""
    if not some:
        return None
    if len(some) == 1 and len(some[0][0]) == 1:  # the usual case in decoding
        return some[0]
    positions, at = last_of_each(np.concatenate([positions for positions, _ in some]))
    return positions, torch.cat([values for _, values in some])[torch.from_numpy(at)]
