"""Whether the workers' tables have room for one more request.

Owns:  Ledger.
Runs:  in EngineCore, on the scheduler's thread; engine.core asks it.
From:  program (Program, Cost).   Mirrors: tap.tables, where equal programs have one place, and
       equal vectors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from vllm_scope.arrays import Array
from vllm_scope.program import Cost, Program


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
        more = Cost(len(vectors - self._vectors.keys()), len(new), sum(one.num_ops for one in new))
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
