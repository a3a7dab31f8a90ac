"""The streams that a sink gets from one request, and the bytes of each stream in a token's layout.

Owns:  Stream, `streams_of`.
Runs:  in the worker, on the drain thread and on the sink threads.
From:  request.resolved (the actions), program.layout.   To: request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.batch.by_position import Ints
from vllm_scope.batch.readout import scores_of
from vllm_scope.batch.sparse import sparse_rows
from vllm_scope.codecs.packed import EncodedRows, packing_of
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths, slots_of_row
from vllm_scope.request.heads import Encoding, Head
from vllm_scope.request.read_features import NOT_KNOWN
from vllm_scope.request.resolved import Resolved, ResolvedFeatures, ResolvedProbe
from vllm_scope.request.selectors import Selector
from vllm_scope.request.sites import Phase, Place, Sites, kind_of_point
from vllm_scope.sinks import Block, RequestInfo


@dataclass(frozen=True)
class Stream:
    """The values that a sink gets from one point. The values are raw rows, encoded rows, the scores
    of one probe, the features of one `Features`, or the tokens of a lens at one layer.

    Attributes:
        name: the site and layer of the stream's blocks.
        dtype: the dtype of raw rows.
        head: the head that computes the values from rows. None for raw rows.
        probe: the probe, the features or the lens that delivers the values. None for rows.
    """

    name: Place
    selectors: tuple[Selector, ...]
    point: int
    dtype: torch.dtype
    head: Head | None = None
    probe: ResolvedProbe | ResolvedFeatures | None = None

    def bytes_in(self, layout: Layout, widths: Widths) -> slice | None:
        """The range of bytes with the stream's values, in the data of one token that has this
        layout. None if the layout has no values of the stream."""
        if self.head is None:
            row = layout.row_of(self.point)
            if row not in layout.points:
                return None
            first = layout.slot_of(row, widths) * SLOT_BYTES
            return slice(first, first + widths.row_bytes[kind_of_point(row)])
        slot = layout.made_at(self.head, self.point, widths)
        if slot is None:
            return None
        first = slot * SLOT_BYTES
        if self.probe is None:
            return slice(first, first + slots_of_row(self.head.row_bytes) * SLOT_BYTES)
        (cell,) = self.probe.cells
        return slice(first + 4 * cell.first, first + 4 * (cell.first + self.probe.num_values))

    def values(self, layout: Layout, data: NDArray[np.uint8], widths: Widths) -> Tensor | None:
        """The values: rows [n, row_size], encoded rows uint8 [n, bytes], or scores [n]. For
        features and a lens, the values have the form of the argument `words` of `sparse_rows`, [n,
        num_values]. All values except scores are views of `data`. None if the layout has no values
        of the stream.

        Args:
            layout: the layout of `data`, which is uint8 [n, bytes of a token].
        """
        found = self.bytes_in(layout, widths)
        if found is None:
            return None
        values = torch.from_numpy(data[:, found])
        if isinstance(self.probe, ResolvedFeatures):
            return values.view(torch.float32)
        if self.probe is not None:
            return scores_of(self.probe, values.view(torch.float32))
        return values if self.head is not None else values.view(self.dtype)

    def block(self, info: RequestInfo, positions: Ints, values: Tensor) -> Block:
        """A block with these values, which come from `Stream.values`."""
        source: Tensor | EncodedRows = values
        indices, sae, read = None, None, NOT_KNOWN
        if isinstance(self.probe, ResolvedFeatures):
            sparse = sparse_rows(self.probe, values)
            source, indices = sparse.values, sparse.indices
            read, sae = sparse.read, self.probe.whole_sae
        elif isinstance(self.head, Encoding):
            source = EncodedRows(packing_of(self.head).codec, values)
        probe = None if self.probe is None else self.probe.name
        known = read.num_features, read.asked
        return Block(info, *self.name, positions, source, probe, indices, sae, *known)


def streams_of(asked: Resolved, to: str, sites: Sites, here: Sequence[int]) -> Iterator[Stream]:
    """The streams of a request that a sink gets from one pipeline stage.

    Args:
        asked: all actions of the request.
        to: the destination, as in Delivery.
        here: the boundaries of the stage.
    """
    dtype = getattr(torch, sites.dtype)
    going = asked.going_to(to)
    selectors: dict[tuple[Place, Phase, Encoding | None], list[Selector]] = {}
    for read in going.reads:
        for stream in read.streams:
            if stream.boundary in here:
                selectors.setdefault((stream, read.when, read.encoding), []).append(read.tokens)
    for (place, when, encoding), some in selectors.items():
        name = place if when == "after" else Place(f"{place.site}.before", place.layer)
        yield Stream(name, tuple(some), place.point(when), dtype, encoding)
    for probe in going.banked:
        (cell,) = probe.cells  # a probe that goes to a sink has exactly one cell
        if cell.place.boundary in here:
            point = cell.place.point()
            yield Stream(cell.place, (probe.tokens,), point, dtype, cell.bank, probe)
