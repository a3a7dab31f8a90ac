"""Which KV blocks' scores the workers hold.

Owns:  ScoreIndex.
Runs:  in EngineCore, on the scheduler's thread.
From:  engine.core.scheduler.   To: news (what workers keep and forget).

A request that only probes may take KV from the prefix cache for a block if the scores of the
block's tokens are known. These scores are the same for every request with the same block hash and
the same probes: the hash covers all tokens up to the end of the block, and all edits of these
tokens. The workers keep scores by (block hash, digest of the probes). EngineCore decides what the
workers keep, so it knows what they hold. The memory is bounded: the scores that were used longest
ago are forgotten first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat, takewhile

from vllm_scope.request.remembered import Remembered

#: Estimated memory for each block with scores, here and in a worker together, beside the scores.
_BLOCK_BYTES = 512
#: Requests that began together fill their blocks with the same steps. To tell the workers about the
#: blocks of 256 requests in one step took the scheduler 7 ms on the host of an H100. Requests
#: therefore take turns: the workers are told about a block of generated tokens up to TURNS - 1
#: steps after the step for which it was expected to be full. With async scheduling the scheduler is
#: up to two steps ahead of the known tokens, so this is up to TURNS + 1 steps after the step that
#: fills the block.
TURNS = 8
#: In each step the blocks of this many ended requests are marked as used; if more than TURNS times
#: as many requests wait for that, those of one waiting request in TURNS. When the blocks of 128
#: requests were marked at the end of the requests, this delayed the last outputs by 3 ms (on the
#: host of an H100).
ENDS_A_STEP = 4
#: If the scores of the blocks that are not marked yet take more than one part in WAITING of the
#: room, all these blocks are marked at once.
WAITING = 8
#: (block hash, digest of the probes).
ScoreKey = tuple[bytes, bytes]


class ScoreIndex:
    """The blocks whose scores the workers hold.

    Args:
        block_size: tokens of a block that has a hash.
        most_bytes: bound on the bytes of all scores.
        step_tokens: as in Sites.
    """

    def __init__(self, block_size: int, most_bytes: int, step_tokens: int = 1) -> None:
        self.block_size, self._step_tokens = block_size, step_tokens
        self._known: Remembered[ScoreKey, bool] = Remembered(most_bytes)
        #: Running request -> how many of its first blocks came from the cache, or are blocks that
        #: workers were told to keep.
        self._told: dict[str, int] = {}
        #: Running request that has filled blocks -> the hashes of its blocks, the digest of its
        #: probes, and the bytes of one block.
        self._chains: dict[str, tuple[Sequence[bytes], bytes, int]] = {}
        #: Running request -> how many of its first tokens may lie in blocks that are kept.
        self._frozen: dict[str, int] = {}
        #: Running request -> how many steps later workers are told about its blocks of generated
        #: tokens; and the same for the request that began last.
        self._turns: dict[str, int] = {}
        self._last_turn = 0
        #: Ended request -> the blocks that workers were not told about while it ran, as `fill`
        #: returns them.
        self._ended: dict[str, tuple[int, list[bytes]]] = {}
        #: For each ended request whose blocks are not marked as used yet: its entry of `_chains`,
        #: but with the bytes of all its blocks.
        self._ended_chains: deque[tuple[Sequence[bytes], bytes, int]] = deque()
        #: The sum of the bytes in `_ended_chains`.
        self._ended_bytes = 0
        #: Number of steps so far; step -> requests to look at in that step; request -> the step in
        #: which `due` returns it.
        self._step = 0
        self._due: dict[int, dict[str, None]] = {}
        self._due_at: dict[str, int] = {}
        #: Keys of scores that workers must forget with the next news.
        self._forgotten: list[ScoreKey] = []

    @property
    def running(self) -> list[str]:
        return list(self._told)

    def begin(self, request_id: str, num_cached: int) -> None:
        """Keep a request's scores from now on, except those of its first `num_cached` blocks, which
        came from the cache."""
        self._told[request_id] = num_cached
        self._last_turn = (self._last_turn + 1) % TURNS
        self._turns[request_id] = self._last_turn
        self._look_at(request_id, self._step + 1)

    def due(self) -> list[str]:
        """The running requests about whose full blocks the workers are told with the coming step.
        Call it once a step, and then `look_again` for each request that it returned."""
        self._step += 1
        self._use_ended(max(ENDS_A_STEP, len(self._ended_chains) // TURNS))
        found = self._due.pop(self._step, {})
        return [r for r in found if self._due_at.get(r) == self._step]

    def look_again(self, request_id: str, num_tokens: int) -> None:
        """Make `due` return a request again: with the next step if its known tokens fill another
        block, and else at its turn after it can have filled another block.

        Args:
            num_tokens: how many tokens of the request are known now. A step adds at most
                `step_tokens`.
        """
        full = self._next_full(request_id)
        if self._frozen.get(request_id, full) >= full:
            steps = (full - num_tokens) // self._step_tokens
            steps = steps + self._turns[request_id] if steps > 0 else 1
            self._look_at(request_id, self._step + steps)

    def _look_at(self, request_id: str, step: int) -> None:
        self._due.setdefault(step, {})[request_id] = None
        self._due_at[request_id] = step

    def num_known(self, hashes: Sequence[bytes], probes: bytes) -> int:
        """How many blocks, from the first one on and without a gap, have scores."""
        known = list(takewhile(self._known.__contains__, zip(hashes, repeat(probes))))
        # In reverse order, so that the end of a chain is forgotten before its beginning: an end
        # alone is of no use.
        self._known.use(reversed(known))
        return len(known)

    def num_told(self, request_id: str) -> int | None:
        """The number of a running request's first blocks that came from the cache or were filled;
        None for a new request."""
        return self._told.get(request_id)

    def may_fill(self, request_id: str, num_tokens: int) -> bool:
        """True if `fill` may find a block once this many tokens are computed."""
        return num_tokens >= self._next_full(request_id)

    def _next_full(self, request_id: str) -> int:
        """The number of the request's tokens at which its next block is full."""
        return (self._told[request_id] + 1) * self.block_size

    def fill(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, probes: bytes,
        token_bytes: int,
    ) -> tuple[int, list[bytes]] | None:  # fmt: skip
        """Note the blocks that a request has filled.

        Args:
            hashes: hashes of the request's blocks so far. The object is kept until the request is
                forgotten.
            num_tokens: tokens that are computed once the coming step has run.
            token_bytes: bytes of one token's scores.

        Returns:
            The number of the first newly filled block, and the hashes of all newly filled blocks;
            None if no block was filled.
        """
        first = self._told[request_id]
        num_tokens = min(num_tokens, self._frozen.get(request_id, num_tokens))
        stop = min(num_tokens // self.block_size, len(hashes))
        if stop <= first:
            return None
        size = self.block_size * token_bytes + _BLOCK_BYTES
        self._told[request_id], self._chains[request_id] = stop, (hashes, probes, size)
        found = list(hashes[first:stop])
        for one in reversed(found):  # as in `num_known`
            self._forgotten += [key for key, _ in self._known.put((one, probes), True, size)]
        return first, found

    def freeze(self, request_id: str, num_tokens: int) -> None:
        """From now on keep only blocks of a running request's first `num_tokens` tokens: a later
        stage of a cascade has begun, and the other tokens have more scores."""
        if request_id in self._told:
            self._frozen.setdefault(request_id, num_tokens)

    def lose(self, keys: Iterable[ScoreKey]) -> None:
        """Note that a worker does not hold some scores. All workers are told to forget these
        scores: workers of other pipeline stages hold a part of them, and a late report may name
        scores that were kept again since."""
        lost = set(keys)
        self._known.discard(lost)
        self._forgotten += lost

    def clear(self) -> None:
        """Forget everything: the model's weights may have changed."""
        self._forgotten += [key for key, _ in self._known.clear()]
        self._ended_chains.clear()
        self._ended_bytes = 0
        # vLLM computes the blocks of running requests again, from the first one on.
        for request_id in self._told:
            self.begin(request_id, 0)

    @property
    def has_news(self) -> bool:
        """True if there is something for `take_ended` or `take_forgotten`."""
        return bool(self._forgotten or self._ended)

    def take_ended(self) -> dict[str, tuple[int, list[bytes]]]:
        """Ended request -> the blocks that workers were not told about while it ran. Each is
        returned once."""
        found, self._ended = self._ended, {}
        return found

    def take_forgotten(self) -> list[ScoreKey]:
        """Return the keys of scores that workers must forget, each only once. The key of
        scores that are kept again is left out."""
        found, self._forgotten = self._forgotten, []
        return [key for key in found if key not in self._known]

    def finish_request(self, request_id: str, filled: tuple[int, list[bytes]] | None) -> None:
        """Forget a request that has ended.

        Args:
            filled: the result of `fill`, which the caller calls just before with all tokens of the
                request.
        """
        if filled is not None:
            self._ended[request_id] = filled
        self._told.pop(request_id, None)
        self._due_at.pop(request_id, None)
        self._frozen.pop(request_id, None)
        self._turns.pop(request_id, None)
        if request_id in self._chains:
            hashes, probes, size = self._chains.pop(request_id)
            num_bytes = len(hashes) * size
            self._ended_chains.append((hashes, probes, num_bytes))
            self._ended_bytes += num_bytes
            if self._ended_bytes * WAITING > self._known.most_bytes:
                self._use_ended(len(self._ended_chains))

    def _use_ended(self, count: int) -> None:
        """Mark the blocks of some ended requests as used. A request fills its blocks from first to
        last, so the last one counts as used last. `num_known` reverses that."""
        for _ in range(min(count, len(self._ended_chains))):
            hashes, probes, num_bytes = self._ended_chains.popleft()
            self._ended_bytes -= num_bytes
            self.num_known(hashes, probes)
