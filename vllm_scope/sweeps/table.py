"""The table with the values of a sweep, and with the names along its dimensions.

Owns:  SweepTable, and its files: Parquet with a row for each value, safetensors, or a page.
From:  plan, which fills the table.   To: the caller, views.heatmap.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import ConfigError, FileError, SpecError, checked_ending
from vllm_scope.views.heatmap import HeatMap

if TYPE_CHECKING:
    from vllm_scope.sweeps.plan import Cell

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class SweepTable:
    """The values of a sweep. A notebook shows the table as a picture.

    Attributes:
        values: float64 [num_prompts, num_layers, num_positions, num_heads]. If a cell edits whole
            rows, the table has no dimension of heads. If a cell edits all chosen positions, the
            table has no dimension of positions. A value is NaN if the prompt has no token at the
            position, or if the cell has not arrived yet or has failed.
        plain: float64 [num_prompts], the metric of each prompt without an edit.
        source: float64 [num_prompts], the metric of each source prompt. The numbers are NaN if the
            source is rows or a steering module.
        tokens: the texts of each prompt's tokens.
        layers, positions, heads: the names along the dimensions. `positions` or `heads` is None if
            the table does not have the dimension. A negative position counts from the prompt's end.
        metric, site, mode: names from the sweep. In path patching, the mode includes the receivers.
        errors: maps indices into `values` to the reasons why these cells failed.
    """

    values: Values
    plain: Values
    source: Values
    tokens: tuple[tuple[str, ...], ...]
    layers: tuple[int, ...]
    positions: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    metric: str
    site: str
    mode: str
    errors: dict[tuple[int, ...], str] = field(default_factory=dict)

    @staticmethod
    def empty(
        tokens: Sequence[Sequence[str]], layers: Sequence[int], positions: Sequence[int] | None,
        heads: Sequence[int] | None, metric: str, site: str, mode: str,
    ) -> SweepTable:  # fmt: skip
        """Make a table whose values are all NaN."""
        named = [layers, *(names for names in (positions, heads) if names is not None)]
        num = len(tokens)
        return SweepTable(
            np.full((num, *map(len, named)), np.nan), np.full(num, np.nan), np.full(num, np.nan),
            tuple(map(tuple, tokens)), tuple(layers),
            None if positions is None else tuple(positions),
            None if heads is None else tuple(heads), metric, site, mode,
        )  # fmt: skip

    @property
    def coords(self) -> dict[str, tuple[int, ...]]:
        """Maps the dimensions of `values`, in order, to the names along each dimension."""
        found: dict[str, tuple[int, ...]] = {
            "prompt": tuple(range(len(self.tokens))), "layer": self.layers,
        }  # fmt: skip
        found |= {} if self.positions is None else {"position": self.positions}
        return found | ({} if self.heads is None else {"head": self.heads})

    def index_of(self, cell: Cell) -> tuple[int, ...]:
        """The index of a cell in `values`. Raises KeyError if the table has no such cell."""
        names = (cell.prompt, cell.layer, cell.position, cell.head)
        return tuple(index[name] for index, name in zip(self._indices, names, strict=True) if index)

    @cached_property
    def _indices(self) -> tuple[dict[int | None, int], ...]:
        """For each dimension, a map of names to indices. If the table does not have the dimension,
        the map is empty."""
        named = (range(len(self.tokens)), self.layers, self.positions or (), self.heads or ())
        return tuple({name: i for i, name in enumerate(names)} for names in named)

    def normalised(self) -> SweepTable:
        """A table with the values (value - plain) / (source - plain). In this table, 0 is the value
        of the prompt, and 1 is the value of the source prompt.

        Raises:
            SpecError: the metric of a source prompt is NaN, or equals the metric of the prompt. The
                metric is NaN if the source is not prompts, or if the metric has not arrived.
        """
        if np.isnan(self.source).any():
            raise SpecError(
                "the table does not have the metric of each source prompt; give prompts as the "
                "source, or take the values as they are."
            )
        if len(same := np.flatnonzero(self.source == self.plain)):
            i = int(same[0])
            raise SpecError(
                f"the metric of prompts[{i}] is {self.plain[i]:g}, with its source prompt too, so "
                "that there is no range to scale to; leave this prompt out of the sweep, or take "
                "the values as they are."
            )
        shape = (-1, *(1,) * (self.values.ndim - 1))
        plain, source = self.plain.reshape(shape), self.source.reshape(shape)
        values = (self.values - plain) / (source - plain)
        ones = np.ones_like(self.plain)
        return replace(
            self, values=values, plain=0 * ones, source=ones, metric=f"normalised {self.metric}"
        )

    def to_xarray(self) -> Any:
        """The values as an xarray.DataArray, with the table's names.

        Raises:
            ConfigError: xarray is not installed.
        """
        try:
            from xarray import DataArray
        except ImportError as error:
            raise ConfigError(
                "to_xarray needs the package xarray; pip install xarray, or take `values` and "
                "`coords`."
            ) from error
        coords = {name: list(names) for name, names in self.coords.items()}
        attributes = {"site": self.site, "mode": self.mode}
        return DataArray(self.values, coords, list(coords), self.metric, attributes)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the table to a file. An existing file is replaced.

        The path's ending decides the format: ".parquet" (needs pyarrow), ".safetensors", or ".html"
        for a page with the picture.

        Raises:
            FileError: the path has another ending, or its folder does not exist.
            ConfigError: the path ends with ".parquet", and pyarrow is not installed.
        """
        target = Path(path)
        writers = {
            ".parquet": self._write_parquet, ".safetensors": self._write_safetensors,
            ".html": self.picture().save,
        }  # fmt: skip
        ending = checked_ending(path, *writers)
        if not target.parent.is_dir():
            raise FileError(f"{target.parent} is no folder; make it, or give another path.")
        writers[ending](target)

    def _metadata(self) -> dict[str, str]:
        body = {name: list(names) for name, names in self.coords.items()}
        told = {"metric": self.metric, "site": self.site, "mode": self.mode}
        errors = [[list(at), why] for at, why in self.errors.items()]
        return told | {
            "coords": json.dumps(body), "tokens": json.dumps(self.tokens),
            "errors": json.dumps(errors),
        }  # fmt: skip

    def _write_safetensors(self, path: Path) -> None:
        from safetensors.numpy import save

        arrays = {"values": self.values, "plain": self.plain, "source": self.source}
        flat = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
        # `save_file` would give the file the mode 0600, whatever the umask is.
        path.write_bytes(save(flat, self._metadata()))

    def _write_parquet(self, path: Path) -> None:
        # `files.arrow` has the same check, but loads torch, which a client need not have.
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ConfigError(
                "a .parquet file needs the package pyarrow; pip install 'vllm-scope[files]', or "
                "save a .safetensors file."
            ) from error
        coords = self.coords
        grid = np.meshgrid(*map(np.array, coords.values()), indexing="ij")
        columns = {name: each.ravel() for name, each in zip(coords, grid, strict=True)}
        prompts = columns["prompt"]
        if self.positions is not None:
            at = zip(prompts.tolist(), columns["position"].tolist(), strict=True)
            columns["token"] = [self._token(i, p) for i, p in at]
        columns |= {"value": self.values.ravel(), "plain": self.plain[prompts],
                    "source": self.source[prompts]}  # fmt: skip
        made = pa.table(columns)
        pq.write_table(made.replace_schema_metadata(self._metadata()), path)

    def _token(self, prompt: int, position: int) -> str | None:
        tokens = self.tokens[prompt]
        return tokens[position] if -len(tokens) <= position < len(tokens) else None

    def picture(self) -> HeatMap:
        """A heat map of the mean over the prompts that have a value.

        The rows are layers, and the columns are positions, or heads if the table has no positions.
        If the table has both positions and heads, the heat map has a row for each layer and head.
        If the table has neither positions nor heads, the heat map has one column.
        """
        counts = np.maximum((~np.isnan(self.values)).sum(0), 1)
        mean = np.nansum(self.values, 0) / counts
        mean[np.isnan(self.values).all(0)] = np.nan
        rows = [f"{layer}" for layer in self.layers]
        columns = [f"{head}" for head in self.heads or ()]
        titles = "layer", "head"
        if self.positions is not None:
            titles = "layer", "position"
            columns = [self._column(p) for p in self.positions]
            if self.heads is not None:
                mean = np.moveaxis(mean, 2, 1).reshape(-1, len(self.positions))
                named = itertools.product(self.layers, self.heads)
                rows = [f"{layer}.{head}" for layer, head in named]
                titles = "layer.head", "position"
        elif self.heads is None:
            mean, columns, titles = mean[:, None], ["all positions"], ("layer", "")
        num = len(self.tokens)
        of = f"{num} prompts, their mean" if num > 1 else "1 prompt"
        caption = f"{self.metric} after {self.mode} at {self.site}: {of}"
        middle = float(np.nanmean(self.plain)) if np.isfinite(self.plain).any() else 0.0
        return HeatMap(mean, tuple(rows), tuple(columns), titles, middle, caption)

    def _column(self, position: int) -> str:
        """The name of a position's column. The name includes the token at the position, if all
        prompts that have the position have the same token there."""
        found = {self._token(i, position) for i in range(len(self.tokens))} - {None}
        (token,) = found if len(found) == 1 else (None,)
        return f"{position}" if token is None else f"{position} {token}"

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    def __repr__(self) -> str:
        shape = ", ".join(f"{len(names)} {name}s" for name, names in self.coords.items())
        left = int(np.isnan(self.values).sum())
        return f"SweepTable({self.metric}: {shape}; {left} without a value)"
