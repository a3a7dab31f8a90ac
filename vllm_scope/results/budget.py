"""Limits the bytes of the running requests of one process, in total and per API key.

Owns:  Budget, Share (one request's part of the budget), `bytes_of_prompt`, Asker, `asking` (the
       sender of the current request).
Runs:  in an API server. The event loop makes shares, and the receiver's thread makes shares grow.
       Offline (`LLM`) there is no limit, because the caller owns the memory.
To:    inbox (checks requests that enter), buffer (checks arriving rows), server.store (files).

Promise: when a request enters, its share takes the bytes that the prompt will deliver. The share
grows when more bytes arrive. The share gives all bytes back when the inbox forgets the request, or
when the garbage collector frees the request. An API key holds at most PART times the bytes that are
free. Therefore some bytes are always free for a new key.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch

from vllm_scope.batch.by_position import Ints
from vllm_scope.errors import CapacityError, SpecError
from vllm_scope.program.compiler import points_of, rows_of
from vllm_scope.program.layout import SLOT_BYTES, slots_of_row
from vllm_scope.request.heads import Bank, Head
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.selectors import Tokens
from vllm_scope.request.sites import Sites, boundary_of_point, kind_of_point

#: Number of bytes of one label. A label is the position and the arrival number of a value.
LABEL_BYTES = 16
#: An API key may hold at most PART times the bytes that are free. One key alone can then hold three
#: quarters of all bytes. Two keys can hold three sevenths each.
#: Source: dynamic thresholds of shared-memory switches (Choudhury and Hahne, 1998).
PART = 3
FULL = (
    "the running requests of this key have all rows that one key may have on this server "
    "(VLLM_SCOPE_ROWS_MIB), and the rows of this request were dropped; read fewer layers or "
    "tokens, or send the request again later"
)


@dataclass(eq=False)
class Asker:
    """The sender of the request that the running code handles.

    Attributes:
        owner: a digest of the API key (of an empty text if there is no key). "" offline.
        operator: True if the sender may see file paths and the whole reports of sinks.
        expect: a function that the inbox calls before a request enters, with the number of bytes
            that the prompt delivers to this process. The function raises CapacityError if there
            will be no room for the answer.
    """

    owner: str = ""
    operator: bool = True
    expect: Callable[[int], None] = lambda num_bytes: None


#: The sender of the current request. The server sets the sender for each request. Without a server,
#: the sender is the caller in this process.
asking: ContextVar[Asker] = ContextVar("vllm_scope_asking", default=Asker())  # noqa: B039


def most_of_one(most_bytes: int) -> int:
    """The bytes that one key may hold if all other keys hold 0 bytes."""
    return most_bytes * PART // (PART + 1)


def fits(own: int, held: int, more: int, most_bytes: int) -> bool:
    """True if a key may take `more` bytes. The key holds `own` bytes, and all keys together hold
    `held` bytes."""
    return own + more <= PART * (most_bytes - held - more)


class Budget:
    """The byte limit for all keys together, and the bytes that each key holds. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        #: Maps an API key to the number of bytes that the key holds. Keys that hold 0 bytes are not
        #: in the dict.
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()
        #: (API key, number of bytes to subtract from the key's bytes in `_held`). `give` adds
        #: entries without the lock, because the garbage collector may call `give` while `take` runs
        #: on the same thread and holds the lock.
        self._given: deque[tuple[str, int]] = deque()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._settled()

    def held_by(self, owner: str) -> int:
        with self._lock:
            self._settled()
            return self._held.get(owner, 0)

    def take(self, owner: str, num_bytes: int) -> bool:
        """Count more bytes for an API key. Returns False, and counts nothing, if there is no
        room."""
        with self._lock:
            held, own = self._settled(), self._held.get(owner, 0)
            if not fits(own, held, num_bytes, self.most_bytes):
                return False
            self._held[owner] = own + num_bytes
            return True

    def give(self, owner: str, num_bytes: int) -> None:
        self._given.append((owner, num_bytes))

    def _settled(self) -> int:
        while self._given:
            owner, num_bytes = self._given.popleft()
            self._held[owner] -= num_bytes
            if not self._held[owner]:
                del self._held[owner]
        return sum(self._held.values())


