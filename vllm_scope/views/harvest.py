"""A page of a harvest: its counts, its settings, and the figures of each stream.

Owns:  HarvestPage.
From:  harvests.manifest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_scope.views.document import View
from vllm_scope.views.parts import Part, cell, grid, heading, text

if TYPE_CHECKING:
    from vllm_scope.harvests.manifest import HarvestManifest

_STREAM = (
    "stream", "rows", "not finite", "mean norm", "sd", "least", "greatest", "norm of the mean",
    "variance in all", "median", "greatest of a dimension", "outlier values",
    "rows with one", "dimensions with most",
)  # fmt: skip


class HarvestPage(View):
    def __init__(self, manifest: HarvestManifest) -> None:
        self._manifest = manifest

    def heading(self) -> str:
        return f"Harvest of {self._manifest.dataset}"

    def parts(self) -> list[Part]:
        manifest, totals = self._manifest, self._manifest.totals
        counts = ", ".join(f"{count:,} {name}" for name, count in totals.items())
        streams = [_stream(name, figures) for name, figures in manifest.streams.items()]
        settings = [[name, json.dumps(value)] for name, value in manifest.settings.items()]
        runs = [
            [run.started, ", ".join(f"{name} {number}" for name, number in run.versions.items())]
            for run in manifest.runs
        ]
        state = "Complete" if manifest.complete else "Not complete"
        return [
            text(f"{state}: {counts}; {len(manifest.shards):,} shards."),
            heading("Rows"),
            text(
                "An outlier is a value whose absolute value is more than 6 times the root mean "
                "square of its row. A variance is that of one dimension over all rows, and "
                "“variance in all” is the sum over the dimensions. Rows with NaN or infinity are "
                "counted only in the column “not finite”."
            ),
            _table(_STREAM, streams),
            heading("Settings"),
            _table(("setting", "value"), settings, "words"),
            heading("Runs"),
            _table(("started", "versions"), runs, "words"),
        ]


def _stream(name: str, figures: dict[str, Any]) -> list[str]:
    norm, variance, outliers = figures["norm"], figures["variance"], figures["outliers"]
    most = outliers["dimensions"]
    numbers = [
        norm["mean"], norm["sd"], norm["min"], norm["max"], figures["norm_of_mean"],
        variance["total"], variance["median"], variance["max"],
    ]  # fmt: skip
    return [
        name,
        f"{figures['rows']:,}",
        f"{figures['rows_not_finite']:,}",
        *(f"{number:.4g}" for number in numbers),
        f"{outliers['values']:,}",
        f"{outliers['rows']:,}",
        ", ".join(f"{dimension} ({count:,})" for dimension, count in most.items()) or "none",
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> Part:
    cells = [list(map(cell, row[1:])) for row in rows]
    return grid([row[0] for row in rows], headings[1:], cells, (headings[0], ""), style=style)
