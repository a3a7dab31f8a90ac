"""Displays of `watch`, which show a streaming answer as coloured tokens or as plain lines.

`Coloured` is the display on a terminal. `Lines` is the display on anything else (a pipe, a file, a
terminal without colours), and writes no control characters except tabs and newlines.

Each display has the methods `add(chunk)` and `end()`.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_scope.cli.remote import printable

if TYPE_CHECKING:
    from vllm_scope.client import Chunk

#: The probabilities at which one colour changes to the next colour, from blue to red.
_EDGES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
_STYLES = (
    "white on color(25)", "black on color(74)", "black on color(153)", "",
    "black on color(223)", "black on color(216)", "white on color(124)",
)  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """Maps a probe's score to a colour, by sigmoid(slope * score + offset).

    Attributes:
        calibrated: True if the sigmoid is the probability of the probe's concept. The legend then
            shows probabilities, otherwise scores.
    """

    name: str
    slope: float
    offset: float
    calibrated: bool

    def level(self, score: float) -> int | None:
        """The index of a score's colour, from 0 to 6, or None if the score is NaN."""
        if math.isnan(score):
            return None
        logits = [_logit(edge) for edge in _EDGES]
        return bisect(logits, self.slope * score + self.offset)

    def style(self, score: float) -> str:
        level = self.level(score)
        return "" if level is None else _STYLES[level]

    def labels(self) -> list[str]:
        """For each colour, the text of its range of probabilities or scores."""
        edges = [f"{edge:.0%}".removesuffix("%") for edge in _EDGES]
        unit = " %"
        if not self.calibrated:
            edges = [f"{(_logit(edge) - self.offset) / self.slope:+.1f}" for edge in _EDGES]
            unit = ""
        inner = [f"{low} to {high}{unit}" for low, high in pairwise(edges)]
        return [f"< {edges[0]}{unit}", *inner, f"> {edges[-1]}{unit}"]

    def legend(self) -> Text:
        what = "probability" if self.calibrated else "score"
        legend = Text(f"{what} of {self.name}: ")
        for label, style in zip(self.labels(), _STYLES, strict=True):
            legend.append(f" {label} ", style)
        return legend


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


class Coloured:
    """Shows tokens as they arrive, each token in the colour of the first probe's score."""

    def __init__(self, console: Console, scales: Sequence[Scale], prompt: str) -> None:
        self._console, self._scales = console, scales
        self._scores: dict[str, list[float]] = {scale.name: [] for scale in scales}
        self._print(scales[0].legend().append("\n\n"))
        self._print(Text(printable(prompt), "dim"))

    def _print(self, text: Text) -> None:
        # Long lines are wrapped by the terminal and not by rich, so that copied text has no added
        # line ends.
        self._console.print(text, end="", soft_wrap=True)

    def add(self, chunk: Chunk) -> None:
        first = self._scales[0]
        for token in chunk.tokens:
            score = token.scores.get(first.name, math.nan)
            self._print(Text(printable(token.text), first.style(score)))
            for name, scores in self._scores.items():
                scores.append(token.scores.get(name, math.nan))

    def end(self) -> None:
        self._print(Text("\n\n"))
        table = Table("probe", "mean", "highest", box=None, pad_edge=False)
        for name, scores in self._scores.items():
            known = [score for score in scores if not math.isnan(score)]
            shown = [f"{np.mean(known):+.2f}", f"{max(known):+.2f}"] if known else ["-", "-"]
            table.add_row(name, *shown)
        self._console.print(table)


class Lines:
    """Shows a line for each token: the token's position, the scores of the token's row, and the
    text as JSON."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._file, self._names = console.file, names
        self._write("position", names, "token")

    def _write(self, position: str, cells: Sequence[str], token: str) -> None:
        self._file.write("\t".join((position, *cells, token)) + "\n")
        self._file.flush()

    def add(self, chunk: Chunk) -> None:
        for token in chunk.tokens:
            scores = [token.scores.get(name, math.nan) for name in self._names]
            cells = ["" if math.isnan(score) else f"{score:+.3f}" for score in scores]
            self._write(str(token.position), cells, _quoted(token.text))

    def end(self) -> None:
        """Does nothing, because each line was written when its token arrived."""


def _quoted(text: str) -> str:
    """The text as a JSON string without control characters."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in quoted)
