"""Features in files: as the rows of a stream, and as a sparse matrix in Parquet.

Owns:  `stored_features` and `SUFFIX` (how a sink's files hold them), `read_features`,
       `write_parquet`, `export_features`.
Runs:  wherever rows are written; anywhere for the rest.

In a sink's file the features called NAME are the stream `NAME.features`. Its rows are float32 [n,
2 * places]: first the features' numbers, with -1 in a place without a feature, then their values.
float32 holds every whole number up to 2^24 = 16,777,216.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from vllm_scope.batch.sparse import SparseRows
from vllm_scope.codecs import make_codec
from vllm_scope.codecs.packed import EncodedRows, Packing
from vllm_scope.errors import shown
from vllm_scope.files.export import arrow
from vllm_scope.files.publish import LocalPublisher, whole_writes
from vllm_scope.results.features import SparseFeatures

if TYPE_CHECKING:
    from pyarrow import Table

    from vllm_scope.files.captured import CapturedRequest
    from vllm_scope.files.reader import Capture

#: What follows the name of the features in the name of their stream.
SUFFIX = ".features"


def stored_features(indices: Tensor, values: Tensor) -> EncodedRows:
    """Features as rows that a file keeps as they are, whatever the codec of other rows.

    Args:
        indices: int32 [n, places]; -1 in a place without a feature.
        values: float32 [n, places].
    """
    rows = torch.cat([indices.float(), values], dim=1)
    packing = Packing(make_codec("none", rows.shape[1], torch.float32))
    return EncodedRows(packing.codec, packing.pack(rows))


def read_features(request: CapturedRequest, name: str) -> SparseFeatures:
    """The features of one request by their name. Raises KeyError, FileError."""
    streams = [stream for stream in request.keys() if stream[0] == name + SUFFIX]
    if len(streams) != 1:
        known = [site.removesuffix(SUFFIX) for site, _ in request.keys() if site.endswith(SUFFIX)]
        raise KeyError(
            f"no features called {shown(name)} were captured; captured are "
            f"{', '.join(known) or 'none'}"
        )
    rows = request[streams[0]]
    places = rows.shape[1] // 2
    indices = rows[:, :places].to(torch.int32)
    return SparseFeatures(SparseRows(indices, rows[:, places:]), request.positions(*streams[0]))


def write_parquet(found: SparseFeatures, path: str | os.PathLike[str]) -> None:
    """Write one result: the columns `position`, `index` and `value`, as `export_features` has
    them. Raises ConfigError if pyarrow is missing."""
    arrow()
    import pyarrow.parquet as pq

    pq.write_table(_table(found), os.fspath(path))


def export_features(capture: Capture, path: str | Path, name: str) -> int:
    """Write the features of all requests as a sparse matrix in Parquet. Returns the number of rows.

    A row is one active feature of one token: `request` (the uid of its manifest), `position`,
    `token_id`, `index` and `value`. They are in the order of requests and positions; in one
    position the strongest comes first. A token without an active feature has one row whose `index`
    and `value` are null.

    Args:
        name: of the features, as `Features(..., name=...)` has it; without it, the SAE's name.

    Raises:
        KeyError: no request has them.
        FileError: the file cannot be written, or a captured file is damaged.
        ConfigError: pyarrow is missing.
    """
    pa = arrow()
    import pyarrow.parquet as pq

    requests = [one for one in capture if any(site == name + SUFFIX for site, _ in one.keys())]
    if not requests:
        raise KeyError(f"no features called {shown(name)} were captured in any request")
    path, num_rows = Path(path), 0

    def tables() -> Iterator[Table]:
        for request in requests:
            table = _table(read_features(request, name))
            uid = pa.array([request.manifest.uid] * len(table))
            tokens = request.token_ids[torch.tensor(table["position"].to_pylist())]
            yield table.add_column(0, "request", uid).add_column(
                2, "token_id", pa.array(tokens.numpy())
            )

    def write(file: BinaryIO) -> None:
        nonlocal num_rows
        every = tables()
        first = next(every)
        with (
            whole_writes(file) as whole,
            pq.ParquetWriter(pa.PythonFile(whole, "w"), first.schema) as out,
        ):
            for table in (first, *every):
                out.write_table(table)
                num_rows += len(table)

    publisher = LocalPublisher(path.parent)
    try:
        publisher.publish({path.name: write})
    finally:
        publisher.close()
    return num_rows


def _table(found: SparseFeatures) -> Table:
    pa = arrow()
    without = found.tokens[~torch.isin(found.tokens, found.positions)]
    positions = torch.cat([found.positions, without])
    order = positions.argsort(stable=True)
    empty = (torch.arange(len(positions)) >= len(found.positions))[order].numpy()
    columns = {"position": pa.array(positions[order].numpy())}
    for name, numbers in (("index", found.indices), ("value", found.values)):
        padded = torch.cat([numbers, numbers.new_zeros(len(without))])[order]
        columns[name] = pa.array(padded.numpy(), mask=empty)
    return pa.table(columns)
