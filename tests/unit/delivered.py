"""What workers deliver, in tests: rows of one slot (four float32), labelled and in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.labels import Labels
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.heads import Bank, Head
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import boundary_of_point, point_of
from vllm_scope.results.buffer import Pending, Piece
from vllm_scope.results.copiers import copy_all

ROW_BYTES = 16


#: `Layout.encoded`.
Encoded = tuple[tuple[Head, tuple[int, ...]], ...]


def reads_at(*boundaries: int, encoded: Encoded = ()) -> Layout:
    """Rows at some boundaries, after the edits of `embed`, `resid_mid` or `resid_post` there."""
    return Layout(tuple(point_of(boundary, 1) for boundary in boundaries), encoded)


def banks_of(asked: Resolved, *names: str) -> Encoded:
    """The banks of the probes with these names; of all without a name."""
    found: dict[Bank, set[int]] = {}
    for probe in asked.probes:
        for cell in probe.cells if not names or probe.name in names else ():
            found.setdefault(cell.bank, set()).add(cell.place.point())
    made = [(bank, tuple(sorted(points))) for bank, points in found.items()]
    return tuple(sorted(made, key=lambda pair: pair[0].text))


def labels_of(
    keys: Any, positions: Any, layout_of: Any = None, layouts: tuple[Layout, ...] = (reads_at(0),)
) -> Labels:
    keys = np.asarray(keys, np.int64)
    if layout_of is None:
        layout_of = np.zeros(len(keys), np.int32)
    rows = np.arange(len(keys), dtype=np.int64)
    positions = np.asarray(positions, np.int64)
    return Labels(keys, positions, np.asarray(layout_of, np.int32), tuple(layouts), rows)


def slots_per_token(labels: Labels, boundary: int | None, row_bytes: int = ROW_BYTES) -> list[int]:
    """Slots of each token; equally many where a step is drained tap by tap."""
    widths = Widths((row_bytes,))
    if boundary is None:
        return [labels.layouts[at].slots(widths) for at in labels.layout_of]
    most = max(layout.at(boundary).slots(widths) for layout in labels.layouts)
    return [most] * len(labels.keys)


def tokens_in(
    labels: Any, slots: Tensor, boundary: int | None
) -> Iterator[tuple[int, int, Layout, Tensor]]:
    """(key, position, what is here of its layout, its slots as float32 [n, 4]).

    `labels`: Labels, or a RowsMessage, which has the same fields.
    """
    words, slot = slots.view(torch.float32), 0
    counts = slots_per_token(labels, boundary)
    for key, position, at, count in zip(
        labels.keys.tolist(), labels.positions.tolist(), labels.layout_of, counts, strict=True
    ):
        layout = labels.layouts[at]
        here = layout if boundary is None else layout.at(boundary)
        yield key, position, here, words[slot : slot + count]
        slot += count
    assert slot == len(words)


def keep(
    pending: Pending, pieces: Sequence[Piece], labels: np.ndarray, some: Any = slice(None)
) -> None:
    """What the inbox does with one request's part of a message."""
    pending.add(pieces, labels, some)
    copy_all(pending.copies())
    pending.commit()


def rows_in(labels: Any, slots: Tensor, boundary: int | None) -> list[tuple]:
    """(key, position, boundary, first number) of each row."""
    return [
        (key, position, boundary_of_point(point), float(words[i, 0]))
        for key, position, here, words in tokens_in(labels, slots, boundary)
        for i, point in enumerate(here.points)
    ]
