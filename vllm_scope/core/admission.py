"""Whether the workers' tables have room for one more request.

Owns:  Admission.
Runs:  in EngineCore, on the scheduler's thread.
From:  program.operations, engine.core.scheduler (which asks).

Promise: it counts as graph.tap.tables does: equal programs share one place, and so do equal
vectors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from vllm_scope.program.operations import Cost, Program, num_vectors
from vllm_scope.request.arrays import Array


class Waits(Protocol):
    """A request that may wait: vLLM's Request."""

    request_id: str


Waiting = TypeVar("Waiting", bound=Waits)


class Admission(Generic[Waiting]):
    """Places in the workers' tables that requests hold, from their entry to their end.

    A request that does not fit waits outside the scheduler, first come, first served. The
    front-end refuses a request that could never fit.

    Attributes:
        most: the places that the tables have.
        waiting: requests for which there is no room yet.
        num_waited: requests that have had to wait so far.
    """

    def __init__(self, most: Cost) -> None:
        self.most = most
        self.waiting: deque[Waiting] = deque()
        self.num_waited = 0
        self._held: dict[str, tuple[Program, ...]] = {}
        #: Held program -> requests that hold it; vector -> held programs that use it.
        self._programs: Counter[Program] = Counter()
        self._arrays: Counter[Array] = Counter()
        self._num_ops = self._num_vectors = 0

    def enter(self, request: Waiting, programs: Collection[Program]) -> bool:
        """Whether a new request may go to the scheduler now; if not, it waits in line."""
        if not programs:
            # A piece of streamed input may not overtake an earlier piece that waits.
            if all(one.request_id != request.request_id for one in self.waiting):
                return True
        elif not self.waiting and self.admit(request.request_id, programs):
            return True
        self.waiting.append(request)
        self.num_waited += 1
        return False

    def take_out(self, request_ids: Collection[str] | None) -> list[Waiting]:
        """Remove waiting requests from the line and return them in order; None takes all."""
        taken = [r for r in self.waiting if request_ids is None or r.request_id in request_ids]
        self.waiting = deque(r for r in self.waiting if r not in taken)
        return taken

    @property
    def held(self) -> Cost:
        return Cost(self._num_vectors, len(self._programs), self._num_ops)

    def admit(self, request_id: str, programs: Iterable[Program]) -> bool:
        """Take places for a request; False if there is no room.

        Args:
            programs: all that its tokens may get. Ignored if the request holds places already.
        """
        if request_id in self._held:
            return True
        programs = tuple(dict.fromkeys(programs))
        new = [program for program in programs if program not in self._programs]
        arrays: set[Array] = set().union(*(program.arrays for program in new))
        # Not `arrays - self._arrays.keys()`, which walks every held array.
        added = sum(num_vectors(array) for array in arrays if array not in self._arrays)
        more = Cost(added, len(new), sum(one.num_ops for one in new))
        if self._held and not (self.held + more).fits(self.most):
            return False
        self._held[request_id] = programs
        self._programs.update(programs)
        for program in new:
            self._arrays.update(program.arrays)
        self._num_ops += more.ops
        self._num_vectors += more.vectors
        return True

    def release(self, request_id: str) -> bool:
        """Free a request's places; False if it held none."""
        if request_id not in self._held:
            return False
        for program in self._held.pop(request_id):
            if _last_gone(self._programs, program):
                self._num_ops -= program.num_ops
                for array in program.arrays:
                    if _last_gone(self._arrays, array):
                        self._num_vectors -= num_vectors(array)
        return True


Key = TypeVar("Key", bound=Hashable)


def _last_gone(counter: Counter[Key], key: Key) -> bool:
    """Count one down, and drop the key at zero; whether it was dropped."""
    counter[key] -= 1
    return not counter[key] and counter.pop(key) == 0
