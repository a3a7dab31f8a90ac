"""Joins and splits the rows that tensor parallelism divides over the ranks.

Owns:  Split, which joins the parts of one site's rows, and splits the rows again.
Runs:  in the model's graph, on every rank.

Promise: the joined row equals the row that a model on one rank would have. All ranks make the same
edits to the joined row. Then each rank continues with its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Split:
    """The rule that splits one site's rows over the ranks.

    Attributes:
        whole, part: the numbers of elements of a whole row, and of this rank's part of a row.
        rank, num_ranks: this rank's index in the tensor-parallel group, and the group's size.
        gather: takes this rank's parts, [n, part], and returns the parts of all ranks in rank
            order, [n, num_ranks * part].
    """

    whole: int
    part: int
    rank: int
    num_ranks: int
    gather: Callable[[Tensor], Tensor]

    @property
    def copies(self) -> int:
        """The number of successive ranks that have the same part. If a model has fewer heads of
        keys and values than there are ranks, vLLM gives each head to several ranks."""
        return self.num_ranks * self.part // self.whole

    def joined(self, rows: Tensor) -> Tensor:
        """Join this rank's parts with the parts of the other ranks: [n, part] -> [n, whole]. The
        result is contiguous, with heads or columns in the order of the model."""
        every = self.gather(rows)
        if self.copies > 1:
            every = every.unflatten(1, (-1, self.copies, self.part))[:, :, 0].flatten(1)
        return every.contiguous()

    def own(self, rows: Tensor) -> Tensor:
        """This rank's part of whole rows: [n, whole] -> [n, part], contiguous."""
        first = self.rank // self.copies * self.part
        return rows[:, first : first + self.part].contiguous()
