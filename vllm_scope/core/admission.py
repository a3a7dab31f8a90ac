"""Decides whether the workers' tables have room for a new request.

Owns:  Admission, Ranges.
Runs:  in EngineCore, on the scheduler's thread.
From:  program.held, engine.core.scheduler (the caller).

Each worker has device tables with the operations (programs) and vectors of the running requests. A
table has a fixed number of entries.

Promise: the device tables of the workers have room for every request that Admission admits.
Requests with equal specs and equal programs share table entries, and requests with equal vectors
share the entries of these vectors. Admission counts shared entries one time. The tables also share
equal programs of requests with few operations. Admission ignores this sharing, and so never counts
too few entries.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from vllm_scope.program.held import Held
from vllm_scope.program.operations import Cost

#: A Cost of no entries in the device tables.
NOTHING = Cost()


class Waits(Protocol):
    """A request that can wait, such as vLLM's Request."""

    request_id: str


Waiting = TypeVar("Waiting", bound=Waits)


class Ranges:
    """The free ranges of a table. `take` uses the first free range that is large enough."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]

    def take(self, size: int) -> int | None:
        """Allocate a range and return its start. None if no free range is large enough."""
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        insort(self._free, (start, start + size))
        joined = [self._free[0]]
        for begin, stop in self._free[1:]:
            if begin == joined[-1][1]:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((begin, stop))
        self._free = joined


def _names(line: Iterable[Waits], request_id: str) -> bool:
    return any(one.request_id == request_id for one in line)


class Admission(Generic[Waiting]):
    """Counts the entries of the workers' device tables that running requests use.

    A request enters the scheduler only when the tables have room for the request. Until then, the
    request waits in a queue here. Waiting requests are admitted in the order of their arrival.
    Requests with a lens have a queue of their own, so that other requests need not wait for them.
    The front-end refuses a request that can never fit.

    Args:
        most: the number of entries of the tables.
        num_logged: number of entries of the log, in which workers store the states of gates.

    Attributes:
        most: the number of entries of the tables.
        lines: the queue of waiting requests without a lens, and the queue of waiting requests with
            a lens.
        num_waited: number of requests that have waited so far.
        held: the number of entries that requests use, or for which `admit` has reserved room.
    """

    def __init__(self, most: Cost, num_logged: int = 0) -> None:
        self.most = most
        self._log = Ranges(num_logged)
        #: The range (start, size) of the log that each request has, by request id.
        self._logged: dict[str, tuple[int, int]] = {}
        self.lines: tuple[deque[Waiting], deque[Waiting]] = deque(), deque()
        self.num_waited = 0
        self._held: dict[str, Held] = {}
        #: A `Held` is the set of programs of a request. Requests with equal programs have equal
        #: `Held`. `_sets` counts the requests of each `Held`. `_vectors` counts, for each vector's
        #: key, the different `Held` that use the vector.
        self._sets: Counter[Held] = Counter()
        self._vectors: Counter[bytes] = Counter()
        #: The argument `reserve` of `admit` for each request, by request id.
        self._reserved: dict[str, Cost] = {}
        self.held = Cost()

    @property
    def waiting(self) -> list[Waiting]:
        """The waiting requests. Requests without a lens come before requests with a lens."""
        return [request for line in self.lines for request in line]

    def enter(
        self, request: Waiting, held: Held | None, num_logged: int = 0, reserve: Cost = NOTHING
    ) -> bool:
        """Returns True if a new request can go to the scheduler now. Otherwise, adds the request to
        a queue and returns False. The arguments are those of `admit`. `held` is None if the request
        has no programs in the tables."""
        line = self.lines[reserve.lens_rows > 0]
        if held is None:
            # If a piece of streamed input waits, later pieces of the same request must wait too.
            lines = (some for some in self.lines if _names(some, request.request_id))
            found = next(lines, None)
            if found is None:
                return True
            line = found
        elif not line and self.admit(request.request_id, held, num_logged, reserve):
            return True
        line.append(request)
        self.num_waited += 1
        return False

    def take_out(self, request_ids: Collection[str] | None) -> list[Waiting]:
        """Remove the waiting requests with these ids from the queues, and return these requests. If
        `request_ids` is None, remove all waiting requests."""
        taken = [r for r in self.waiting if request_ids is None or r.request_id in request_ids]
        without, with_ = (deque(r for r in line if r not in taken) for line in self.lines)
        self.lines = without, with_
        return taken

    def log_start(self, request_id: str) -> int:
        """The start of a request's range of the log. Returns 0 if the request has no range."""
        return self._logged.get(request_id, (0, 0))[0]

    def admit(
        self, request_id: str, held: Held, num_logged: int = 0, reserve: Cost = NOTHING
    ) -> bool:
        """Allocate table entries for a request. Returns False if there is no room.

        Args:
            held: the request's programs. If the request already has entries, this call changes
                nothing.
            num_logged: number of entries of the log that the request needs.
            reserve: the entries to keep free for the request's policy, which can change scales
                later. `reserve` also has the number of rows to which the request's lenses are
                applied.
        """
        if request_id in self._held:
            return True
        more, new = reserve, held not in self._sets
        if new:
            added = sum(n for key, n in held.vectors.items() if key not in self._vectors)
            more += Cost(added, held.num_programs, held.num_ops)
        if self._held and not (self.held + more).fits(self.most):
            return False
        if num_logged:
            start = self._log.take(num_logged)
            if start is None:
                return False
            self._logged[request_id] = start, num_logged
        if new:
            self._vectors.update(held.vectors.keys())
        self._held[request_id], self._reserved[request_id] = held, reserve
        self._sets[held] += 1
        self.held += more
        return True

    def release(self, request_id: str) -> bool:
        """Free a request's entries. Returns False if the request had no entries."""
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        self.held -= self._reserved.pop(request_id)
        if request_id in self._logged:
            self._log.give_back(*self._logged.pop(request_id))
        if _last_gone(self._sets, held):
            gone = sum(n for key, n in held.vectors.items() if _last_gone(self._vectors, key))
            self.held -= Cost(gone, held.num_programs, held.num_ops)
        return True


Key = TypeVar("Key", bound=Hashable)


def _last_gone(counter: Counter[Key], key: Key) -> bool:
    """Subtract 1 from a key's count. If the count is then 0, drop the key and return True."""
    counter[key] -= 1
    return not counter[key] and counter.pop(key) == 0
