"""The keys under which vLLM finds the KV of edited tokens.

Owns:  BlockKeys, and a cache of the tokens that the edits pick in each block.
Runs:  in EngineCore, when vLLM hashes a request's blocks. numpy, no torch.
From:  request.resolve (the edits).   To: engine.core.entry.

A KV block holds the keys and values of some adjacent tokens. vLLM computes a block's hash from its
tokens, the hash of the block before, and the key that this module adds.

Promise: two requests share the KV of a block only if two conditions are met. First, the same edits
apply to the same tokens of this block and of all earlier blocks. Second, if the block has generated
tokens, the states of the edits' gates began at the same position.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_scope.program.picks import Pick
from vllm_scope.program.ranges import PicksKey, can_remember
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.resolved import ResolvedEdit
from vllm_scope.request.selectors import Ids, Tokens, Word

#: If the edits of a request have more than MOST_EDITS parts (`_parts`), this module does not cache
#: the request's _Block objects. This limit does not change which KV blocks vLLM caches.
MOST_EDITS = 8
#: REMEMBERED_BYTES: the largest number of bytes of the whole cache. MOST_BYTES: the largest number
#: of bytes of one entry, which is a _Blocks object for one tuple of picks and one prompt length.
REMEMBERED_BYTES, MOST_BYTES = 16 << 20, 1 << 20
#: The measured bytes of a _Blocks object without its picks, and of a _Block without its text.
_BLOCKS_BYTES, _BLOCK_BYTES = 1024, 640


def _parts(edit: ResolvedEdit, num_prompt: int) -> Iterator[tuple[Pick, bytes]]:
    """Yield the parts of an edit. A part is a Pick (a rule that picks tokens), and a digest of the
    edit's effect on the picked tokens. Most edits have one part.

    An edit whose gate has a state can have two parts. At prompt tokens, the state has no effect. At
    a generated token, the state depends on all earlier generated tokens, and therefore on the
    position of the first generated token.
    """
    if edit.stateless is None:
        yield Pick(edit.tokens, "edit", edit.positions), edit.digest
        return
    from_here = hashlib.blake2b(edit.digest + num_prompt.to_bytes(8, "little"), digest_size=16)
    digests = {"prompt": edit.stateless.digest, "generated": from_here.digest()}
    for phase, digest in digests.items():
        if edit.tokens.picks_phase(phase == "generated"):
            yield Pick(Word(phase), "edit"), digest


class _Block(NamedTuple):
    """Which tokens of one block the edits of a request pick.

    Attributes:
        here: [number of parts of all edits], True for a part that picks at least one token of the
            block.
        text: bytes that are equal for two blocks only if the parts in `here` pick the same tokens
            in both blocks. Empty if no part picks a token.
    """

    here: NDArray[np.bool_]
    text: bytes


class _BlocksKey(NamedTuple):
    """The key of a _Blocks object. If two requests have equal keys, and their picks use no token
    ids, their edits pick the same tokens."""

    picks: PicksKey
    num_prompt: int


class _Blocks:
    """The cached _Block objects of all requests with equal picks and equal prompt lengths.
    Thread-safe."""

    def __init__(self, key: _BlocksKey) -> None:
        self._key, self._num_bytes = key, _BLOCKS_BYTES + key.picks.num_bytes
        self._known: dict[tuple[int, int], _Block] = {}
        self._lock = threading.Lock()

    @staticmethod
    def of(key: _BlocksKey) -> _Blocks:
        found = _known.get(key)
        if found is None:
            found = _Blocks(key)
            _known.put(key, found, found._num_bytes)
        return found

    def get(self, start: int, stop: int) -> _Block | None:
        return self._known.get((start, stop))

    def put(self, start: int, stop: int, block: _Block) -> None:
        """Cache a _Block, if this object has room for the _Block."""
        with self._lock:
            size = self._num_bytes + _BLOCK_BYTES + len(block.text)
            # If the cache has dropped this object, the cache does not count this object's bytes. In
            # this case nothing is added to this object.
            if size <= MOST_BYTES and _known.get(self._key) is self:
                self._known[start, stop], self._num_bytes = block, size
                _known.put(self._key, self, size)


_known: Remembered[_BlocksKey, _Blocks] = Remembered(REMEMBERED_BYTES)


class _Edited:
    """Finds which tokens of a block the edits of a request pick.

    Attributes:
        uniform: True if the picks depend only on the phase (prompt or generated).
        sees_ids: True if the picks also depend on the prompt's token ids.
        shared: True if there are few picks, and if these picks use no token ids and name few
            positions. In this case each _Block is cached for other requests.
    """

    def __init__(self, given: tuple[Pick, ...]) -> None:
        picks: dict[Pick, int] = {}
        self._pick_of = np.array([picks.setdefault(pick, len(picks)) for pick in given], np.int64)
        self._picks = tuple(picks)
        self.uniform = all(pick.uniform for pick in self._picks)
        self.sees_ids = any(pick.selector.sees_ids for pick in self._picks)
        self.shared = len(given) <= MOST_EDITS and can_remember(self._picks)
        self._key = PicksKey(given, ()) if self.shared else None

    def blocks(self, num_prompt: int) -> _Blocks | None:
        """The _Blocks for prompts of this length. None if `shared` is False."""
        return None if self._key is None else _Blocks.of(_BlocksKey(self._key, num_prompt))

    def at(self, start: int, stop: int, num_prompt: int, prompt_ids: Ids) -> _Block:
        """The _Block of positions `start` to `stop` - 1.

        Args:
            prompt_ids: the prompt's token ids. If `sees_ids` is False, the array can be empty.
        """
        positions = np.arange(start, stop, dtype=np.int64)
        if self.sees_ids:
            tokens = Tokens.running(positions, num_prompt, prompt_ids)
        else:
            tokens = Tokens(positions, num_prompt, np.full(len(positions), -1, np.int64), None)
        #: The number of each distinct set of tokens that a pick selects in this block. The numbers
        #: begin at 1.
        numbers: dict[bytes, int] = {}
        of_picks = np.zeros(len(self._picks), "<u4")
        for i, pick in enumerate(self._picks):
            values = pick.values(tokens)
            if values.any():
                of_picks[i] = numbers.setdefault(values.tobytes(), len(numbers) + 1)
        of_edits = of_picks[self._pick_of]
        here = of_edits > 0
        here.flags.writeable = False
        if not numbers:
            return _Block(here, b"")
        counts = repr((len(numbers), int(here.sum()))).encode()
        return _Block(here, b"".join((counts, *numbers, of_edits[here].tobytes())))


class BlockKeys:
    """The keys of one request's blocks.

    Args:
        own: empty, or bytes that no other request has. The bytes are needed if a policy can change
            the scales of edits at generated tokens: no other request may then use blocks with
            generated tokens of this request.
        shared: Resolved.shared, a cache for all requests of the spec. If None, there is no cache.
    """

    def __init__(
        self, edits: tuple[ResolvedEdit, ...], num_prompt: int, prompt_ids: Ids, own: bytes = b"",
        shared: dict[Hashable, Any] | None = None,
    ) -> None:  # fmt: skip
        self._own, self._num_prompt = own, num_prompt
        parts = [part for edit in edits for part in _parts(edit, num_prompt)]
        edited: _Edited | None = None if shared is None else shared.get("edited")
        if edited is None:
            edited = _Edited(tuple(pick for pick, _ in parts))
            if edited.shared and shared is not None:
                shared["edited"] = edited
        self._edited = edited
        self._blocks = None if shared is None else edited.blocks(num_prompt)
        self._prompt_ids: Ids = np.asarray(prompt_ids, np.int64) if edited.sees_ids else ()
        digests = b"".join(digest for _, digest in parts)
        self._digests = np.frombuffer(digests, np.uint8).reshape(len(parts), -1)
        #: The key of a block, by (length, generated), for edits that depend only on the phase.
        self._of_phase: dict[tuple[int, bool], bytes | None] = {}

    def key(self, start: int, stop: int) -> bytes | None:
        """The key of the block at the positions `start` to `stop` - 1. None if no edit picks a
        token of the block. If `own` is not empty, a block with generated tokens always has a key.
        """
        found = self._of_edits(start, stop)
        return (found or b"") + self._own if self._own and stop > self._num_prompt else found

    def _of_edits(self, start: int, stop: int) -> bytes | None:
        generated = start >= self._num_prompt
        if not self._edited.uniform or (not generated and stop > self._num_prompt):
            return self._key(start, stop)
        block = stop - start, generated
        if block not in self._of_phase:
            self._of_phase[block] = self._key(start, stop)
        return self._of_phase[block]

    def _key(self, start: int, stop: int) -> bytes | None:
        found = None if self._blocks is None else self._blocks.get(start, stop)
        if found is None:
            found = self._edited.at(start, stop, self._num_prompt, self._prompt_ids)
            if self._blocks is not None:
                self._blocks.put(start, stop, found)
        if not found.text:
            return None
        digests = self._digests[found.here].tobytes()
        return hashlib.blake2b(found.text + digests, digest_size=16).digest()
