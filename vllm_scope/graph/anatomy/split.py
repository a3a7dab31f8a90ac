"""Rows of which tensor parallelism gives each rank a part: heads, and columns of the MLP.

Owns:  Split: how the parts of one site are put together, and taken apart again.
Runs:  traced into the model's graph, on every rank.

Promise: the joined row is the row of one rank alone. All ranks edit it alike, and each goes on
with its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Split:
    """The split of one site's rows.

    Attributes:
        whole, part: numbers of a row; those of this rank.
        rank, num_ranks: of the tensor-parallel group.
        gather: [n, part] -> [n, num_ranks * part], of all ranks in their order.
    """

    whole: int
    part: int
    rank: int
    num_ranks: int
    gather: Callable[[Tensor], Tensor]

    @property
    def copies(self) -> int:
        """How many successive ranks have the same part. With more ranks than key and value heads,
        vLLM gives each head to several ranks."""
        return self.num_ranks * self.part // self.whole

    def joined(self, rows: Tensor) -> Tensor:
        """[n, part] -> [n, whole], in the order of heads or columns; contiguous."""
        every = self.gather(rows)
        if self.copies > 1:
            every = every.unflatten(1, (-1, self.copies, self.part))[:, :, 0].flatten(1)
        return every.contiguous()

    def own(self, rows: Tensor) -> Tensor:
        """[n, whole] -> [n, part], contiguous."""
        first = self.rank // self.copies * self.part
        return rows[:, first : first + self.part].contiguous()
