"""What a sink needs of a road to one front-end.

Owns:  Sender.
"""

from __future__ import annotations

from typing import Literal, Protocol

from vllm_scope.sinks import Manifest, RowBatch
from vllm_scope.transport.messages import CountersHeader
from vllm_scope.transport.ring import Lease

Road = Literal["shared", "tcp"]
#: Manifests of a request that went to memory alone.
NONE: dict[str, Manifest] = {}
#: How long a worker waits for a front-end's first answer.
ANSWER_S = 5.0


class Sender(Protocol):
    """What the sink needs of a road. Calls are not concurrent."""

    @property
    def road(self) -> Road: ...

    @property
    def dead(self) -> bool:
        """The front-end has closed, or is gone; what is sent is dropped."""

    def send_rows(self, batch: RowBatch) -> None:
        """Send rows; holds their lease until the front-end has read them."""

    def send_finish(
        self, key: int, stage: int, error: str | None, manifests: dict[str, Manifest] = NONE
    ) -> None: ...

    def send_counters(self, header: CountersHeader) -> None: ...

    def reclaim(self) -> None:
        """Release the leases of what was read, and of what a dead reader never will."""

    @property
    def num_read(self) -> int:
        """Messages that the front-end has read."""

    def holds(self, lease: Lease) -> bool:
        """Something on this span was sent and not read."""

    def give_up(self) -> None:
        """Nothing that was not read will be; it is dead from now on."""

    def close(self) -> None: ...
