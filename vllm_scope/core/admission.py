"""Whether the workers' tables have room for one more request.

Owns:  Ledger.
Runs:  in EngineCore, on the scheduler's thread; engine.scheduler asks it.
From:  program (Program, Cost).   Mirrors: tap.tables, where equal programs have one place, and
       equal vectors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from typing import Any

from vllm_scope.program.operations import Cost, Program
from vllm_scope.request.arrays import Array


class Ledger:
    """Places in the workers' tables that requests hold, from their entry to their end.

    A request that does not fit now waits outside the scheduler, first come, first
    served. One that could never fit is refused by the front-end.

    Attributes:
        most: what the tables have.
        waiting: requests for which there is no room yet.
        num_waited: how many requests have had to wait.
    """

    def __init__(self, most: Cost) -> None:
        self.most = most
        self.waiting: deque[Any] = deque()
        self.num_waited = 0
        self._held: dict[str, tuple[Program, ...]] = {}
        #: Held programs, by how many requests; and vectors, by how many held programs.
        self._programs: Counter[Program] = Counter()
        self._vectors: Counter[Array] = Counter()
        self._num_ops = 0

    def enter(self, request: Any, programs: Collection[Program]) -> bool:
        """Whether a request that comes may go on. Else it waits, behind those before it."""
        if not programs:
            # Unless it is a piece of streamed input, one of whose pieces waits.
            if all(one.request_id != request.request_id for one in self.waiting):
                return True
        elif not self.waiting and self.admit(request.request_id, programs):
            return True
        self.waiting.append(request)
        self.num_waited += 1
        return False

    def take_out(self, request_ids: Collection[str] | None) -> list[Any]:
        """Those of these ids that wait, in their order; None takes all. They wait no longer."""
        taken = [r for r in self.waiting if request_ids is None or r.request_id in request_ids]
        self.waiting = deque(r for r in self.waiting if r not in taken)
        return taken

    @property
    def held(self) -> Cost:
        return Cost(len(self._vectors), len(self._programs), self._num_ops)

    def admit(self, request_id: str, programs: Iterable[Program]) -> bool:
        """Whether there is room. A request that holds its places already keeps them.

        Args:
            programs: all that its tokens may get.
        """
        if request_id in self._held:
            return True
        programs = tuple(dict.fromkeys(programs))
        new = [program for program in programs if program not in self._programs]
        vectors: set[Array] = set().union(*(program.vectors for program in new))
        # One by one: set minus keys() walks all that are held.
        num_vectors = sum(vector not in self._vectors for vector in vectors)
        more = Cost(num_vectors, len(new), sum(one.num_ops for one in new))
        if self._held and not (self.held + more).fits(self.most):
            return False
        self._held[request_id] = programs
        self._programs.update(programs)
        for program in new:
            self._vectors.update(program.vectors)
        self._num_ops += more.ops
        return True

    def release(self, request_id: str) -> bool:
        """Whether the request held anything."""
        if request_id not in self._held:
            return False
        for program in self._held.pop(request_id):
            if not _count_down(self._programs, program):
                self._num_ops -= program.num_ops
                for vector in program.vectors:
                    _count_down(self._vectors, vector)
        return True


def _count_down(counter: Counter[Any], key: Any) -> int:
    """One less; how many are left. What is gone is not kept as 0."""
    counter[key] -= 1
    left = counter[key]
    if not left:
        del counter[key]
    return left
