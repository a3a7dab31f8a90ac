"""Splits a batch of rows by layout and by request.

Runs:  in the front-end (results.inbox) and on the drain thread (sinks.router).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from vllm_scope.program.layout import SLOT, Layout, Widths


def by_layout(
    layouts: Sequence[Layout],
    layout_of: np.ndarray,
    boundary: int | None,
    widths: Widths,
    slots: Tensor,
) -> Iterator[tuple[Layout, np.ndarray, np.ndarray]]:
    """Yield the tokens of a batch and the bytes of these tokens, for one layout after another.

    Args:
        layouts, layout_of, boundary: the same as in labels.Labels and sinks.RowBatch.
        widths: the number of bytes of a raw row, by kind.
        slots: uint8 [num_slots, SLOT_BYTES].

    Yields:
        The layout, the indices [n] of the layout's tokens, and the bytes of these tokens, uint8 [n,
        bytes of a token]. A layout without tokens is left out.

    Raises:
        ValueError: the number of slots contradicts the layouts.
    """
    data = slots.numpy().reshape(-1)
    num_tokens = len(layout_of)
    everything = np.arange(num_tokens)
    if not num_tokens and not len(data):
        return
    if len(layouts) == 1:
        yield layouts[0], everything, data.reshape(num_tokens, -1)
        return
    if boundary is not None:
        equal = data.reshape(num_tokens, -1)
        for i, layout in enumerate(layouts):
            tokens = np.flatnonzero(layout_of == i)
            if len(tokens):
                yield layout, tokens, equal[tokens]
        return
    sizes = np.array([layout.slots(widths) for layout in layouts])[layout_of]
    if sizes.sum() != len(slots):
        raise ValueError(f"the batch has {len(slots)} slots, but its layouts need {sizes.sum()}")
    starts = np.cumsum(sizes) - sizes
    by_slot = data.view(SLOT)
    for i, layout in enumerate(layouts):
        tokens = np.flatnonzero(layout_of == i)
        if not len(tokens):
            continue
        at = starts[tokens][:, None] + np.arange(layout.slots(widths))
        yield layout, tokens, by_slot.take(at).view(np.uint8)


def by_key(keys: np.ndarray) -> Iterator[tuple[int, slice | np.ndarray]]:
    """Yield each key, ascending, with the indices at which `keys` has this key.

    If the indices of a key are evenly spaced, they are given as a slice, else as an array. A slice
    is faster than an array. One message often has the rows of several steps of the same n requests.
    The tokens of one request are then every n-th token of the message.

    Args:
        keys: int64 [n], n >= 1.
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
    stops = np.append(starts[1:], len(keys))
    found = ordered[starts].tolist()
    if len(starts) == len(keys):
        # Each key occurs once. This is so in a step of decoding, with one token of each request.
        for key, at in zip(found, order.tolist(), strict=True):
            yield key, slice(at, at + 1)
        return
    # The smallest and the largest distance between adjacent indices of a key.
    distances = np.diff(order, append=order[-1])
    within = np.ones(len(keys), bool)
    within[stops - 1] = False
    least = np.minimum.reduceat(np.where(within, distances, len(keys)), starts)
    largest = np.maximum.reduceat(np.where(within, distances, 0), starts)
    firsts, lasts = order[starts], order[stops - 1] + 1
    even = (least == largest) | (stops - starts == 1)
    steps = np.maximum(largest, 1)
    for key, first, last, step, is_even, start, stop in zip(
        found, firsts.tolist(), lasts.tolist(), steps.tolist(), even.tolist(),
        starts.tolist(), stops.tolist(), strict=True,
    ):  # fmt: skip
        yield key, slice(first, last, step) if is_even else order[start:stop]
