"""One request's rows on their way to a file.

Owns:  RequestRows (collects labelled blocks) and Stream (one stream, in order).
Runs:  on the thread that drains; never waits for a disk.

Promise: each position has one row, the last that came, in position order; what was
never accepted is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_scope.codecs import Codec
from vllm_scope.codecs.packed import EncodedRows
from vllm_scope.files.buffers import Buffers, copy_rows
from vllm_scope.files.tensors import joined
from vllm_scope.request.sites import SiteLayer


@dataclass(frozen=True)
class Stream:
    """Rows of one (site, layer).

    Attributes:
        positions: int64 [n], growing.
        blocks: the rows, [some, hidden_size] each, n in all; at least one.
        codec: of rows that came encoded; the blocks then hold their bytes.
    """

    positions: np.ndarray
    blocks: list[Tensor]
    codec: Codec | None = None


class RequestRows:
    """Blocks in any interleaving of streams and positions."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._blocks: dict[SiteLayer, list[tuple[np.ndarray, Tensor]]] = {}
        self._codecs: dict[SiteLayer, Codec | None] = {}

    def add(self, site: str, layer: int, positions: np.ndarray, rows: Tensor | EncodedRows) -> None:
        """Copy in a block; the caller may reuse both arguments.

        Raises:
            ValueError: shapes that do not fit, or other than the stream's so far.
        """
        codec = None
        if isinstance(rows, EncodedRows):
            codec, rows = rows.codec, rows.data
        if self._codecs.setdefault((site, layer), codec) != codec:
            raise ValueError(f"{site}.{layer}: rows come under two codecs")
        if rows.dim() != 2 or positions.shape != rows.shape[:1]:
            raise ValueError(
                f"{site}.{layer}: positions are {list(positions.shape)} and rows "
                f"{list(rows.shape)}; they are [n] and [n, hidden_size]"
            )
        blocks = self._blocks.setdefault((site, layer), [])
        if blocks and (blocks[0][1].shape[1], blocks[0][1].dtype) != (rows.shape[1], rows.dtype):
            raise ValueError(
                f"{site}.{layer}: rows are [n, {rows.shape[1]}] {rows.dtype}, after "
                f"[n, {blocks[0][1].shape[1]}] {blocks[0][1].dtype}"
            )
        copied = self._buffers.empty(tuple(rows.shape), rows.dtype)
        copy_rows(copied, rows)
        blocks.append((np.array(positions, np.int64), copied))

    def streams(self, num_positions: int) -> dict[SiteLayer, Stream]:
        """All streams, with the rows of positions below `num_positions`."""
        return {
            stream: _in_order(blocks, num_positions, self._codecs[stream])
            for stream, blocks in sorted(self._blocks.items())
        }


def _in_order(
    blocks: list[tuple[np.ndarray, Tensor]], num_positions: int, codec: Codec | None
) -> Stream:
    positions = np.concatenate([p for p, _ in blocks])
    growing = bool((positions[1:] > positions[:-1]).all())
    if growing and (not len(positions) or (positions[0] >= 0 and positions[-1] < num_positions)):
        return Stream(positions, joined([rows for _, rows in blocks]), codec)
    order = np.argsort(positions, kind="stable")
    ordered = positions[order]
    last_of_its_position = np.append(ordered[1:] != ordered[:-1], True)
    kept = order[last_of_its_position & (ordered >= 0) & (ordered < num_positions)]
    rows = torch.cat([rows for _, rows in blocks])
    return Stream(positions[kept], [rows[torch.from_numpy(kept)]], codec)
