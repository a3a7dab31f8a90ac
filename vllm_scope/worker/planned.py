"""The requests that use taps: arrays with one entry per request, and each request's programs.

Owns:  Requests, Holding, `find_ids`.
Runs:  in every worker, before the forward, on the CPU. No method waits for the device.
To:    plan, step_plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_scope.batch.by_position import Ints
from vllm_scope.program.compiled import Column
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.held import Held


class Holding(NamedTuple):
    """Programs that the tables hold for a request.

    Attributes:
        since: the first position at which the programs apply (0, or the position of a change).
        ids: int32 [len(held)], the program ids that `Tables.hold` returned.
    """

    since: int
    held: Held
    ids: NDArray[np.int32]


def find_ids(
    program: RequestProgram, columns: Sequence[Column], holdings: Sequence[Holding]
) -> NDArray[np.int32] | None:
    """The program ids of the given columns, int32 [len(columns)]; None if no holding has the
    programs of all columns."""
    for _, held, ids in holdings:
        if program.made(held) and (at := held.find(columns)) is not None:
            return ids[at]
    return None


@dataclass
class Requests:
    """The requests as arrays. With arrays, numpy plans a decode step for all requests together.

    Attributes:
        index_of: maps the id of a request to the request's index in the arrays.
        first_fixed: if `generated_fixed` is True, all tokens from this position on have the program
            id in `generated`.
        held: maps the index of a running request to the programs that the request holds.
    """

    index_of: dict[str, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    programs: dict[int, RequestProgram] = field(default_factory=dict)
    key: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    first_fixed: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    owner: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    generated: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    generated_fixed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    held: dict[int, tuple[Holding, ...]] = field(default_factory=dict)

    def take(self) -> int:
        if not self.free:
            old = len(self.key)
            new = max(64, 2 * old)
            for name in ("key", "first_fixed", "owner", "generated", "generated_fixed"):
                setattr(self, name, np.resize(getattr(self, name), new))
            self.free = list(range(new - 1, old - 1, -1))
        return self.free.pop()