class Share:
    """One request's part of the budget: the number of bytes that the request may hold.

    Args:
        promised: number of bytes that the request's prompt will deliver.
        copies: number of completions of the request (`n`), which enter together.
        owner: the sender of the request, as in Asker.owner.

    Raises:
        SpecError: all completions together deliver more bytes than one API key may ever hold.
        CapacityError: the prompt delivers more bytes than the sender's API key may take now.
    """

    def __init__(self, budget: Budget, promised: int, copies: int = 1, owner: str = "") -> None:
        self._budget, self._owner = budget, owner
        self._came = self._taken = 0
        #: True after the request is gone. Rows that arrive later are dropped.
        self._closed = False
        needed, most = promised * copies, most_of_one(budget.most_bytes)
        if needed > most:
            raise SpecError(
                f"the prompt alone delivers {needed / 2**20:.1f} MiB of rows and scores, of all "
                "its completions; this server holds at "
                f"most {most / 2**20:.1f} MiB (3/4 of VLLM_SCOPE_ROWS_MIB) of one key's running "
                "requests. Read fewer layers or tokens, or send the rows to a sink."
            )
        if promised and not budget.take(owner, promised):
            raise CapacityError(
                f"the prompt delivers {promised / 2**20:.1f} MiB of rows and scores, and this "
                "key's running requests hold "
                f"{budget.held_by(owner) / 2**20:.1f} MiB; a key may hold three times the free "
                f"part of {budget.most_bytes / 2**20:.1f} MiB (VLLM_SCOPE_ROWS_MIB); send "
                "the request again later, or send fewer prompts at once."
            )
        self._taken = promised

    def add(self, num_bytes: int) -> bool:
        """Count arriving bytes. Returns False if the caller must drop the bytes."""
        if self._closed:
            return False
        self._came += num_bytes
        more = self._came - self._taken
        if more > 0:
            if not self._budget.take(self._owner, more):
                return False
            self._taken += more
        return True

    def give_back(self) -> None:
        self._closed = True
        taken, self._taken = self._taken, 0
        if taken:
            self._budget.give(self._owner, taken)

    def __del__(self) -> None:
        self.give_back()


def bytes_of_prompt(own: Resolved, whole: Resolved, sites: Sites, prompt_ids: Sequence[int]) -> int:
    """The number of bytes of rows, scores and labels that a prompt delivers to this process.

    Args:
        own: the reads and probes whose values go to the sink `memory`.
        whole: all actions. Two reads share a row if no edit changes the row between the reads.
    """
    if not own.delivering:
        return 0
    if not own.uniform:
        return _bytes_of(own, whole, sites, np.asarray(prompt_ids, np.int64))
    # All tokens of a prompt deliver the same number of bytes. The number is cached in `own`,
    # because many requests share `own`.
    known = own.__dict__.get("_bytes_of_token")
    if known is None or known[0] is not whole or known[1] is not sites:
        one = _bytes_of(own, whole, sites, np.zeros(1, np.int64))
        known = own.__dict__["_bytes_of_token"] = whole, sites, one
    return len(prompt_ids) * int(known[2])


def _bytes_of(own: Resolved, whole: Resolved, sites: Sites, ids: Ints) -> int:
    tokens = Tokens(np.arange(len(ids)), len(ids), ids, None)
    rows = rows_of(whole, own)
    itemsize = getattr(torch, sites.dtype).itemsize
    masks: dict[tuple[Head | None, int], np.ndarray] = {}
    sizes: dict[tuple[Head | None, int], int] = {}
    selectors = {one.tokens for one in own.delivering}
    selected = {selector: selector.select(tokens).possible for selector in selectors}
    for selector, point, head, _ in points_of(own):
        key, mask = (head, rows[point]), selected[selector]
        masks[key] = masks[key] | mask if key in masks else mask
        if head is None:
            sizes[key] = sites.row_sizes[kind_of_point(point)] * itemsize
        elif isinstance(head, Bank):
            sizes[key] = head.row_bytes
        else:
            sizes[key] = slots_of_row(head.row_bytes) * SLOT_BYTES
    total = sum(int(np.count_nonzero(mask)) * sizes[key] for key, mask in masks.items())
    # Count the labels of each tap separately. This is an upper bound: only if a step is too large
    # for the arena, each of its taps sends its own labels.
    labelled: dict[int, np.ndarray] = {}
    for (_, point), mask in masks.items():
        boundary = boundary_of_point(point)
        labelled[boundary] = labelled[boundary] | mask if boundary in labelled else mask
    total += LABEL_BYTES * sum(int(np.count_nonzero(mask)) for mask in labelled.values())
    return total
