"""The features of a result, by action.

Owns:  SparseFeatures (the features of one action), Features (all SparseFeatures, by name).
Runs:  in the front-end, and in every process that unpickles a result.
From:  batch.sparse, scores.   To: result; server.encode.

Promise: `tokens` has each position whose features arrived, even if no feature is active there.
"""

from __future__ import annotations

import json
from functools import cached_property
from os import PathLike
from pathlib import Path

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
        positions: int64 [num_values], CPU, ascending: the absolute position of each value.
        indices: int64 [num_values], CPU: the feature number of each value.
        values: float32 [num_values], CPU. At each position, the largest value comes first.
        tokens: int64 [num_tokens], ascending: all positions whose features arrived. Positions
            without an active feature are in `tokens` too.
        num_features: the SAE's number of features. None if the read has `indices` and the SAE is
            not a TopK SAE.
        asked: the read's `indices`. None if the read has `top_k` instead.

    `num_features` and `asked` are None if an earlier version of this package wrote the file, or
    sent the answer, with the features.
    """

    def __init__(self, rows: SparseRows, tokens: Tensor) -> None:
        self.tokens = tokens
        self.num_features, self.asked = rows.read.num_features, rows.read.asked
        # numpy sorts on this thread alone, but torch would wake a thread for each core.
        values, numbers = rows.values.numpy(), rows.indices.numpy()
        order = np.argsort(-values, axis=1, kind="stable")
        found, numbers = (np.take_along_axis(one, order, axis=1) for one in (values, numbers))
        kept = numbers >= 0
        self.positions = torch.from_numpy(np.repeat(tokens.numpy(), kept.sum(axis=1)))
        self.indices = torch.from_numpy(numbers[kept].astype(np.int64))
        self.values = torch.from_numpy(found[kept])

    def dense(self, index: int) -> Tensor:
        """The value of one feature at each position in `tokens`, float32 [num_tokens].

        A value is 0 in three cases: the feature is not active, the value is below the read's
        `threshold`, or `top_k` other features of the token are stronger.

        Raises:
            KeyError: the read named other features, or the SAE has no such feature.
        """
        check_feature(index, self.num_features, self.asked)
        found = torch.zeros(len(self.tokens))
        here = self.indices == index
        found[self._places[here]] = self.values[here]
        return found

    def top(self, position: int) -> list[tuple[int, float]]:
        """(index, value) of each feature at a position, the strongest feature first.

        Raises:
            KeyError: `tokens` does not have this position.
        """
        if position not in self.tokens:
            raise KeyError(f"position {position} has no features; see tokens.")
        first, last = torch.searchsorted(self.positions, torch.tensor([position, position + 1]))
        some = slice(int(first), int(last))
        return list(zip(self.indices[some].tolist(), self.values[some].tolist(), strict=True))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file. If the path ends in `.safetensors`, the file has the tensors `positions`,
        `indices`, `values` and `tokens`. If the path ends in `.parquet`, the file has a table with
        a row for each value, and a row for each token without values (`files.features`). The file
        also has the contents of `metadata`.

        Raises:
            FileError: the path ends in neither `.safetensors` nor `.parquet`.
            ConfigError: the path ends in `.parquet`, and pyarrow is missing.
        """
        if checked_ending(path, ".safetensors", ".parquet") == ".parquet":
            from vllm_scope.files.features import write_parquet

            write_parquet(self, path)
            return
        from safetensors.torch import save

        names = ("positions", "indices", "values", "tokens")
        tensors = {name: getattr(self, name).contiguous() for name in names}
        # `save_file` would give the file the mode 0600, whatever the umask is.
        Path(path).write_bytes(save(tensors, self.metadata))

    @property
    def metadata(self) -> dict[str, str]:
        """`num_features` and `asked` as JSON. A field that is None is left out. With these fields a
        reader can distinguish a feature that was not active from a feature that was not read."""
        found = {"num_features": self.num_features, "asked": self.asked}
        return {name: json.dumps(value) for name, value in found.items() if value is not None}

    @cached_property
    def _places(self) -> Tensor:
        """For each value, the index in `tokens` of the value's position, int64 [num_values]."""
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
    """The SparseFeatures of each `Features` action, by the name of the action."""

    def __init__(self, table: ScoreTable, of: Snapshot) -> None:
        names = [name for name, one in table.features.items() if one.lens is None]
        super().__init__(names, table, of)

    def __getitem__(self, name: str) -> SparseFeatures:
        self._check(name, "features of this request are", "it has")
        rows, positions = self._table.sparse(name, self._of)
        return SparseFeatures(rows, torch.from_numpy(positions))
