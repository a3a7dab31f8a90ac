"""Selects one row per position from all computed rows of a stream.

Owns:  Part, Transcript, and the rule by which received rows become a stream. For each position, the
       rule keeps the row that was computed last. It drops rows that the request did not select, and
       rows of tokens that were never accepted.
Runs:  in the front-end (results), and in the worker (sinks.request, files.rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.request.selectors import Selector, Tokens, Word

Ints = NDArray[np.int64]
#: To copy a tensor with fewer numbers than this, torch uses only the caller's thread. The value is
#: at::internal::GRAIN_SIZE of torch 2.13.
ONE_THREAD = 1 << 15
_ALL = Word("all")
#: Maps a number of bytes to an integer dtype of this size, which torch and numpy both have.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Part(NamedTuple):
    """Some values of one stream.

    Attributes:
        positions: int64 [n].
        arrivals: int64 [n], the order in which the values were computed. If a position was computed
            twice, the later value has the larger number.
        rows: [n, size].
    """

    positions: Ints
    arrivals: Ints
    rows: Tensor


class Transcript(Sequence[int]):
    """A view of the token ids of a prompt and of the first `num_output` tokens of its output.

    Args:
        prompt_ids: [num_prompt]. The caller never changes `prompt_ids`.
        output_ids: The caller can append ids to this list, but never changes an id in the list.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: list[int], num_output: int) -> None:
        self._prompt_ids, self._output_ids = prompt_ids, output_ids
        self.num_prompt, self._num_tokens = len(prompt_ids), len(prompt_ids) + num_output

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        if not isinstance(at, slice):
            return self[at : at + 1 or None][0]
        first, last, step = at.indices(self._num_tokens)
        last = max(first, last) if step == 1 else last
        n = self.num_prompt
        if step != 1:
            return [*self][at]
        if first >= n:
            return self._output_ids[first - n : last - n]
        return [*self._prompt_ids[first:last], *self._output_ids[: max(0, last - n)]]


def num_processed(num_tokens: int, num_prompt: int) -> int:
    """The number of positions that have rows. Only the last sampled token has no row."""
    return num_tokens - (1 if num_tokens > num_prompt else 0)


def wanted_positions(
    selectors: Sequence[Selector],
    token_ids: Sequence[int],
    num_prompt: int,
    ended: bool,
    first: int = 0,
) -> Ints:
    """The processed positions from `first` on that any selector selects, ascending.

    Args:
        token_ids: the token ids of the prompt, and of the output so far.
        ended: True if the request has ended. Selectors then know which token is the last token.
        first: Positions below `first` are left out. The call takes no time for these positions.
    """
    count = num_processed(len(token_ids), num_prompt)
    positions = np.arange(first, count, dtype=np.int64)
    if _ALL in selectors:
        return positions
    if all(selector.uniform for selector in selectors):
        ids = positions  # uniform selectors do not read token ids
    else:
        ids = np.asarray(token_ids[first:count], np.int64)
    tokens = Tokens(positions, num_prompt, ids, count if ended else None)
    mask = np.zeros(positions.shape, bool)
    for selector in selectors:
        mask |= selector.select(tokens).certain
    found: Ints = positions[mask]
    return found


def indices_within(count: Ints) -> Ints:
    """The indices 0 to n - 1 for each number n of `count`. For example, [2, 3] gives [0, 1, 0, 1,
    2]."""
    return np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)


def last_of_each(positions: Ints) -> tuple[Ints, Ints]:
    """The distinct positions, ascending, and for each position the index of its last occurrence."""
    distinct, from_end = np.unique(positions[::-1], return_index=True)
    return distinct, len(positions) - 1 - from_end


@dataclass(frozen=True)
class Chosen:
    """Says which values of some parts are kept.

    Attributes:
        positions: int64 [n], the positions of the kept values, ascending.
        index: the indices of the kept values among the values of all parts.
    """

    positions: Ints
    index: slice | Tensor

    def of(self, parts: Sequence[Part]) -> Tensor:
        """The kept values, [n, size]. The result is a view if there is one part and `index` is a
        slice."""
        if len(parts) == 1:
            return parts[0].rows[self.index]
        return joined_rows([p.rows for p in parts])[self.index]


def joined_rows(pieces: Sequence[Tensor]) -> Tensor:
    """Join CPU tensors along the first axis, in new memory and on the caller's thread.

    torch.cat would copy with threads on all cores. After the copy, torch's threads keep these cores
    busy for milliseconds.

    Args:
        pieces: At least one tensor. All tensors have the same dtype, and the same shape except for
            the first axis. Pieces need not be contiguous. Each piece is copied only one time.
    """
    dtype = pieces[0].dtype
    if sum(piece.numel() for piece in pieces) < ONE_THREAD:
        return torch.cat(list(pieces))
    # The numbers are joined as integers, because numpy has no bfloat16.
    bits = _BITS[dtype.itemsize]
    joined = np.concatenate([piece.detach().view(bits).numpy() for piece in pieces])
    return torch.from_numpy(joined).view(dtype)


def choose(parts: Sequence[Part], wanted: Ints) -> Chosen:
    """Choose the value that was computed last, for each wanted position that has values.

    Args:
        parts: at least one.
        wanted: ascending.
    """
    positions = parts[0].positions
    if len(parts) > 1:
        positions = np.concatenate([p.positions for p in parts])
    # In the usual case, each position was computed one time, in ascending order, and no unwanted
    # position lies between wanted positions. Then the first n values are the wanted values.
    n = min(len(positions), len(wanted))
    if np.array_equal(positions[:n], wanted[:n]) and (
        not n or n == len(positions) or positions[n:].min() > wanted[-1]
    ):
        return Chosen(wanted[:n], slice(n))
    order = np.argsort(np.concatenate([p.arrivals for p in parts]), kind="stable")
    # After a preemption or a rejected draft, a position is computed again.
    found, last = last_of_each(positions[order])
    keep = np.isin(found, wanted)
    return Chosen(found[keep], torch.from_numpy(order[last[keep]]))


def last_values(parts: Sequence[Part], wanted: Ints, empty: Tensor) -> tuple[Tensor, Ints]:
    """For each wanted position that has values, the value that was computed last. The second result
    has the positions of the returned values, ascending.

    Args:
        wanted: ascending.
        empty: the values to return if there are no parts.
    """
    if not parts:
        return empty, np.zeros(0, np.int64)
    chosen = choose(parts, wanted)
    return chosen.of(parts), chosen.positions
