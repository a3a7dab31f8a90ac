"""Rows that tensor parallelism splits over the ranks: heads, and columns of the MLP.

Owns:  Split: how the parts of one site's rows are joined, and taken apart again.
Runs:  traced into the model's graph, on every rank.

Promise: the joined row equals the row of a model on one rank. All ranks make the same edits
to the joined row, and each rank goes on with its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Split:
    """The split of one site's rows.

    Attributes:
        whole, part: how many numbers a row has, and this rank's part of a row.
        rank, num_ranks: this rank's index in the tensor-parallel group, and the group's size.
        gather: [n, part] -> [n, num_ranks * part], the parts of all ranks in the order of ranks.
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
        """The whole rows, of which `rows` are this rank's parts: [n, part] -> [n, whole], in the
        order of heads or columns; contiguous."""
        every = self.gather(rows)
        if self.copies > 1:
            every = every.unflatten(1, (-1, self.copies, self.part))[:, :, 0].flatten(1)
        return every.contiguous()

    def own(self, rows: Tensor) -> Tensor:
        """This rank's part of whole rows: [n, whole] -> [n, part], contiguous."""
        first = self.rank // self.copies * self.part
        return rows[:, first : first + self.part].contiguous()
