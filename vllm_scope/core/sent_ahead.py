"""Vectors that front-ends have sent before the requests that use them.

Owns:  SentAhead.
Runs:  in EngineCore. The main thread calls `replace`, and the input thread reads `arrays`. The
       caller must hold a lock.
From:  engine.frontend.ahead.   To: registry (the vectors that a ticket names by digest).

Promise: a front-end's vectors stay until the same front-end sends other vectors, or until other
front-ends need the memory. If there is no free memory, EngineCore drops the vectors of the
front-end that sent its vectors longest ago. (EngineCore gets no message if a front-end dies.) A
front-end names a vector by its digest only after `replace` has returned the digest. After a
front-end has sent other vectors, its tickets name only the new vectors. Messages of one front-end
arrive in order. Therefore a ticket can name a missing vector only if EngineCore has dropped the
vector to make room for another front-end. EngineCore then refuses the request (UnheldError), and
the front-end sends the vectors again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from vllm_scope.request.arrays import Array

logger = logging.getLogger("vllm.vllm_scope")

#: Limit of the bytes of the vectors of all front-ends together, in EngineCore.
MOST_BYTES = 256 << 20


class SentAhead:
    """The vectors by digest, and the front-ends that have sent each vector.

    Attributes:
        arrays: the vectors, by digest. If two front-ends send equal vectors, the first object
            stays.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        #: The digests of each front-end's vectors, in the order of the calls of `replace`.
        self._sent: dict[str, frozenset[bytes]] = {}
        self._has_told = False
        self.arrays: dict[bytes, Array] = {}

    @property
    def num_bytes(self) -> int:
        return sum(len(array.data) for array in self.arrays.values())

    def replace(self, frontend: str, arrays: Mapping[bytes, Array]) -> list[bytes]:
        """Store these vectors of a front-end. Drop the front-end's earlier vectors, except vectors
        that another front-end has also sent.

        Returns:
            The digests of the stored vectors. Vectors that would exceed the limit are not stored.
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
                "vllm-scope: EngineCore holds at most %d MiB of monitors' weights; %d of %d do not "
                "fit, and travel with each request. Take fewer or smaller monitors.",
                self._most_bytes >> 20, len(arrays) - len(held), len(arrays),
            )  # fmt: skip
        return held

    def _drop_others(self, held: list[bytes]) -> None:
        for digest in self.arrays.keys() - frozenset(held).union(*self._sent.values()):
            del self.arrays[digest]
