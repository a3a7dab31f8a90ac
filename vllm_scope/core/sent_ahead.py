"""Vectors that front-ends have sent before the requests that use them.

Owns:  SentAhead.
Runs:  in EngineCore: `replace` on its main thread, the rest on its input thread too; the caller
       holds a lock.
From:  engine.frontend.ahead.   To: registry (the vectors that a ticket names by digest).

Promise: a front-end's vectors stay until the same front-end sends other vectors, or until other
front-ends need the room. In the second case EngineCore drops the vectors of the front-end that sent
longest ago: that front-end may have died, and EngineCore is not told of it. A front-end names a
vector by its digest only after `replace` has returned the digest. When a front-end sends other
vectors, its later tickets name only these. Messages of one front-end arrive in order, so a ticket's
vectors are here, unless they were dropped to make room. In that case EngineCore refuses the request
(UnheldError), and its front-end sends the vectors again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from vllm_scope.request.arrays import Array

logger = logging.getLogger("vllm.vllm_scope")

#: Bound on the vectors of all front-ends together, in EngineCore.
MOST_BYTES = 256 << 20


class SentAhead:
    """Vectors by digest, and which front-end has sent them.

    Attributes:
        arrays: digest -> vector; the same object until the vector is dropped.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        #: Front-end -> the digests of its vectors, in the order of the calls.
        self._sent: dict[str, frozenset[bytes]] = {}
        self._has_told = False
        self.arrays: dict[bytes, Array] = {}

    @property
    def num_bytes(self) -> int:
        return sum(len(array.data) for array in self.arrays.values())

    def replace(self, frontend: str, arrays: Mapping[bytes, Array]) -> list[bytes]:
        """Hold these vectors for a front-end, and drop its earlier vectors that no other front-end
        has sent.

        Returns:
            The digests of the vectors that are held. The other vectors would exceed the bound.
        """
        self._sent.pop(frontend, None)
        held = self._that_fit(arrays)
        for digest in held:
            self.arrays.setdefault(digest, arrays[digest])
        self._drop_others(held)
        while self.num_bytes > self._most_bytes:
            del self._sent[next(iter(self._sent))]  # the front-end that sent longest ago
            self._drop_others(held)
        if held:
            self._sent[frontend] = frozenset(held)
        return held

    def _that_fit(self, arrays: Mapping[bytes, Array]) -> list[bytes]:
        held, num_bytes = [], 0
        for digest, array in arrays.items():
            if num_bytes + len(array.data) <= self._most_bytes:
                held.append(digest)
                num_bytes += len(array.data)
        if len(held) < len(arrays) and not self._has_told:
            self._has_told = True
            logger.warning(
                "vllm-scope: EngineCore holds %d MiB of monitors' weights; %d of %d weights exceed "
                "that, and travel with each request. Take fewer or smaller monitors.",
                self._most_bytes >> 20, len(arrays) - len(held), len(arrays),
            )  # fmt: skip
        return held

    def _drop_others(self, held: list[bytes]) -> None:
        for digest in self.arrays.keys() - frozenset(held).union(*self._sent.values()):
            del self.arrays[digest]
