"""Writes features as a sparse matrix in Parquet.

Owns:  `write_parquet` (writes one result), `export_features` (writes all captured requests).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch

from vllm_scope.errors import shown
from vllm_scope.files.arrow import arrow
from vllm_scope.files.feature_rows import SUFFIX
from vllm_scope.files.publish import LocalPublisher, whole_writes

if TYPE_CHECKING:
    from pyarrow import Table

    from vllm_scope.files.reader import Capture
    from vllm_scope.results.features import SparseFeatures


def write_parquet(found: SparseFeatures, path: str | os.PathLike[str]) -> None:
    """Write one result's features and `metadata`. Raises ConfigError if pyarrow is missing.

    The columns are `position`, `index` and `value`, as in `export_features`.
    """
    arrow()
    import pyarrow.parquet as pq

    pq.write_table(_table(found).replace_schema_metadata(found.metadata), os.fspath(path))


def export_features(capture: Capture, path: str | Path, name: str) -> int:
    """Write the features of all requests as a sparse matrix in Parquet. Returns the number of rows.

    A row is one active feature of one token. The columns are `request` (the uid in the manifest),
    `position`, `token_id`, `index` and `value`. The requests are in the order of `capture`. The
    rows of a request are sorted by position. At one position, the row of the strongest feature
    comes first. A token without an active feature has one row whose `index` and `value` are null.

    Args:
        name: the name of the features, `Features(..., name=...)`. Features without a name have the
            name of their SAE.

    Raises:
        KeyError: no request has features with this name.
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
            table = _table(request.features(name))
            # The dtypes are given, because pyarrow and torch cannot find them if a request has no
            # tokens.
            uid = pa.array([request.manifest.uid] * len(table), pa.string())
            positions = torch.tensor(table["position"].to_pylist(), dtype=torch.int64)
            tokens = request.tokens_at(positions)
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

    with closing(LocalPublisher(path.parent)) as publisher:
        publisher.publish({path.name: write})
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
