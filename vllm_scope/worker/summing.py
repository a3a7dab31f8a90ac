"""Adds rows to sums by label, on the device.

Owns:  Summing, which has the sums, and the waiting rows of running requests.
Runs:  in workers that have a drain. On a CPU, `add` runs on the drain thread, or on the worker's
       thread if a watch needs the step's rows. On a GPU, `add` runs on the worker's thread, and the
       work is enqueued on the drain's stream. All other methods can run on both threads.
From:  filler, drain.   To: kept_sums.

Promise: each action adds the row of a position at most one time, and only if the token at this
position was accepted. Rows of the prompt are added when they are computed. Rows of generated tokens
wait on the device, for two reasons: a draft can be rejected, and async scheduling can compute rows
after a request's end. EngineCore sends the number of accepted tokens when it schedules a request,
and when the request ends. The last token of a result has no row. Therefore the row of a generated
token is added only if the next token was also accepted. If several rows of one position wait, the
last row is added. After the row of a position was added, later rows of this position are ignored.

If rows cannot be added, the sums count these rows as missing, and `add` raises no error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.by_position import Ints
from vllm_scope.batch.labels import Labels
from vllm_scope.batch.sums import Packed
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.heads import Summed
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.request.sites import Place, kind_of_point
from vllm_scope.worker.kept_sums import KeptSums
from vllm_scope.worker.summed_rows import Key, Owners, StepRows, SummedRequest, WaitingRows, picked

logger = logging.getLogger("vllm.vllm_scope")

#: The largest number of bytes of raw rows in one addition: 8,192 rows of 4,096 16-bit numbers. If
#: additions are much smaller, a GPU needs more time to start a kernel than to add the rows.
CHUNK_BYTES = 64 << 20
#: Rows of generated tokens wait until their tokens are accepted. If the waiting rows have more than
#: MOST_BYTES, `add` calls `_settle`, which adds the accepted rows. `add` also calls `_settle` if
#: more than MOST_STEPS steps have added waiting rows since the last call, or if more than
#: MOST_STEPS requests have ended since then.
MOST_BYTES, MOST_STEPS = 64 << 20, 256


class Summing:
    """The sums of one worker.

    Args:
        dtype, device: the arena's dtype and device.
        widths, most_bytes: the same as for KeptSums.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, widths: Widths, most_bytes: int
    ) -> None:
        self._dtype, self._widths = dtype, widths
        self._sums = KeptSums(dtype, device, widths, most_bytes)
        self._requests: dict[int, SummedRequest] = {}
        self._waiting: list[WaitingRows] = []
        #: `_num_bytes`: the number of bytes of the rows in `_waiting`. `_num_steps`: how many steps
        #: have added rows to `_waiting` since the last `_settle`. `_last_step`: the labels of the
        #: last step that has added rows to `_waiting`.
        self._num_bytes = self._num_steps = 0
        self._last_step: Labels | None = None
        #: The number of ended requests whose rows may still wait.
        self._num_over = 0
        self._lock = threading.Lock()

    def add_request(self, key: int, num_prompt: int, asked: Sequence[ResolvedMoments]) -> None:
        places = [{place.point(): place for place in one.streams} for one in asked]
        with self._lock:
            self._requests[key] = SummedRequest(num_prompt, list(asked), places)

    def __contains__(self, key: int) -> bool:
        """True for a request with Moments that runs, or has ended and is not forgotten yet."""
        return key in self._requests

    def __bool__(self) -> bool:
        """True if a request with Moments runs, or has ended and is not forgotten yet."""
        return bool(self._requests)

    def accept(self, key: int, num_tokens: int) -> None:
        """Record how many tokens of a request are accepted. Call `accept` and `add` in the order of
        steps."""
        with self._lock:
            request = self._requests.get(key)
            if request is not None:
                request.accepted = num_tokens

    def finish_request(self, key: int) -> None:
        with self._lock:
            request = self._requests.get(key)
            if request is not None and self._waiting:
                request.over, self._num_over = True, self._num_over + 1
            elif request is not None:
                del self._requests[key]

    def add(
        self,
        words: Tensor,
        labels: Labels,
        boundary: int | None,
        firsts: Ints,
        true: Tensor | None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Add the rows of a region to sums, or keep them until their tokens are accepted.

        Args:
            words: The slots of the region, int64 [num_slots, words of a slot].
            labels, boundary: The same as in sinks.RowBatch.
            firsts: int64 [num_tokens], the first slot of each token.
            true: The actual position of each batch row, in host memory. None if the positions in
                `labels` are correct.
            ready: A function that returns True after the device has written `true`.
        """
        with self._lock:
            reached: list[Callable[[], None]] = []
            num_waiting = len(self._waiting)
            for i, whole in enumerate(labels.layouts):
                layout = whole.at(boundary)
                some = [(head, at) for head, at in layout.encoded if isinstance(head, Summed)]
                tokens = np.flatnonzero(labels.layout_of == i) if some else ()
                for head, points in some if len(tokens) else ():
                    step = StepRows(
                        words, firsts[tokens], labels.keys[tokens], labels.positions[tokens],
                        labels.rows[tokens], true, ready,
                    )  # fmt: skip
                    try:
                        reached += self._take(step, layout.arena, head.number, points)
                    except Exception:
                        logger.exception("vllm-scope: rows could not be added to their sums")
                        self._lose(head.number, points, self._owners(step.keys, head.number))
            # `mark` records the last added position of each request (Owners.reach). After this,
            # rows at smaller positions are ignored. Tokens of a later layout can have smaller
            # positions. Therefore the marks come after all layouts.
            for mark in reached:
                mark()
            if len(self._waiting) > num_waiting and labels is not self._last_step:
                self._num_steps, self._last_step = self._num_steps + 1, labels
            if self._num_bytes > MOST_BYTES or max(self._num_steps, self._num_over) > MOST_STEPS:
                try:
                    self._settle()
                except Exception:
                    logger.exception("vllm-scope: waiting rows could not be added to their sums")

    def _take(
        self, step: StepRows, arena: Layout, number: int, points: tuple[int, ...]
    ) -> Iterator[Callable[[], None]]:
        """Add the rows whose tokens are certainly accepted, and keep all other rows in `_waiting`.
        Yields functions that record, for each request, up to which position rows were added."""
        owners = self._owners(step.keys, number)
        step, owners = step.at(owners.known), owners.at(owners.known)
        sure = owners.numbers(lambda one: one.num_prompt if step.true is not None else one.sure)
        now = step.claimed < sure
        slots = arena.row_slots(self._widths)
        row_bytes = self._widths.row_bytes[kind_of_point(points[0])]
        for point in points if now.any() else ():
            new = step.claimed >= owners.added(number, point)
            at = np.flatnonzero(now & new)
            part, of = step.at(at), owners.at(at)

            def rows_of(some: Ints, part: StepRows = part, slot: int = slots[point]) -> Tensor:
                return part.rows_at(some, slot, row_bytes, self._dtype)

            self._sum(number, point, of, rows_of)
            yield partial(of.reach, number, point, part.claimed)
        later = np.flatnonzero(~now)
        if len(later):
            part = step.at(later)
            try:
                rows = part.rows_of([slots[point] for point in points], row_bytes, self._dtype)
            except torch.OutOfMemoryError:
                logger.exception("vllm-scope: rows could not be kept for their sums")
                self._lose(number, points, owners.at(later))
                return
            one = WaitingRows(number, points, part.keys, part.positions, part.ready, rows)
            self._waiting.append(one)
            self._num_bytes += one.num_bytes

    def _lose(self, number: int, points: Sequence[int], owners: Owners) -> None:
        """Count some rows as missing from their sums."""
        owners = owners.at(owners.known)
        for i, count in zip(*np.unique(owners.of, return_counts=True), strict=True):
            for point in points:
                self._sums.lose(owners.key(i, number, point), int(count))

    def _owners(self, keys: Ints, number: int) -> Owners:
        distinct, of = np.unique(keys, return_inverse=True)
        found = (self._requests.get(key) for key in distinct.tolist())
        return Owners([one if one and one.actions[number] else None for one in found], of)

    def _sum(
        self, number: int, point: int, owners: Owners, rows_of: Callable[[Ints], Tensor]
    ) -> None:
        """Add the rows of a point to their sums. `rows_of` returns the rows at some indices of
        `owners.of`."""
        groups: dict[tuple[Key, tuple[bool, bool]], list[int]] = {}
        targets = np.zeros(len(owners.requests))
        for i in np.unique(owners.of).tolist():
            action = owners.action(i, number)
            kind = action.covariance, action.target is not None
            groups.setdefault((owners.key(i, number, point), kind), []).append(i)
            targets[i] = action.target or 0.0
        for (key, _), some in groups.items():
            at = np.flatnonzero(np.isin(owners.of, some))
            one = self._sums.of(key, owners.action(some[0], number))
            if one is None:
                self._sums.lose(key, len(at))
                continue
            for part in _parts(at, CHUNK_BYTES // one.row_bytes):
                one.add(rows_of, part, targets[owners.of[part]])

    def _settle(self) -> None:
        """Add the waiting rows whose tokens are accepted."""
        ready: list[WaitingRows] = []
        # Rows that are not ready belong to the last steps. The tokens of these rows are not
        # accepted yet.
        other: list[WaitingRows] = []
        for one in self._waiting:
            (ready if one.ready() else other).append(one)
        at: dict[tuple[int, int], list[tuple[WaitingRows, int]]] = {}
        for one in ready:
            for i, point in enumerate(one.points):
                at.setdefault((one.number, point), []).append((one, i))
        for (number, point), some in at.items():
            self._settle_at(number, point, some)
        left = (one.rest(self._owners(one.keys, one.number)) for one in ready)
        self._waiting = [one for one in left if one is not None] + other
        self._num_bytes, self._num_steps = sum(one.num_bytes for one in self._waiting), 0
        self._requests = {key: one for key, one in self._requests.items() if not one.over}
        self._num_over = 0

    def _settle_at(self, number: int, point: int, some: list[tuple[WaitingRows, int]]) -> None:
        """Add the accepted rows of one point. `some` has pairs (waiting rows, index of the point in
        these rows), in the order of steps."""
        positions = np.concatenate([one.positions() for one, _ in some])
        owners = self._owners(np.concatenate([one.keys for one, _ in some]), number)
        sure = owners.numbers(lambda one: one.sure)
        new = (positions < sure) & (positions >= owners.added(number, point))
        due = np.flatnonzero(new & owners.is_known)
        due = _last_of_each(due, owners.of, positions)
        if len(due):
            rows = cache(lambda: torch.cat([one.rows[i] for one, i in some]))
            of = owners.at(due)
            self._sum(number, point, of, lambda part: picked(rows(), due[part]))
            of.reach(number, point, positions[due])

    def names(self, name: str) -> list[tuple[Place, str]]:
        """The places and labels of all sums with this name."""
        with self._lock:
            self._settle()
            return [(place, label) for of, place, label in self._sums.keys() if of == name]

    def held(self) -> list[str]:
        """The names of all sums."""
        with self._lock:
            self._settle()
            return sorted({name for name, _, _ in self._sums.keys()})

    def read(self, name: str, place: Place, label: str) -> Packed | None:
        """The sums of this name, place and label so far; None if there are no such sums."""
        with self._lock:
            self._settle()
            return self._sums.read((name, place, label))

    def drop(self, name: str) -> bool:
        """Forget all sums with this name. From then on, running requests add no rows to sums of
        this name. Returns False if there are no sums with this name."""
        with self._lock:
            for request in self._requests.values():
                request.actions = [
                    None if one is not None and one.name == name else one for one in request.actions
                ]
            return self._sums.drop(name)


def _last_of_each(at: Ints, of: Ints, positions: Ints) -> Ints:
    """For each pair of request and position, the last index in `at`. The result is in ascending
    order."""
    order = np.lexsort((at, positions[at], of[at]))
    one, where = of[at][order], positions[at][order]
    last = np.ones(len(at), bool)
    last[:-1] = (one[1:] != one[:-1]) | (where[1:] != where[:-1])
    return np.sort(at[order[last]])


def _parts(at: Ints, most: int) -> Iterator[Ints]:
    most = max(1, most)
    for first in range(0, len(at), most):
        yield at[first : first + most]
