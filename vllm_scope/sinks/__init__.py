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
    """The rows of one step, or of one tap of a large step.

    Attributes:
        labels: one entry per token.
        lease: where the rows are in the worker's host ring.
        boundary: set where the batch holds one tap only: each token has one row,
            meaningless where its program does not read this boundary.
    """

    labels: Labels
    lease: Lease
    boundary: int | None = None

    @property
    def rows(self) -> Tensor:
        """[num_slots, hidden_size], model dtype, host. A token's rows are consecutive,
        in the order of its program's boundaries."""
        return self.lease.rows


class Sink(Protocol):
    """Where drained rows go.

    Called from the drain thread only. Rows of one (request, boundary) arrive in
    the order in which they were computed: a position that comes twice was
    computed twice (recompute, rejected drafts), and the last one holds. `finish`
    comes last, once. `batch.rows` is reused after `write` returns, unless the sink
    retained `batch.lease`; it releases it when done.
    """

    def write(self, batch: RowBatch) -> None: ...

    def finish(self, key: int, error: str | None) -> None: ...

    def close(self) -> None: ...
