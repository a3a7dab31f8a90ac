"""The figure of features: how often and how strongly they are active, and tokens in context.

From:  features.py, which has the table.   To: a PNG file.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from examples.figure import MARKS, STYLE
from vllm_scope.saes.max_activating import MaxActivating, Strong

#: How many named features, how many other features, and how many tokens of each are shown.
NUM_NAMED, NUM_OTHER, NUM_TOKENS = 5, 3, 2
#: The size of the font in points, the file's pixels per inch, and the width of a character of this
#: font in points, which is 11 pixels.
_SIZE: Final = 8.5
_DPI: Final = 150
_CHARACTER: Final = 11 * 72 / _DPI
_INCHES: Final = (8.0, 7.4)


def write_features_figure(
    path: Path, table: MaxActivating, names: Mapping[int, str], decode: Callable[[int], str]
) -> None:
    """Draw a point for each feature. Below, write strong tokens of some features in context."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=_INCHES)
        above = figure.add_axes((0.1, 0.62, 0.87, 0.31))
        below = figure.add_axes((0.02, 0.01, 0.96, 0.52))
    active = np.flatnonzero(table.num_active)
    named = np.isin(active, list(names))
    largest = np.array([table.top(int(i))[0].value for i in active])
    for chosen, mark, label in (
        (~named, MARKS[0], "other features"),
        (named, MARKS[1], "features of a country"),
    ):
        above.scatter(
            100 * table.density[active[chosen]], largest[chosen], s=18, color=mark.colour,
            marker=mark.marker, label=f"{chosen.sum()} {label}", alpha=0.75,
        )  # fmt: skip
    above.set_xscale("log")
    above.set_xlabel("% of tokens at which the feature is active")
    above.set_ylabel("largest value")
    above.legend(frameon=False, fontsize=10)
    others = [int(i) for i in active[~named][np.argsort(-largest[~named])]]
    shown = [*list(names)[:NUM_NAMED], *others[:NUM_OTHER]]
    _write_contexts(below, table, shown, names, decode)
    figure.suptitle("Features of the toy world's SAE, and their strongest tokens", weight="bold")
    figure.savefig(path, dpi=_DPI)


def _write_contexts(
    axes: Axes, table: MaxActivating, shown: list[int], names: Mapping[int, str],
    decode: Callable[[int], str],
) -> None:  # fmt: skip
    axes.axis("off")
    width = 72 * _INCHES[0] * 0.96 / _CHARACTER
    lines = len(shown) * NUM_TOKENS
    axes.set_xlim(0, width)
    axes.set_ylim(lines, 0)
    for i, index in enumerate(shown):
        top = table.top(index)
        axes.text(
            0, NUM_TOKENS * i + 0.5, f"{index} {names.get(index, '')}", fontsize=_SIZE,
            weight="bold", va="center",
        )  # fmt: skip
        # Contexts that differ, the strongest first.
        distinct: dict[bytes, Strong] = {}
        for one in top:
            distinct.setdefault(one.tokens.tobytes(), one)
        for j, one in enumerate(list(distinct.values())[:NUM_TOKENS]):
            y = NUM_TOKENS * i + j + 0.5
            axes.text(16, y, f"{one.value:5.1f}", fontsize=_SIZE, va="center", family="monospace")
            _write_tokens(axes, one, 23, y, int(width) - 23, top[0].value, decode)


def _write_tokens(
    axes: Axes, one: Strong, x: float, y: float, room: int, largest: float,
    decode: Callable[[int], str],
) -> None:  # fmt: skip
    texts = [decode(token).replace("\n", "⏎") for token in one.tokens.tolist()]
    first, last = _that_fit([len(text) for text in texts], one.at, room)
    for i in range(first, last):
        share = float(np.nan_to_num(one.values[i])) / largest
        if share > 0:
            size = len(texts[i])
            axes.add_patch(
                Rectangle((x, y - 0.42), size, 0.84, color=MARKS[1].colour, alpha=0.65 * share)
            )
        weight = "bold" if i == one.at else "normal"
        axes.text(
            x, y, texts[i], fontsize=_SIZE, va="center", family="monospace", weight=weight,
            parse_math=False,
        )  # fmt: skip
        x += len(texts[i])


def _that_fit(sizes: list[int], at: int, room: int) -> tuple[int, int]:
    """The largest range of tokens around `at` with at most `room` characters. If there are enough
    tokens, the part before `at` has about twice as many characters as the part after `at`."""
    first, last = at, at + 1
    while True:
        before = sum(sizes[first:at]) <= 2 * sum(sizes[at + 1 : last])
        grown = (first - 1, last) if (before and first) or last == len(sizes) else (first, last + 1)
        if grown[0] < 0 or sum(sizes[slice(*grown)]) > room:
            return first, last
        first, last = grown
