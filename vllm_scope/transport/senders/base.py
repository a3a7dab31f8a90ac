"""The interface by which the memory sink sends to a front-end.

Owns:  Sender.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from vllm_scope.control.policy import Decided
from vllm_scope.sinks import Manifest, RowBatch
from vllm_scope.transport.messages import (
    CountersHeader,
    DecidedHeader,
    EndsHeader,
    FinishHeader,
)
from vllm_scope.transport.ring import Lease

Road = Literal["shared", "tcp"]
#: How long, in seconds, a worker waits for a front-end's first answer.
ANSWER_S = 5.0


class Sender(ABC):
    """Sends messages to one front-end. Only one thread at a time may call the methods."""

    road: ClassVar[Road]

    @property
    @abstractmethod
    def dead(self) -> bool:
        """True if the front-end has closed or ended, or was given up. Messages to it are
        dropped."""

    @abstractmethod
    def send_rows(self, batch: RowBatch) -> None:
        """Send rows. The lease of the rows is retained until the front-end has read the rows."""

    def send_finish(
        self, key: int, stage: int, error: str | None, manifests: Mapping[str, Manifest] = {}
    ) -> None:
        self._send(FinishHeader(key, stage, error, dict(manifests)))

    def send_ends(self, ends: Sequence[tuple[int, str | None]], stage: int) -> None:
        """Send the ends of several requests in one message; `ends` has a pair (key, error) for each
        request."""
        self._send(EndsHeader([FinishHeader(key, stage, error) for key, error in ends]))

    def send_decided(self, key: int, decided: Decided) -> None:
        self._send(DecidedHeader(key, decided))

    def send_counters(self, header: CountersHeader) -> None:
        self._send(header)

    @abstractmethod
    def _send(self, header: FinishHeader | EndsHeader | DecidedHeader | CountersHeader) -> None: ...

    def reclaim(self) -> None:  # noqa: B027
        """Release the leases of rows that the front-end has read, or all leases if it is dead."""

    @property
    @abstractmethod
    def num_read(self) -> int:
        """How many messages the front-end has read. With shared memory, only messages with rows
        count. If the front-end has closed, the number is CLOSED."""

    @abstractmethod
    def holds(self, lease: Lease) -> bool:
        """True if the span of `lease` has rows that the front-end has not read."""

    @abstractmethod
    def give_up(self) -> None:
        """Drop the unread messages, and treat the front-end as dead from now on."""

    @abstractmethod
    def close(self) -> None: ...
