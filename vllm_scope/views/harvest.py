"""A page of a harvest: its counts, its settings, and the figures of each stream.

Owns:  HarvestPage.
From:  a manifest, `vllm_scope.harvests.manifest`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_scope.views.document import View, safe

if TYPE_CHECKING:
    from vllm_scope.harvests.manifest import HarvestManifest

_STREAM = (
    "stream", "rows", "not finite", "mean norm", "sd", "least", "greatest", "norm of the mean",
    "variance in all", "median", "greatest of a dimension", "outlier values",
    "rows with one", "dimensions with most",
)  # fmt: skip
#: The tables are wider than the text, and scroll.
_STYLE = """<style>
.vllm-scope .wide { overflow-x: auto; }
.vllm-scope table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.vllm-scope :is(th, td) { padding: .2rem .7rem; border-bottom: 1px solid var(--line);
                          text-align: right; vertical-align: top; }
.vllm-scope :is(th, td):first-child { text-align: left; }
.vllm-scope .left :is(th, td) { text-align: left; }
</style>"""


class HarvestPage(View):
    def __init__(self, manifest: HarvestManifest) -> None:
        self._manifest = manifest

    def heading(self) -> str:
        return f"Harvest of {self._manifest.dataset}"

    def body(self) -> str:
        manifest, totals = self._manifest, self._manifest.totals
        counts = ", ".join(f"{count:,} {name}" for name, count in totals.items())
        streams = [_stream(name, figures) for name, figures in manifest.streams.items()]
        settings = [[name, json.dumps(value)] for name, value in manifest.settings.items()]
        runs = [
            [run.started, ", ".join(f"{name} {number}" for name, number in run.versions.items())]
            for run in manifest.runs
        ]
        return "\n".join(
            [
                _STYLE,
                f"<p>{'Complete' if manifest.complete else 'Not complete'}: {safe(counts)}; "
                f"{len(manifest.shards):,} shards.</p>",
                "<h2>Rows</h2>",
                "<p>An outlier is a value of more than 6 times the root mean square of its row. "
                "Variances are of one dimension over all rows. Rows with NaN or infinity are in no "
                "other figure.</p>",
                _table(_STREAM, streams),
                "<h2>Settings</h2>",
                _table(("setting", "value"), settings, left=True),
                "<h2>Runs</h2>",
                _table(("started", "versions"), runs, left=True),
            ]
        )


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


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: bool = False) -> str:
    lines = ["".join(f"<th>{safe(heading)}</th>" for heading in headings)]
    lines += ["".join(f"<td>{safe(text)}</td>" for text in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="wide{" left" if left else ""}"><table>{body}</table></div>'
