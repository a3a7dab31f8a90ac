"""The features of a result, by action.

Owns:  SparseFeatures (as callers read them), Features (by name).
Runs:  in the front-end, and in every process that a result is pickled to.
From:  batch.sparse, scores.   To: result; server.encode.

Promise: a position whose features are all inactive is among `tokens`; a position whose features did
not arrive is not.
"""

from __future__ import annotations

import json
from functools import cached_property
from os import PathLike

import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.sparse import SparseRows
from vllm_scope.errors import checked_ending
from vllm_scope.request.read_features import check_feature
from vllm_scope.results.scores import Named, ScoreTable
from vllm_scope.results.snapshot import Snapshot


class SparseFeatures:
    """The features of one SAE at the positions of one completion, as a sparse matrix.

    Attributes:
        positions, indices, values: int64, int64 and float32 [num_values], CPU: the absolute
            position of a token, a feature's number, and its value there. They are in the order of
            positions; at each position, the strongest comes first.
        tokens: int64 [num_tokens], ascending: the positions that were encoded, with those that have
            no active feature.
        num_features: how many features the SAE has. None for a read with `indices` of an SAE that
            is not TopK.
        asked: the features that the read named (`indices`); None if it named none (`top_k`).

    `num_features` and `asked` are None if they come from a file that an earlier version wrote.
    """

    def __init__(self, rows: SparseRows, tokens: Tensor) -> None:
        self.tokens = tokens
        self.num_features, self.asked = rows.read.num_features, rows.read.asked
        # numpy works on this thread. torch would wake a thread for each core, for a request's few
        # rows.
        values, numbers = rows.values.numpy(), rows.indices.numpy()
        order = np.argsort(-values, axis=1, kind="stable")
        found, numbers = (np.take_along_axis(one, order, axis=1) for one in (values, numbers))
        kept = numbers >= 0
        self.positions = torch.from_numpy(np.repeat(tokens.numpy(), kept.sum(axis=1)))
        self.indices = torch.from_numpy(numbers[kept].astype(np.int64))
        self.values = torch.from_numpy(found[kept])

    def dense(self, index: int) -> Tensor:
        """float32 [num_tokens]: one feature at each of `tokens`; 0 if it was not delivered.

        If the read has `top_k`, a feature beyond the `top_k` strongest of a token is 0 here, like
        a feature that is not active. So is a value below the read's `threshold`.

        Raises:
            KeyError: the read named other features, or the SAE has no such feature.
        """
        check_feature(index, self.num_features, self.asked)
        found = torch.zeros(len(self.tokens))
        here = self.indices == index
        found[self._places[here]] = self.values[here]
        return found

    def top(self, position: int) -> list[tuple[int, float]]:
        """(index, value) of the features at a position, the strongest first.

        Raises:
            KeyError: the position was not encoded.
        """
        if position not in self.tokens:
            raise KeyError(f"position {position} has no features; see tokens.")
        first, last = torch.searchsorted(self.positions, torch.tensor([position, position + 1]))
        some = slice(int(first), int(last))
        return list(zip(self.indices[some].tolist(), self.values[some].tolist(), strict=True))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file. If the path ends in `.safetensors`, the file has the tensors `positions`,
        `indices`, `values` and `tokens`. If it ends in `.parquet`, the file has a table with a row
        for each value (`files.features`). Both have `metadata` as their metadata.

        Raises:
            FileError: the path has another ending.
            ConfigError: the path ends in `.parquet`, and pyarrow is missing.
        """
        if checked_ending(path, ".safetensors", ".parquet") == ".parquet":
            from vllm_scope.files.features import write_parquet

            write_parquet(self, path)
            return
        from safetensors.torch import save_file

        names = ("positions", "indices", "values", "tokens")
        tensors = {name: getattr(self, name).contiguous() for name in names}
        save_file(tensors, path, self.metadata)

    @property
    def metadata(self) -> dict[str, str]:
        """`num_features` and `asked` as JSON, each left out if it is None. A reader needs them to
        tell a feature that was not active from a feature that was not read."""
        found = {"num_features": self.num_features, "asked": self.asked}
        return {name: json.dumps(value) for name, value in found.items() if value is not None}

    @cached_property
    def _places(self) -> Tensor:
        """int64 [num_values]: for each value, the index of its position in `tokens`."""
        return torch.searchsorted(self.tokens, self.positions)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        width = "" if self.num_features is None else f" of {self.num_features:,} features"
        return f"SparseFeatures({len(self)} values at {len(self.tokens)} positions{width})"

    def _repr_html_(self) -> str:
        from vllm_scope.views.sparse import feature_list

        return feature_list(self)._repr_html_()


class Features(Named[SparseFeatures]):
    """Name of the action -> its features."""

    def __init__(self, table: ScoreTable, of: Snapshot) -> None:
        names = [name for name, one in table.features.items() if one.lens is None]
        super().__init__(names, table, of)

    def __getitem__(self, name: str) -> SparseFeatures:
        self._check(name, "features of this request are", "it has")
        rows, positions = self._table.sparse(name, self._of)
        return SparseFeatures(rows, torch.from_numpy(positions))
