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

from collections.abc import Iterable, Sequence

from vllm_scope.request.remembered import Remembered

#: Bytes of a block besides its scores, here and in a worker.
_BLOCK_BYTES = 512
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
        #: Running request that has filled blocks -> the hashes of its blocks, and its probes.
        self._chains: dict[str, tuple[Sequence[bytes], bytes]] = {}
        #: What workers must forget with the next news.
        self._forgotten: list[ScoreKey] = []

    @property
    def running(self) -> list[str]:
        return list(self._told)

    def begin(self, request_id: str, num_cached: int) -> None:
        """Keep a request's scores, except those of its first blocks, which came from the cache."""
        self._told[request_id] = num_cached

    def num_known(self, hashes: Sequence[bytes], probes: bytes) -> int:
        """How many blocks from the first on have scores."""
        count = 0
        for one in hashes:
            if (one, probes) not in self._known:
                break
            count += 1
        # Backwards, so that of a chain its end is forgotten first: it is of no use alone.
        for one in reversed(hashes[:count]):
            self._known.get((one, probes))
        return count

    def num_told(self, request_id: str) -> int | None:
        """How many blocks a running request has filled; None for one that is new."""
        return self._told.get(request_id)

    def fill(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, probes: bytes,
        token_bytes: int,
    ) -> tuple[int, list[bytes]] | None:  # fmt: skip
        """Note the blocks that a request has filled.

        Args:
            hashes: of the request's blocks so far; kept until the request is forgotten.
            num_tokens: tokens that are computed once the coming step has run.
            token_bytes: of the scores of one token.

        Returns:
            The first of the newly filled blocks and their hashes; None if there is none.
        """
        first = self._told[request_id]
        stop = min(num_tokens // self.block_size, len(hashes))
        if stop <= first:
            return None
        self._told[request_id], self._chains[request_id] = stop, (hashes, probes)
        for one in reversed(hashes[first:stop]):  # as in `num_known`
            size = self.block_size * token_bytes + _BLOCK_BYTES
            self._forgotten += [key for key, _ in self._known.put((one, probes), True, size)]
        return first, list(hashes[first:stop])

    def lose(self, keys: Iterable[ScoreKey]) -> None:
        """A worker does not hold some scores. All workers forget them: other stages hold their
        part, and a late report may be of scores that were kept again since."""
        lost = set(keys)
        self._known.discard(lost)
        self._forgotten += lost

    def clear(self) -> None:
        """Forget everything: the model's weights may have changed."""
        self._forgotten += [key for key, _ in self._known.clear()]
        # Their blocks are computed again.
        self._told = dict.fromkeys(self._told, 0)

    def take_forgotten(self) -> list[ScoreKey]:
        """What workers must forget, once: not what was kept again meanwhile."""
        found, self._forgotten = self._forgotten, []
        return [key for key in found if key not in self._known]

    def forget_request(self, request_id: str) -> None:
        self._told.pop(request_id, None)
        if request_id in self._chains:
            # It filled its chain from the beginning on, step by step: put it in order.
            self.num_known(*self._chains.pop(request_id))
