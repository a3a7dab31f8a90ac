"""One row per position, from all rows that were computed.

Owns:  Transcript; the rule by which arrived rows become a stream: for each position the last
       computed row stays; rows that nobody asked for, and rows of tokens that were never accepted,
       are left out.
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
#: If a tensor has fewer numbers than this, torch uses only the caller's thread.
#: torch 2.13, at::internal::GRAIN_SIZE
ONE_THREAD = 1 << 15
_ALL = Word("all")
#: Bytes of a number -> a dtype of that size which numpy has too.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Part(NamedTuple):
    """Some values of one stream: [n] positions and arrivals, [n, size] rows.

    Attributes:
        arrivals: the order in which rows were computed, across all parts of a request: a later row
            has a larger number.
    """

    positions: Ints
    arrivals: Ints
    rows: Tensor


class Transcript(Sequence[int]):
    """A view of a prompt and of the first tokens of an output that may grow.

    Args:
        prompt_ids: [num_prompt], never changed.
        output_ids: may be extended; ids in it do not change.
        num_output: how many of the first `output_ids` the view includes.
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
    """Number of positions with rows: all tokens except the one sampled last."""
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
        token_ids: prompt and output so far.
        ended: True if the request has ended: its last token is then known.
        first: positions below this one are left out, at no cost.
    """
    count = num_processed(len(token_ids), num_prompt)
    positions = np.arange(first, count, dtype=np.int64)
    if _ALL in selectors:
        return positions
    if all(selector.uniform for selector in selectors):
        ids = positions  # uniform selectors do not look at ids
    else:
        ids = np.asarray(token_ids[first:count], np.int64)
    tokens = Tokens(positions, num_prompt, ids, count if ended else None)
    mask = np.zeros(positions.shape, bool)
    for selector in selectors:
        mask |= selector.select(tokens).certain
    found: Ints = positions[mask]
    return found


def last_of_each(positions: Ints) -> tuple[Ints, Ints]:
    """The distinct positions, ascending, and the index of the last occurrence of each."""
    distinct, from_end = np.unique(positions[::-1], return_index=True)
    return distinct, len(positions) - 1 - from_end


@dataclass(frozen=True)
class Chosen:
    """Which values of some parts stay. Other parts with the same positions and arrivals have the
    same Chosen.

    Attributes:
        positions: the positions of the values that stay, ascending.
        index: the indices of these values among the values of all parts.
    """

    positions: Ints
    index: slice | Tensor

    def of(self, parts: Sequence[Part]) -> Tensor:
        """The values that stay, [n, size]; a view if there is one part and `index` is a slice."""
        if len(parts) == 1:
            return parts[0].rows[self.index]
        return joined_rows([p.rows for p in parts])[self.index]


def joined_rows(pieces: Sequence[Tensor]) -> Tensor:
    """Join CPU tensors along the first axis, in new memory and on this thread.

    Torch would copy on all cores. Its threads then wait for more work, and keep these cores busy
    for milliseconds after each request.

    Args:
        pieces: at least one; their dtype and other axes are equal. A piece that is not contiguous,
            such as a column of a table, is not made contiguous first.
    """
    dtype = pieces[0].dtype
    if sum(piece.numel() for piece in pieces) < ONE_THREAD:
        return torch.cat(list(pieces))
    # numpy has no bfloat16.
    bits = _BITS[dtype.itemsize]
    joined = np.concatenate([piece.detach().view(bits).numpy() for piece in pieces])
    return torch.from_numpy(joined).view(dtype)


def choose(parts: Sequence[Part], wanted: Ints) -> Chosen:
    """For each wanted position, the value that was computed last.

    Args:
        parts: at least one.
        wanted: ascending.
    """
    positions = parts[0].positions
    if len(parts) > 1:
        positions = np.concatenate([p.positions for p in parts])
    # Usually each position was computed once, in order, up to the last wanted one or past it. Then
    # the first n values are the wanted ones.
    n = min(len(positions), len(wanted))
    if np.array_equal(positions[:n], wanted[:n]) and (
        not n or n == len(positions) or positions[n:].min() > wanted[-1]
    ):
        return Chosen(wanted[:n], slice(n))
    order = np.argsort(np.concatenate([p.arrivals for p in parts]), kind="stable")
    # Recomputation and rejected drafts compute a position twice.
    found, last = last_of_each(positions[order])
    keep = np.isin(found, wanted)
    return Chosen(found[keep], torch.from_numpy(order[last[keep]]))


def last_values(parts: Sequence[Part], wanted: Ints, empty: Tensor) -> tuple[Tensor, Ints]:
    """Values and their positions, ascending: for each wanted position, the last computed value.

    Args:
        wanted: ascending.
        empty: the values to return if there are no parts.
    """
    if not parts:
        return empty, np.zeros(0, np.int64)
    chosen = choose(parts, wanted)
    return chosen.of(parts), chosen.positions
