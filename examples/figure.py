"""The figures: where a concept can be read, where a review can be steered, a monitor's values, and
where a gate opens.

From:  demo.py, after it has fitted the probes and steered; monitor.py; control.py.
To:    PNG files, and a page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

# Not pyplot, because pyplot keeps each figure until the figure is closed.
from matplotlib.figure import Figure

from examples.probes import LayerProbe
from examples.steering import SteeringFigures
from vllm_scope.views import TokenStrip, token_page


@dataclass(frozen=True)
class Mark:
    colour: str
    marker: str
    size: int


# The curves of two concepts meet at the AUROC 1. The larger mark is drawn first, so that it is
# visible around the smaller mark. The colours are two of Okabe and Ito's colours, which people with
# every kind of colour vision can distinguish.
MARKS: Final = (Mark("#0072b2", "o", 10), Mark("#d55e00", "s", 5))

STYLE: Final = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
NUM_COLUMNS: Final = 3


def write_figure(
    path: Path, probes: Mapping[str, Sequence[LayerProbe]], layers: Sequence[str], num_test: int
) -> None:
    """Curves of both AUROCs over the layers, for each concept in `probes`."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        axes = figure.add_subplot()
    for (name, of_concept), mark in zip(probes.items(), MARKS, strict=True):
        _draw_curves(axes, name, of_concept, mark)
    _draw_chance(axes, len(layers) - 1)
    axes.set_xticks(range(len(layers)), layers)
    axes.set_xlabel("residual stream after layer")
    axes.set_ylabel(f"AUROC on {num_test} held-out prompts")
    axes.set_ylim(0.4, 1.03)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    figure.suptitle("Where a linear probe finds each concept", weight="bold")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    figure.savefig(path, dpi=200)


def _draw_curves(axes: Axes, name: str, probes: Sequence[LayerProbe], mark: Mark) -> None:
    axes.plot(
        [probe.auroc_last for probe in probes],
        color=mark.colour,
        linewidth=2,
        marker=mark.marker,
        markersize=mark.size,
        label=f"{name}, at the last token",
    )
    axes.plot(
        [probe.auroc_every for probe in probes],
        color=mark.colour,
        linewidth=2,
        linestyle=":",
        label=f"{name}, at every token",
    )


def _draw_chance(axes: Axes, right: int) -> None:
    axes.axhline(0.5, color="0.6", linewidth=1, zorder=0)
    axes.annotate(
        "chance", (right, 0.5), (0, -14), textcoords="offset points", ha="right", color="0.4"
    )


def write_steering_figure(
    path: Path,
    by_layer: Mapping[int, Sequence[SteeringFigures]],
    scales: Sequence[float],
    num_reviews: int,
) -> None:
    """Draw one panel for each layer: the shares of reviews over the scale of the edit."""
    num_rows = len(by_layer) // NUM_COLUMNS
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 2 + 1.9 * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, NUM_COLUMNS, sharex=True, sharey=True, squeeze=False)
    for axes, (layer, figures) in zip(panels.flat, by_layer.items(), strict=True):
        _draw_steering(axes, scales, figures)
        axes.set_title(f"after layer {layer}", fontsize=11)
    # Not supxlabel, because it would overlap the legend.
    panels[-1, NUM_COLUMNS // 2].set_xlabel("scale of the sentiment's direction")
    figure.supylabel(f"share of {num_reviews} reviews", fontsize=11)
    figure.suptitle("Where adding the sentiment turns a review", weight="bold")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    figure.savefig(path, dpi=200)


def _draw_steering(axes: Axes, scales: Sequence[float], figures: Sequence[SteeringFigures]) -> None:
    both, whole = MARKS
    axes.plot(
        scales,
        [each.both for each in figures],
        color=both.colour,
        linewidth=2,
        marker=both.marker,
        markersize=5,
        label="turned, in whole sentences",
    )
    axes.plot(
        scales,
        [each.grammatical for each in figures],
        color=whole.colour,
        linewidth=2,
        linestyle=":",
        label="whole sentences",
    )
    axes.set_ylim(-0.05, 1.05)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)


