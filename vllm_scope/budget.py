"""How many bytes the running requests of one process may hold.

Owns:  Budget, Share (one request's part of it) and `bytes_of_prompt`.
Runs:  in an API server: shares are taken on its event loop and grow on the road's threads.
       Where the one who asks is the one whose memory it is, nobody counts.
To:    inbox (who is let in), pending (what may be kept).

Promise: what a prompt delivers is taken when its request is let in; what comes beside it, as
it comes. What a request holds is given back when it is forgotten, or gone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from vllm_scope.compile import canonical_point, edited_places
from vllm_scope.encoding import Encoding
from vllm_scope.errors import CapacityError, SpecError
from vllm_scope.layout import SLOT_BYTES, slots_of_row
from vllm_scope.resolve import Resolved
from vllm_scope.selectors import Tokens
from vllm_scope.sites import Sites, boundary_of_point

#: A value's position, and when it came.
LABEL_BYTES = 16
FULL = (
    "the rows of all running requests reached what this server holds of them "
    "(VLLM_SCOPE_ROWS_MIB), and this request's were let go; read less of it, or send it again "
    "when there is less to do"
)


class Budget:
    """Bytes that may be held, and those that are; any thread."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._held = 0
        self._lock = threading.Lock()
        #: Without the lock: the garbage collector may give in the middle of a `take`.
        self._given: deque[int] = deque()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._settled()

    def take(self, num_bytes: int) -> bool:
        """Whether there was room for so many more."""
        with self._lock:
            if self._settled() + num_bytes > self.most_bytes:
                return False
            self._held += num_bytes
            return True

    def give(self, num_bytes: int) -> None:
        self._given.append(num_bytes)

    def _settled(self) -> int:
        while self._given:
            self._held -= self._given.popleft()
        return self._held


class Share:
    """What one request has taken.

    Args:
        promised: bytes that its prompt will deliver.
        copies: how many requests like this one come together (`n`).

    Raises:
        SpecError: they are more than may be held.
        CapacityError: with what others hold they are more.
    """

    def __init__(self, budget: Budget, promised: int, copies: int = 1) -> None:
        self._budget = budget
        self._came = self._taken = 0
        #: The request is gone; what is still copied for it is let go.
        self._closed = False
        most = f"{budget.most_bytes / 2**20:.1f} MiB (VLLM_SCOPE_ROWS_MIB)"
        needed = promised * copies
        told = f"{needed / 2**20:.1f} MiB of rows and scores"
        if needed > budget.most_bytes:
            raise SpecError(
                f"the prompt alone delivers {told}, of all its completions; this server holds "
                f"{most} of all running requests'. Read fewer layers or tokens, or send them to "
                "a sink."
            )
        if promised and not budget.take(promised):
            raise CapacityError(
                f"the prompt delivers {told}, and what is running leaves no room for it in {most}; "
                "send it again later, or fewer prompts at once."
            )
        self._taken = promised

    def add(self, num_bytes: int) -> bool:
        """Whether what comes may be kept."""
        if self._closed:
            return False
        self._came += num_bytes
        more = self._came - self._taken
        if more > 0:
            if not self._budget.take(more):
                return False
            self._taken += more
        return True

    def give_back(self) -> None:
        self._closed = True
        taken, self._taken = self._taken, 0
        if taken:
            self._budget.give(taken)

    def __del__(self) -> None:
        self.give_back()


def bytes_of_prompt(own: Resolved, whole: Resolved, sites: Sites, prompt_ids: Sequence[int]) -> int:
    """What a prompt delivers to this process: rows, scores, and their labels.

    Args:
        own: what goes to memory.
        whole: the request, whose edits tell which reads see the same row.
    """
    ids = np.asarray(prompt_ids, np.int64)
    tokens = Tokens(np.arange(len(ids)), len(ids), ids, None)
    edited = edited_places(whole, sites)
    itemsize = getattr(torch, sites.dtype).itemsize
    masks: dict[tuple[Encoding | None, int], np.ndarray] = {}
    sizes: dict[tuple[Encoding | None, int], int] = {}
    for read in own.reads:
        mask = read.tokens.select(tokens).possible
        for stream in read.streams:
            point = canonical_point(sites.point_of(stream, read.when), edited)
            key = read.encoding, point
            masks[key] = masks[key] | mask if key in masks else mask
            if read.encoding is None:
                sizes[key] = sites.row_size(stream[0]) * itemsize
            else:
                sizes[key] = slots_of_row(read.encoding.row_bytes) * SLOT_BYTES
    total = sum(int(np.count_nonzero(mask)) * sizes[key] for key, mask in masks.items())
    # Drained tap by tap, each brings its labels; else they come once.
    labelled: dict[int, np.ndarray] = {}
    for (_, point), mask in masks.items():
        boundary = boundary_of_point(point)
        labelled[boundary] = labelled[boundary] | mask if boundary in labelled else mask
    total += LABEL_BYTES * sum(int(np.count_nonzero(mask)) for mask in labelled.values())
    for selector, probes in own.probes_by_selector.items():
        count = int(np.count_nonzero(selector.select(tokens).possible))
        boundaries = {sites.boundary_of(probe.stream) for probe in probes}
        total += count * (4 * len(probes) + LABEL_BYTES * len(boundaries))
    return total
