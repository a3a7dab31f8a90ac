"""Collects one request's rows before they are written to a file.

Owns:  RequestWriter (collects blocks of rows), Stream (one stream, in position order).
Runs:  on the thread that writes rows, for example a sink thread. Only `finish` may wait for a disk.

Promise: rows are in position order. Each position has one row, the last row that was written for
the position. Rows of rejected tokens are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.by_position import Ints, last_of_each
from vllm_scope.codecs import Codec
from vllm_scope.codecs.packed import EncodedRows
from vllm_scope.files.buffers import Buffers
from vllm_scope.files.index import RequestRecord
from vllm_scope.files.stored import Stored
from vllm_scope.files.tensors import joined
from vllm_scope.request.read_features import NOT_KNOWN, ReadFeatures
from vllm_scope.request.sites import SiteLayer


@dataclass(frozen=True)
class Stream:
    """The rows of one stream (site, layer) of a request.

    Attributes:
        positions: int64 [n], ascending.
        blocks: the n rows, in one or more blocks [some, hidden_size].
        codec: the codec of the rows, if the rows arrived encoded. The blocks then have the encoded
            bytes.
        read: if the rows are features, which features of the SAE were read.
    """

    positions: Ints
    blocks: list[Tensor]
    codec: Codec | None = None
    read: ReadFeatures = NOT_KNOWN


class RequestWriter:
    """Collects the rows of one request. Nothing is written to a file before `finish`.

    Args:
        buffers: memory for copies of the rows.
        copies: if False, rows on the CPU that fill at least half of their storage are kept without
            a copy. The caller must not change these rows before they are published.
    """

    def __init__(
        self,
        buffers: Buffers,
        store: Callable[[RequestRecord, RequestWriter], Stored],
        copies: bool = True,
    ) -> None:
        self._copies = copies
        self._buffers, self._store = buffers, store
        self._blocks: dict[SiteLayer, list[tuple[Ints, Tensor]]] = {}
        self._codecs: dict[SiteLayer, Codec | None] = {}
        self._read: dict[SiteLayer, ReadFeatures] = {}

    def write(
        self,
        site: str,
        layer: int,
        positions: Ints,
        rows: Tensor | EncodedRows,
        read: ReadFeatures = NOT_KNOWN,
    ) -> None:
        """Add some rows. If a position is written twice, the last row is kept.

        Args:
            site, layer: the stream. The site `embed` has layer 0.
            positions: the absolute positions of the rows, int64 [n].
            rows: [n, hidden_size], in the model's dtype, on any device. The rows can also be n
                encoded rows, which are stored unchanged. The writer's codec is not applied to
                encoded rows.
            read: if the rows are features, which features of the SAE were read. All calls for a
                stream must have the same value.

        Raises:
            ValueError: the shapes of the arguments do not fit together, or the shape, dtype or
                codec differs from earlier rows of the stream.
        """
        codec = None
        self._read[site, layer] = read
        if isinstance(rows, EncodedRows):
            codec, rows = rows.codec, rows.data
        if self._codecs.setdefault((site, layer), codec) != codec:
            raise ValueError(f"{site}.{layer}: the rows have two codecs")
        if rows.dim() != 2 or positions.shape != rows.shape[:1]:
            raise ValueError(
                f"{site}.{layer}: positions are {list(positions.shape)} and rows "
                f"{list(rows.shape)}; they must be [n] and [n, hidden_size]"
            )
        blocks = self._blocks.setdefault((site, layer), [])
        if blocks and (blocks[0][1].shape[1], blocks[0][1].dtype) != (rows.shape[1], rows.dtype):
            raise ValueError(
                f"{site}.{layer}: rows are [n, {rows.shape[1]}] {rows.dtype}, after "
                f"[n, {blocks[0][1].shape[1]}] {blocks[0][1].dtype}"
            )
        kept = not self._copies and _fills_its_memory(rows)
        blocks.append((np.array(positions, np.int64), rows if kept else self._buffers.copy(rows)))

    def finish(self, record: RequestRecord) -> Stored:
        """Encode and store the rows. Call `finish` one time.

        Raises:
            FileError: the layout is `per_request` or `npz`, and the request's file could not be
                written. With the other layouts, `Stored.published` has this error.
            ConfigError: the codec does not support rows of this size.
        """
        return self._store(record, self)

    def streams(self, num_positions: int) -> dict[SiteLayer, Stream]:
        """All streams, with the rows of positions below `num_positions`."""
        return {
            stream: replace(
                _in_order(blocks, num_positions, self._codecs[stream]), read=self._read[stream]
            )
            for stream, blocks in sorted(self._blocks.items())
        }


def _fills_its_memory(rows: Tensor) -> bool:
    """True if the rows are on the CPU and take at least half of their storage.

    If rows of other layers lie between the rows, the storage of the other rows counts too.
    """
    used = len(rows) * rows.stride(0) * rows.itemsize
    return rows.device.type == "cpu" and 2 * used >= rows.untyped_storage().nbytes()


def _in_order(blocks: list[tuple[Ints, Tensor]], num_positions: int, codec: Codec | None) -> Stream:
    positions = blocks[0][0] if len(blocks) == 1 else np.concatenate([p for p, _ in blocks])
    pieces = [rows for _, rows in blocks]
    ascending = bool((positions[1:] > positions[:-1]).all())
    if ascending and (not len(positions) or (positions[0] >= 0 and positions[-1] < num_positions)):
        return Stream(positions, joined(pieces) if len(pieces) > 1 else pieces, codec)
    distinct, last = last_of_each(positions)
    keep = (distinct >= 0) & (distinct < num_positions)
    return Stream(distinct[keep], [torch.cat(pieces)[torch.from_numpy(last[keep])]], codec)
