"""The KV blocks whose scores the workers store.

Owns:  ScoreIndex.
Runs:  in EngineCore, on the scheduler's thread.
From:  engine.core.scheduler.   To: news (the scores that workers store and drop).

A KV block holds the keys and values of a fixed number of tokens. A later request with the same
probes can use the block from the prefix cache. If the workers have stored the scores of the block's
tokens, the request gets these scores. The workers store scores by the pair (block hash, digest of
the probes). The block hash covers all tokens up to the end of the block, and all edits of these
tokens. Therefore the scores of two blocks with the same pair are equal. EngineCore decides which
scores the workers store and drop. Therefore EngineCore knows the stored scores. If the scores
exceed a limit in bytes, the scores that were used longest ago are dropped first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat, takewhile

from vllm_scope.request.remembered import Remembered

#: The estimated memory for one block in bytes, in EngineCore and in a worker together, without the
#: block's scores.
_BLOCK_BYTES = 512
#: The turn of a request is a number from 0 to TURNS - 1. The news of a block of generated tokens is
#: sent this number of steps after the block is full. Without turns, requests that began together
#: would send their news in the same step. On the host of an H100, the scheduler needed 7 ms for the
#: blocks of 256 requests in one step. From a request's known tokens, the scheduler estimates the
#: step that fills the next block. With async scheduling, the known tokens are up to two steps old,
#: so that the estimate can be two steps late. The news is then sent up to TURNS + 1 steps after the
#: block is full.
TURNS = 8
#: When a request has ended, its blocks are marked as used. In each step, EngineCore marks the
#: blocks of ENDS_A_STEP ended requests. If more than TURNS * ENDS_A_STEP ended requests wait,
#: EngineCore marks the blocks of 1 / TURNS of them in each step. Without this limit, 128 requests
#: that ended together delayed the last outputs by 3 ms (on the host of an H100).
ENDS_A_STEP = 4
#: Some blocks of ended requests are not marked as used yet. If the scores of these blocks take more
#: than `most_bytes` / WAITING bytes, EngineCore marks all these blocks at once.
WAITING = 8
#: The key of a block's scores: (block hash, digest of the probes).
ScoreKey = tuple[bytes, bytes]


@dataclass(slots=True)
class _Request:
    """A running request whose scores are stored.

    Attributes:
        told: how many of its blocks are already full. The request has filled these blocks, or has
            them from the prefix cache.
        turn: the request's turn (TURNS).
        due_at: the step in which `due` returns the request.
        hashes, probes, block_bytes: after the first call of `fill`: the hashes of the request's
            blocks, the digest of its probes, and the bytes of the scores of one block.
        frozen: the number of its first tokens whose scores are stored, if `freeze` limits them.
    """

    told: int = 0
    turn: int = 0
    due_at: int = 0
    hashes: Sequence[bytes] | None = None
    probes: bytes = b""
    block_bytes: int = 0
    frozen: int | None = None


class ScoreIndex:
    """Decides which blocks' scores the workers store, and when the workers get the news.

    Args:
        block_size: number of tokens of a block with a hash.
        most_bytes: limit of the bytes of all scores.
        step_tokens: the largest number of positions of one request in a decode step.
    """

    def __init__(self, block_size: int, most_bytes: int, step_tokens: int = 1) -> None:
        self.block_size, self._step_tokens = block_size, step_tokens
        self._known: Remembered[ScoreKey, bool] = Remembered(most_bytes)
        self._running: dict[str, _Request] = {}
        #: The turn of the request that began last.
        self._last_turn = 0
        #: By the id of an ended request: its full blocks that no news has named yet, in the form
        #: that `fill` returns.
        self._ended: dict[str, tuple[int, list[bytes]]] = {}
        #: For each ended request whose blocks are not marked as used yet: (hashes of its blocks,
        #: digest of its probes, bytes of the scores of all its blocks).
        self._ended_chains: deque[tuple[Sequence[bytes], bytes, int]] = deque()
        #: The sum of the bytes in `_ended_chains`.
        self._ended_bytes = 0
        #: `_step` is the number of steps so far. `_due` has the requests by the step in which `due`
        #: returns them. If the step of a request has changed, `_due` still has the request under
        #: the old step too.
        self._step = 0
        self._due: dict[int, list[str]] = {}
        #: The keys of the scores that workers must drop with the next news.
        self._forgotten: list[ScoreKey] = []

    @property
    def running(self) -> list[str]:
        return list(self._running)

    def begin(self, request_id: str, num_cached: int) -> None:
        """From now on, store the scores of a running request. Its first `num_cached` blocks come
        from the prefix cache, and their scores are stored already."""
        self._last_turn = (self._last_turn + 1) % TURNS
        # vLLM lets a preempted request begin again.
        one = self._running.setdefault(request_id, _Request())
        one.told, one.turn = num_cached, self._last_turn
        self._look_at(request_id, one, self._step + 1)

    def due(self) -> list[str]:
        """The running requests whose full blocks must be in the news of the coming step. Call this
        method one time for each step, and then call `look_again` for each returned request."""
        self._step += 1
        self._use_ended(max(ENDS_A_STEP, len(self._ended_chains) // TURNS))
        found = dict.fromkeys(self._due.pop(self._step, ()))  # each request one time
        return [r for r in found if (one := self._running.get(r)) and one.due_at == self._step]

    def look_again(self, request_id: str, num_tokens: int) -> None:
        """Choose the step in which `due` returns a request again. If the next block needs fewer
        than `step_tokens` more tokens, `due` returns the request in the next step. Otherwise, let s
        be the first step that can fill the block. `due` then returns the request in step s + t,
        where t is the request's turn (TURNS). If scores of the block must not be stored (`freeze`),
        `due` does not return the request again.

        Args:
            num_tokens: the number of the request's known tokens. A step adds at most `step_tokens`.
        """
        one = self._running[request_id]
        full = self._next_full(one)
        if one.frozen is None or one.frozen >= full:
            steps = (full - num_tokens) // self._step_tokens
            steps = steps + one.turn if steps > 0 else 1
            self._look_at(request_id, one, self._step + steps)

    def _look_at(self, request_id: str, one: _Request, step: int) -> None:
        one.due_at = step
        self._due.setdefault(step, []).append(request_id)

    def num_known(self, hashes: Sequence[bytes], probes: bytes) -> int:
        """The number of blocks before the first block whose scores the workers do not store. Marks
        the counted blocks as used."""
        known = list(takewhile(self._known.__contains__, zip(hashes, repeat(probes))))
        # The last block is marked first, and is therefore also dropped first. Scores of a later
        # block are useless without the scores of the blocks before it.
        self._known.use(reversed(known))
        return len(known)

    def num_told(self, request_id: str) -> int | None:
        """The number of the request's blocks that are already full. None before `begin`."""
        one = self._running.get(request_id)
        return None if one is None else one.told

    def may_fill(self, request_id: str, num_tokens: int) -> bool:
        """True if `fill` can find a new full block after `num_tokens` tokens are computed."""
        return num_tokens >= self._next_full(self._running[request_id])

    def _next_full(self, one: _Request) -> int:
        """The number of tokens at which the request's next block is full."""
        return (one.told + 1) * self.block_size

    def fill(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, probes: bytes,
        token_bytes: int,
    ) -> tuple[int, list[bytes]] | None:  # fmt: skip
        """Record the blocks that a request has filled since the last call. The workers store the
        scores of the blocks that this method returns.

        Args:
            hashes: hashes of the request's blocks so far. The list itself is stored, not a copy.
            num_tokens: number of computed tokens after the coming step.
            token_bytes: bytes of the scores of one token.

        Returns:
            (number of the first new full block, hashes of all new full blocks); None if no block
            is newly full.
        """
        one = self._running[request_id]
        first = one.told
        if one.frozen is not None:
            num_tokens = min(num_tokens, one.frozen)
        stop = min(num_tokens // self.block_size, len(hashes))
        if stop <= first:
            return None
        size = self.block_size * token_bytes + _BLOCK_BYTES
        one.told, one.hashes, one.probes, one.block_bytes = stop, hashes, probes, size
        found = list(hashes[first:stop])
        for block_hash in reversed(found):  # in reverse order, as in `num_known`
            gone = self._known.put((block_hash, probes), True, size)
            self._forgotten += [key for key, _ in gone]
        return first, found

    def freeze(self, request_id: str, num_tokens: int) -> None:
        """From now on, store only scores of the first `num_tokens` tokens of a running request. The
        later tokens have more scores, because a later stage of a cascade has begun."""
        one = self._running.get(request_id)
        if one is not None and one.frozen is None:
            one.frozen = num_tokens

    def lose(self, keys: Iterable[ScoreKey]) -> None:
        """Record that a worker has lost the scores with these keys. Workers of other pipeline
        stages can still have their parts of the scores. Therefore all workers drop these scores
        with the next news. The report of a loss can be late. It can then name scores that were
        stored again after the loss."""
        lost = set(keys)
        self._known.discard(lost)
        self._forgotten += lost

    def clear(self) -> None:
        """Drop all scores. Called when the model's weights can have changed."""
        self._forgotten += [key for key, _ in self._known.clear()]
        self._ended_chains.clear()
        self._ended_bytes = 0
        # vLLM computes the blocks of running requests again, from the first one on.
        for request_id in self._running:
            self.begin(request_id, 0)

    @property
    def has_news(self) -> bool:
        """If this is False, `take_ended` and `take_forgotten` return empty results."""
        return bool(self._forgotten or self._ended)

    def take_ended(self) -> dict[str, tuple[int, list[bytes]]]:
        """By the id of an ended request: the blocks that were not in the news while the request
        ran. Each block is returned only one time."""
        found, self._ended = self._ended, {}
        return found

    def take_forgotten(self) -> list[ScoreKey]:
        """The keys of scores that workers must drop, without the keys of scores that were stored
        again. Each key is returned only one time."""
        found, self._forgotten = self._forgotten, []
        return [key for key in found if key not in self._known]

    def finish_request(self, request_id: str, filled: tuple[int, list[bytes]] | None) -> None:
        """Remove a request that has ended.

        Args:
            filled: the result of `fill` with all tokens of the request.
        """
        if filled is not None:
            self._ended[request_id] = filled
        one = self._running.pop(request_id, None)
        if one is not None and one.hashes is not None:
            num_bytes = len(one.hashes) * one.block_bytes
            self._ended_chains.append((one.hashes, one.probes, num_bytes))
            self._ended_bytes += num_bytes
            if self._ended_bytes * WAITING > self._known.most_bytes:
                self._use_ended(len(self._ended_chains))

    def _use_ended(self, count: int) -> None:
        """Mark the blocks of `count` ended requests as used, by `num_known`. A request fills its
        first block first. Without this method, its first block would be dropped first. `num_known`
        reverses the order."""
        for _ in range(min(count, len(self._ended_chains))):
            hashes, probes, num_bytes = self._ended_chains.popleft()
            self._ended_bytes -= num_bytes
            self.num_known(hashes, probes)
