"""The rings that a front-end maps: the rings of the workers on the front-end's host.

Owns:  MappedRings.
Runs:  on the receiver's thread.
From:  receiver.   To: ring.RingReader.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_scope.transport.messages import Ack, SharedHello
from vllm_scope.transport.ring import CLOSED, RingReader, RingRef


class MappedRings:
    """Maps each ring when its worker connects.

    Args:
        on_gone: Before a new ring is mapped, MappedRings calls this function with the identity of
            each older ring whose worker has ended or has closed the ring.
    """

    def __init__(self, on_gone: Callable[[int], None]) -> None:
        self._on_gone = on_gone
        self.readers: dict[RingRef, RingReader] = {}
        #: Maps a ring to the index of this front-end's counter in the ring. `close` sets the
        #: counters to CLOSED.
        self.counters: dict[RingRef, int] = {}

    def answer(self, hello: SharedHello) -> Ack:
        """Map the ring of a worker that connects. After an error, the Ack contains the reason."""
        try:
            self.get(hello.ring)
        except (OSError, ValueError) as error:
            return Ack(0, str(error))
        self.counters[hello.ring] = hello.reader
        return Ack(0)

    def get(self, ref: RingRef) -> RingReader:
        """The reader of a ring. The first call for a ring maps the ring, and can raise the errors
        of RingReader."""
        if ref not in self.readers:
            # Remove the rings of workers that have ended.
            for other in [known for known, reader in self.readers.items() if reader.gone]:
                del self.readers[other]
                self.counters.pop(other, None)
                self._on_gone(other.identity)
            self.readers[ref] = RingReader(ref)
        return self.readers[ref]

    def close(self) -> None:
        """Tell the workers, through the counters, that this front-end stops reading."""
        for ref, counter in self.counters.items():
            self.readers[ref].acknowledge(counter, CLOSED)