def write_monitor_figure(
    path: Path,
    honest: Sequence[np.ndarray],
    lying: Sequence[np.ndarray],
    threshold: float,
    first: int = 2,
) -> None:
    """The monitor's value over the tokens of each statement, and the mean of each kind.

    Args:
        honest, lying: the values of each statement, float32 [num_tokens].
        first: index of the statement's first token in these values.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        axes = figure.add_subplot()
    tokens = np.arange(1 - first, 11)
    kinds = {"honest": honest, "lying": lying}
    for (name, of_kind), mark in zip(kinds.items(), MARKS, strict=True):
        values = np.full((len(of_kind), len(tokens)), np.nan)
        for row, curve in zip(values, of_kind, strict=True):
            row[: len(curve)] = curve[: len(row)]
        axes.plot(tokens, values.T, color=mark.colour, linewidth=0.6, alpha=0.2)
        axes.plot(
            tokens, np.nanmean(values, axis=0), color=mark.colour, linewidth=2.5,
            marker=mark.marker, markersize=5, label=f"{name}: mean of {len(of_kind)} speakers",
        )  # fmt: skip
    axes.axhline(threshold, color="0.3", linewidth=1, linestyle="--", label="threshold")
    axes.axvspan(tokens[0] - 0.5, 0.5, color="0.95", zorder=0)
    axes.set_xlim(tokens[0] - 0.5, tokens[-1] + 0.5)
    axes.set_xticks(tokens, [":", "quote", *map(str, tokens[first:])])
    axes.set_xlabel("generated token; 1 is the first token of the statement")
    axes.set_ylabel("value of the monitor")
    figure.suptitle("A monitor's value while a statement is said", weight="bold")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    figure.savefig(path, dpi=200)


def write_monitor_page(path: Path, strips: Mapping[str, Sequence[TokenStrip]]) -> None:
    """Answers token by token. `strips`: heading -> answers."""
    intro = [
        "Each box has a speaker's three statements, all false or all true, and below them what "
        "the model says next. The colour of a token is the monitor's value there.",
        "The verdict is at the first token whose value is above the threshold. With flag the "
        "answer goes on; with stop it ends one token later.",
        "Hover over a token for its value, or move to it with the tab key.",
    ]
    token_page("A monitor's value, token by token", strips, intro=intro).save(path)


@dataclass(frozen=True)
class Gated:
    """The gate at the rows of one kind of speakers, in the order of tokens. The first row is that
    of the prompt's last token. The other rows are those of generated tokens.

    Attributes:
        scores: for each speaker, float32 [num_rows]: the probe's score in the run without an edit.
        opened: for each speaker, bool [num_rows]: whether the gate was open in the gated run.
    """

    scores: Sequence[np.ndarray]
    opened: Sequence[np.ndarray]


def write_control_figure(
    path: Path,
    kinds: Mapping[str, Gated],
    tokens: Sequence[str],
    threshold: float,
    said: Mapping[str, Sequence[tuple[str, str]]],
) -> None:
    """Draw the scores of a gate, the rows where it opens, and the speakers' statements.

    Args:
        kinds: honest and lying speakers.
        tokens: names of the rows.
        said: heading -> pairs of an edit's name and a statement.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 7.2), layout="constrained")
        above, below, text = figure.subplots(3, height_ratios=[5, 2, 3])
    rows = np.arange(len(tokens))
    for i, ((name, kind), mark) in enumerate(zip(kinds.items(), MARKS, strict=True)):
        label = f"{len(kind.scores)} {name} speakers, and their mean"
        scores, opened = (np.stack([e[: len(rows)] for e in e]) for e in (kind.scores, kind.opened))
        above.plot(rows, scores.T, color=mark.colour, linewidth=0.6, alpha=0.2)
        above.plot(
            rows, scores.mean(0), color=mark.colour, linewidth=2.5, marker=mark.marker,
            markersize=5, label=label,
        )  # fmt: skip
        below.bar(rows + 0.4 * i - 0.2, opened.mean(0), width=0.4, color=mark.colour)
    above.axhline(threshold, color="0.3", linewidth=1, linestyle="--", label="threshold")
    above.set_ylabel("score, no edit")
    below.set_ylabel("gates open,\nwith the edit")
    below.set_ylim(0, 1)
    for axes in (above, below):
        axes.set_xlim(-0.5, rows[-1] + 0.5)
        axes.set_xticks(rows, tokens)
    below.set_xlabel(
        "token whose row the gate reads, before the next is generated (…: speakers differ)"
    )
    _write_said(text, said)
    figure.suptitle("The gate opens where a lie is due, and the edit turns the lie", weight="bold")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    figure.savefig(path, dpi=150)


def _write_said(axes: Axes, said: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    axes.axis("off")
    lines = [line for heading, answers in said.items() for line in [(heading, None), *answers]]
    for i, (name, statement) in enumerate(lines):
        y = 1 - (i + 0.5) / len(lines)
        axes.text(0, y, name, weight="normal" if statement else "bold", fontsize=10, va="center")
        if statement:
            axes.text(0.25, y, statement, fontsize=10, va="center")
