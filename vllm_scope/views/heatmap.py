"""The heat map: a number for each row and column of a grid, coloured.

Owns:  HeatMap.
From:  sweeps.table.   To: a notebook, a file.

Colour is never the only sign: each cell has its number as text. The grid is an HTML table with
headers, which screen readers read row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_scope.views.document import View, safe

_STYLE: Final = """<style>
.vllm-scope .grid { overflow-x: auto; }
.vllm-scope .grid table { border-collapse: separate; border-spacing: 2px; font-size: .8125rem; }
.vllm-scope .grid td { min-width: 3.2em; padding: .2em .4em; text-align: right; color: var(--ink);
  font-variant-numeric: tabular-nums; print-color-adjust: exact; }
.vllm-scope .grid th { padding: .2em .4em; font-weight: 500; color: var(--muted); }
</style>"""


@dataclass(frozen=True, eq=False, repr=False)
class HeatMap(View):
    """A grid of numbers in colour.

    Attributes:
        values: float64 [num_rows, num_columns]; NaN: the cell is empty.
        rows, columns: a name for each.
        titles: of the rows, of the columns.
        middle: the number that has no colour.
        caption: above the grid.
    """

    values: NDArray[np.float64]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    titles: tuple[str, str]
    middle: float
    caption: str

    @property
    def spread(self) -> float:
        """Distance from the middle at which a colour is strongest: that of the farthest number."""
        finite = self.values[np.isfinite(self.values)]
        return float(np.abs(finite - self.middle).max(initial=0)) or 1.0

    def body(self) -> str:
        names = "".join(f'<th scope="col">{safe(name)}</th>' for name in self.columns)
        down, across = (safe(title) if title else "" for title in self.titles)
        lines = "\n".join(map(self._row, self.rows, self.values))
        low, high = f"{self.middle - self.spread:.3g}", f"{self.middle + self.spread:.3g}"
        return f"""{_STYLE}
<p class="legend"><span>{low}<i class="scale"></i>{high}: the middle, {self.middle:.4g}, is without
an edit</span></p>
<figure><figcaption>{safe(self.caption)}</figcaption>
<div class="grid" tabindex="0" role="group" aria-label="{safe(self.caption)}"><table>
<thead><tr><td></td><th scope="colgroup" colspan="{len(self.columns)}">{across}</th></tr>
<tr><th scope="col">{down}</th>{names}</tr></thead>
<tbody>
{lines}
</tbody></table></div></figure>"""

    def heading(self) -> str:
        return self.caption

    def _row(self, name: str, values: NDArray[np.float64]) -> str:
        return f'<tr><th scope="row">{safe(name)}</th>{"".join(map(self._cell, values))}</tr>'

    def _cell(self, value: float) -> str:
        if not np.isfinite(value):
            return f"<td>{'' if np.isnan(value) else value}</td>"
        part = np.clip((value - self.middle) / self.spread, -1, 1)
        return f'<td class="scored" style="--p:{part:.3f}">{value:.3g}</td>'

    def __repr__(self) -> str:
        return f"HeatMap({len(self.rows)} rows, {len(self.columns)} columns)"
