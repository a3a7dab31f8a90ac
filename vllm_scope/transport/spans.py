"""A ring of slots; allocates adjacent slots together, in the order of the ring.

Owns:  SpanRing, the base class of worker.arena.Arena and transport.ring.HostRing.

Promise: a slot is allocated again only after `_wait_for` has returned for every earlier span with
this slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, Protocol, TypeVar


class Span(Protocol):
    """The slots from `start` to `stop - 1`."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


S = TypeVar("S", bound=Span)


class SpanRing(ABC, Generic[S]):
    """A ring of `num_slots` slots. Only one thread may call `acquire`."""

    name = "a ring"

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._head = 0
        #: Spans that may be in use, in the order of allocation.
        self._spans: deque[S] = deque()

    def acquire(self, num_slots: int) -> S:
        """Wait until the next `num_slots` slots are free, and return these slots as a span.

        Raises:
            ValueError: `num_slots` is more than the whole ring has.
        """
        if num_slots > self.num_slots:
            raise ValueError(f"{self.name} of {self.num_slots} slots has no room for {num_slots}")
        if num_slots == 0:
            # An empty span is not put in the queue, because the loop below would stop at an empty
            # span.
            return self._new_span(self._head, self._head)
        start = self._head
        if start + num_slots > self.num_slots:
            # The span does not fit before the ring's end, and must start at slot 0. First wait for
            # all spans at the ring's end. They are the oldest spans, so the queue stays in order.
            while self._spans and self._spans[0].start >= start:
                self._wait_for_first()
            start = 0
        stop = start + num_slots
        while self._spans and self._spans[0].start < stop and start < self._spans[0].stop:
            self._wait_for_first()
        span = self._new_span(start, stop)
        self._spans.append(span)
        self._head = stop
        return span

    def _wait_for_first(self) -> None:
        """Wait for the oldest span, and then remove it. If the wait is interrupted, the span stays
        in the queue, because its slots can still be in use."""
        self._wait_for(self._spans[0])
        self._spans.popleft()

    @abstractmethod
    def _new_span(self, start: int, stop: int) -> S: ...

    @abstractmethod
    def _wait_for(self, span: S) -> None:
        """Return as soon as the slots of a span are free."""
