"""The heat map, which is a grid of numbers with a colour for each cell.

Owns:  HeatMap.
From:  sweeps.table.   To: a notebook, a file.

Each cell shows its number as text too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_scope.views.document import View
from vllm_scope.views.parts import Part, cell, colour, grid, legend


@dataclass(frozen=True, eq=False, repr=False)
class HeatMap(View):
    """A grid of numbers in colour.

    Attributes:
        values: float64 [num_rows, num_columns]. If a value is NaN, the cell is empty.
        rows, columns: the name of each row and of each column.
        titles: the title of the rows, and the title of the columns.
        middle: the number at the middle of the colour scale.
        caption: the text above the grid.
    """

    values: NDArray[np.float64]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    titles: tuple[str, str]
    middle: float
    caption: str

    @property
    def spread(self) -> float:
        """The largest distance of a finite number from the middle, or 1 if there is no distance.
        This distance has the strongest colour."""
        finite = self.values[np.isfinite(self.values)]
        return float(np.abs(finite - self.middle).max(initial=0)) or 1.0

    def parts(self) -> list[Part]:
        low, high = f"{self.middle - self.spread:.3g}", f"{self.middle + self.spread:.3g}"
        note = f"the middle, {self.middle:.4g}, is the value without an edit"
        cells = [[self._cell(value) for value in row] for row in self.values.tolist()]
        return [
            legend(low, high, note),
            grid(self.rows, self.columns, cells, self.titles, self.caption),
        ]

    def heading(self) -> str:
        return self.caption

    def _cell(self, value: float) -> Part | None:
        if math.isnan(value):
            return None
        part = colour(value, self.middle, self.spread) if math.isfinite(value) else None
        return cell(f"{value:.3g}", part)

    def __repr__(self) -> str:
        return f"HeatMap({len(self.rows)} rows, {len(self.columns)} columns)"
