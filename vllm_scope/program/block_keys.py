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
from collections.abc import Iterator

import numpy as np

from vllm_scope.program.picks import Pick
from vllm_scope.request.resolved import ResolvedEdit
from vllm_scope.request.selectors import Ids, Tokens, Word


def _parts(edit: ResolvedEdit, num_prompt: int) -> Iterator[tuple[Pick, bytes]]:
    """The tokens that an edit picks, and the digest of what it does to them.

    A gate with a state does to tokens of the prompt what it does without one. What it does to a
    generated token depends on all of them before, so also on where they begin.
    """
    if edit.stateless is edit:
        yield Pick(edit.tokens, "edit", edit.positions), edit.digest
        return
    from_here = hashlib.blake2b(edit.digest + num_prompt.to_bytes(8, "little"), digest_size=16)
    digests = {"prompt": edit.stateless.digest, "generated": from_here.digest()}
    for phase, digest in digests.items():
        if edit.tokens.picks_phase(phase == "generated"):
            yield Pick(Word(phase), "edit"), digest


class BlockKeys:
    """The keys of one request's blocks.

    Args:
        own: bytes that no other request has, if a policy sets scales of generated tokens: blocks
            that have such tokens are nobody else's. Empty without such a policy.
    """

    def __init__(
        self, edits: tuple[ResolvedEdit, ...], num_prompt: int, prompt_ids: Ids, own: bytes = b""
    ) -> None:
        self._own = own
        picks: dict[Pick, int] = {}
        parts = [part for edit in edits for part in _parts(edit, num_prompt)]
        given = [pick for pick, _ in parts]
        self._pick_of = np.array([picks.setdefault(pick, len(picks)) for pick in given], np.int64)
        self._picks = tuple(picks)
        digests = b"".join(digest for _, digest in parts)
        self._digests = np.frombuffer(digests, np.uint8).reshape(len(parts), -1)
        self._uniform = all(pick.uniform for pick in self._picks)
        ids = np.zeros(num_prompt, np.int64) if self._uniform else np.asarray(prompt_ids, np.int64)
        self._num_prompt, self._ids = num_prompt, ids
        #: (length, generated) of a block of one phase -> its key, if the edits depend on the phase
        #: alone.
        self._of_phase: dict[tuple[int, bool], bytes | None] = {}

    def key(self, start: int, stop: int) -> bytes | None:
        """The key of positions `start` to `stop` - 1; None if none of them is edited."""
        found = self._of_edits(start, stop)
        return (found or b"") + self._own if self._own and stop > self._num_prompt else found

    def _of_edits(self, start: int, stop: int) -> bytes | None:
        generated = start >= self._num_prompt
        if not self._uniform or (not generated and stop > self._num_prompt):
            return self._key(start, stop)
        block = stop - start, generated
        if block not in self._of_phase:
            self._of_phase[block] = self._key(start, stop)
        return self._of_phase[block]

    def _key(self, start: int, stop: int) -> bytes | None:
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
        digest.update(self._digests[here].tobytes())
        return digest.digest()
