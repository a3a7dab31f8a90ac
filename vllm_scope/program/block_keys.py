"""The keys under which vLLM finds the KV of edited tokens.

Owns:  BlockKeys.
Runs:  in EngineCore, when vLLM hashes a request's blocks. numpy, no torch.
From:  request.resolve (the edits).   To: engine.core.entry.

Promise: two requests share a block's KV only if the same edits apply to the same tokens of that
block and of all blocks before it (vLLM chains the keys), and if the states of these edits' gates
began at the same position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_scope.program.picks import Pick
from vllm_scope.program.ranges import can_remember
from vllm_scope.request.resolved import ResolvedEdit
from vllm_scope.request.selectors import Ids, Tokens, Word

#: Of edits that other requests have too: how many they may be, the prompts' lengths for which
#: their tokens are known, and the blocks of each.
MOST_EDITS, MOST_LENGTHS, MOST_BLOCKS = 8, 4, 64


def _parts(edit: ResolvedEdit, num_prompt: int) -> Iterator[tuple[Pick, bytes]]:
    """The tokens that an edit picks, and the digest of what it does to them.

    A gate with a state does to tokens of the prompt what it does without one. What it does to a
    generated token depends on all of them before, so also on where they begin.
    """
    if edit.stateless is None:
        yield Pick(edit.tokens, "edit", edit.positions), edit.digest
        return
    from_here = hashlib.blake2b(edit.digest + num_prompt.to_bytes(8, "little"), digest_size=16)
    digests = {"prompt": edit.stateless.digest, "generated": from_here.digest()}
    for phase, digest in digests.items():
        if edit.tokens.picks_phase(phase == "generated"):
            yield Pick(Word(phase), "edit"), digest


class _Edited:
    """Which tokens of a prompt some picks have, block by block.

    Attributes:
        shared: True if that depends on the length of the prompt alone, not on its tokens, and the
            picks are few, so that it may be kept.
    """

    def __init__(self, given: list[Pick], num_prompt: int, prompt_ids: Ids) -> None:
        picks: dict[Pick, int] = {}
        self._pick_of = np.array([picks.setdefault(pick, len(picks)) for pick in given], np.int64)
        self._picks = tuple(picks)
        self.uniform = all(pick.uniform for pick in self._picks)
        self.shared = len(given) <= MOST_EDITS and (self.uniform or can_remember(self._picks))
        self._num_prompt = num_prompt
        ids = np.zeros(num_prompt, np.int64) if self.uniform or self.shared else prompt_ids
        self._ids = np.asarray(ids, np.int64)
        self._known: dict[tuple[int, int], tuple[hashlib.blake2b, NDArray[np.bool_]] | None] = {}

    def at(self, start: int, stop: int) -> tuple[hashlib.blake2b, NDArray[np.bool_]] | None:
        """Of positions `start` to `stop` - 1: the hash of what is picked, which digests of edits
        follow, and which edits they are; None if nothing is picked."""
        if not self.shared:
            return self._at(start, stop)
        if (start, stop) not in self._known:
            if len(self._known) >= MOST_BLOCKS:
                self._known.clear()
            self._known[start, stop] = self._at(start, stop)
        return self._known[start, stop]

    def _at(self, start: int, stop: int) -> tuple[hashlib.blake2b, NDArray[np.bool_]] | None:
        positions = np.arange(start, stop, dtype=np.int64)
        tokens = Tokens.running(positions, self._num_prompt, self._ids)
        #: The distinct sets of tokens that are picked here -> their numbers, from 1.
        numbers: dict[bytes, int] = {}
        of_picks = np.zeros(len(self._picks), "<u4")
        for i, pick in enumerate(self._picks):
            values = pick.values(tokens)
            if values.any():
                of_picks[i] = numbers.setdefault(values.tobytes(), len(numbers) + 1)
        if not numbers:
            return None
        of_edits = of_picks[self._pick_of]
        here = of_edits > 0
        digest = hashlib.blake2b(repr((len(numbers), int(here.sum()))).encode(), digest_size=16)
        digest.update(b"".join(numbers))
        digest.update(of_edits[here].tobytes())
        return digest, here


class BlockKeys:
    """The keys of one request's blocks.

    Args:
        own: bytes that no other request has, if a policy sets scales of generated tokens: blocks
            that have such tokens are nobody else's. Empty without such a policy.
        shared: Resolved.shared of the edits, if the keys may be made with its help.
    """

    def __init__(
        self, edits: tuple[ResolvedEdit, ...], num_prompt: int, prompt_ids: Ids, own: bytes = b"",
        shared: dict[Hashable, Any] | None = None,
    ) -> None:  # fmt: skip
        self._own, self._num_prompt = own, num_prompt
        parts = [part for edit in edits for part in _parts(edit, num_prompt)]
        known: dict[int, _Edited] = {} if shared is None else shared.setdefault("edited", {})
        edited = known.get(num_prompt)
        if edited is None:
            edited = _Edited([pick for pick, _ in parts], num_prompt, prompt_ids)
            if edited.shared:
                if len(known) >= MOST_LENGTHS:
                    known.clear()
                known[num_prompt] = edited
        self._edited = edited
        digests = b"".join(digest for _, digest in parts)
        self._digests = np.frombuffer(digests, np.uint8).reshape(len(parts), -1)
        #: (length, generated) of a block of one phase -> its key, if the edits depend on the phase
        #: alone.
        self._of_phase: dict[tuple[int, bool], bytes | None] = {}

    def key(self, start: int, stop: int) -> bytes | None:
        """The key of positions `start` to `stop` - 1; None if none of them is edited."""
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
        found = self._edited.at(start, stop)
        if found is None:
            return None
        digest, here = found[0].copy(), found[1]
        digest.update(self._digests[here].tobytes())
        return digest.digest()
