"""Which KV blocks' scores the workers hold.

Owns:  ScoreIndex.
Runs:  in EngineCore, on the scheduler's thread.
From:  engine.core.scheduler.   To: news (what workers keep and forget).

A request that only probes may take KV from the prefix cache for a block if the scores of the
block's tokens are known. They are the same for every request with the same block hash and the
same probes: the hash stands for all tokens so far, and for all edits of them. The workers keep
scores by (block hash, digest of the probes). EngineCore decides what they keep, so it knows what
they hold. The memory is bounded; what was used longest ago is forgotten first.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_scope.request.remembered import Remembered

#: (block hash, digest of the probes).
ScoreKey = tuple[bytes, bytes]


class ScoreIndex:
    """The blocks whose scores the workers hold.

    Args:
        block_size: tokens of a block that has a hash.
        most_bytes: of all scores.
    """

    def __init__(self, block_size: int, most_bytes: int) -> None:
        self.block_size = block_size
        self._known: Remembered[ScoreKey, bool] = Remembered(most_bytes)
        #: Running request -> its blocks that workers were told to keep.
        self._told: dict[str, int] = {}

    def __bool__(self) -> bool:
        """True if a running request's scores are kept."""
        return bool(self._told)

    @property
    def running(self) -> list[str]:
        return list(self._told)

    def begin(self, request_id: str, num_cached: int) -> None:
        """Keep a request's scores, except those of its first blocks, which came from the cache."""
        self._told[request_id] = num_cached

    def num_known(self, hashes: Sequence[bytes], probes: bytes) -> int:
        """How many blocks from the first on have scores."""
        for i, one in enumerate(hashes):
            if self._known.get((one, probes)) is None:
                return i
        return len(hashes)

    def fill(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, probes: bytes,
        token_bytes: int,
    ) -> tuple[tuple[int, list[bytes]] | None, list[ScoreKey]]:  # fmt: skip
        """Note the blocks that a request has filled.

        Args:
            hashes: of the request's blocks so far.
            num_tokens: tokens that are computed once the coming step has run.
            token_bytes: of the scores of one token.

        Returns:
            The first of the newly filled blocks and their hashes, None if there is none; and what
            is forgotten for them.
        """
        first = self._told[request_id]
        stop = min(num_tokens // self.block_size, len(hashes))
        if stop <= first:
            return None, []
        self._told[request_id] = stop
        gone: list[ScoreKey] = []
        for one in hashes[first:stop]:
            size = self.block_size * token_bytes
            gone += [key for key, _ in self._known.put((one, probes), True, size)]
        return (first, list(hashes[first:stop])), gone

    def forget_request(self, request_id: str) -> None:
        self._told.pop(request_id, None)
