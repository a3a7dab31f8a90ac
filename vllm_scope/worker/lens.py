"""The likeliest tokens by a model's own final norm and unembedding, for many rows at once.

Owns:  DeviceLens.
Runs:  in workers that drain and hold the unembedding; computed where held_saes is.
From:  engine.worker.unembedding (which knows the model).   To: packer.

Promise: the host never waits for the device. Memory beside the rows is bounded by MOST_BYTES of
float32 logits, and about twice as much again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_scope.errors import CompatError
from vllm_scope.request.actions.sparse import MAX_TOP_K
from vllm_scope.worker.held_saes import packed_pairs, strongest

#: float32 logits that are computed at once.
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class DeviceLens:
    """A model's lens on the device.

    Attributes:
        logits: rows [n, hidden_size], model dtype -> logits [n, vocab_size], without padding.
    """

    logits: Callable[[Tensor], Tensor]
    vocab_size: int

    @property
    def most_rows(self) -> int:
        """Rows that are computed at once."""
        return max(1, MOST_BYTES // (4 * self.vocab_size))

    def reserve(self, row: Tensor) -> None:
        """Compute the largest piece once, on the stream that will compute all others: torch's
        allocator keeps the memory for that stream.

        Args:
            row: [hidden_size].

        Raises:
            CompatError: the device has no room for it.
        """
        try:
            self.pack(row.expand(self.most_rows, -1).contiguous(), MAX_TOP_K)
        except torch.OutOfMemoryError:
            raise CompatError(
                f"the device has no room for {MOST_BYTES >> 20} MiB of logits, and as much beside "
                "them; start with a smaller gpu_memory_utilization"
            ) from None

    def pack(self, rows: Tensor, count: int) -> Tensor:
        """As request.heads.Likeliest has them. Args: as PairMaker.pack."""

        def found(some: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.logits(some).float()
            values, ids = strongest(logits, min(count, self.vocab_size))
            return values - logits.logsumexp(1, keepdim=True), ids

        with torch.inference_mode():
            return packed_pairs(rows, count, self.most_rows, found, absent=-1)
