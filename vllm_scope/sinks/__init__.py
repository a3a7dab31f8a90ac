"""Where drained rows go.

Owns:  RowBatch (what a sink is given) and the Sink protocol.
Runs:  on the drain thread of each worker that drains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vllm_scope.host_ring import Lease
from vllm_scope.plan import Labels


@dataclass(frozen=True)
class RowBatch:
    """What one step delivered, or one tap of a large step.

    Attributes:
        labels: one entry per token.
        lease: where it is in the worker's host ring.
        row_bytes: of one row, without what fills its last slot.
        boundary: set where the batch holds one tap only: each token has equally many
            slots, of which its layout at this boundary uses the first.
    """

    labels: Labels
    lease: Lease
    row_bytes: int
    boundary: int | None = None

    @property
    def slots(self) -> Tensor:
        """uint8 [num_slots, SLOT_BYTES], host. A token's slots are consecutive: its rows
        in the order of its layout's points, then its scores."""
        return self.lease.slots


class Sink(Protocol):
    """Where drained rows go.

    Called from the drain thread only. Rows of one (request, point) arrive in
    the order in which they were computed: a position that comes twice was
    computed twice (recompute, rejected drafts), and the last one holds. `finish`
    comes last, once. `batch.slots` is reused after `write` returns, unless the sink
    retained `batch.lease`; it releases it when done.
    """

    def write(self, batch: RowBatch) -> None: ...

    def finish(self, key: int, error: str | None) -> None: ...

    def close(self) -> None: ...
