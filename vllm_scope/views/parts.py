"""The parts of views, as JSON. scope.js and static.py draw the parts.

Owns:  the fields of each kind of part, and `visible`.
To:    every view; static.py and scope.js.

Promise: a part never contains NaN, infinity, or a control character other than the newline. Python
code makes all texts and numbers that are shown. Therefore scope.js and static.py show the same
texts and numbers, except that static.py shows only the caption of a histogram.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

#: A part of a view, an item of a strip, or a cell of a grid.
Part = dict[str, Any]


def visible(text: str) -> str:
    """The text with a visible sign, such as `⏎`, for each character that is not printable.

    A line break follows each `⏎`. An empty text becomes `∅`.
    """
    shown = (c if c.isprintable() else "⏎\n" if c == "\n" else _escaped(c) for c in text)
    return "".join(shown) or "∅"


def line(text: str) -> str:
    """The text as `visible` returns it, but without line breaks."""
    return visible(text).replace("\n", "")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def colour(value: float, middle: float, spread: float) -> float | None:
    """The place of a value on the colour scale from -1 (low) to 1 (high). For NaN, the place is
    None.

    Args:
        spread: the distance from the middle at which the colour is strongest.
    """
    return None if math.isnan(value) else round(min(max((value - middle) / spread, -1), 1), 3)


def text(words: str) -> Part:
    """A paragraph."""
    return {"kind": "text", "text": visible(words)}


def heading(words: str) -> Part:
    return {"kind": "heading", "text": line(words)}


def legend(
    low: str, high: str, note: str, marks: Iterable[tuple[str, tuple[str, ...]]] = (),
    up: bool = False,
) -> Part:  # fmt: skip
    """A legend, which explains colours and marks.

    Args:
        low, high: the texts at the ends of the scale.
        marks: pairs of a text and the marks that the text explains.
        up: True if the scale has only a high side, and begins at the colour of the middle.
    """
    shown = [{"text": line(words), "marks": list(names)} for words, names in marks]
    return {"kind": "legend", "low": low, "high": high, "note": note, "marks": shown, "up": up}


def item(words: str, part: float | None, said: str, marks: Iterable[str] = ()) -> Part:
    """A token of a strip.

    Args:
        part: the token's place on the colour scale from -1 to 1. None if the token has no colour.
        said: the token's numbers, as text.
        marks: the names of the token's marks, such as "above", "unscored", "verdict" and "differs".
    """
    return {"text": visible(words), "part": part, "said": line(said), "marks": list(marks)}


def strip(items: Sequence[Part], caption: str = "") -> Part:
    return {"kind": "strip", "caption": line(caption) if caption else "", "items": list(items)}


def cell(words: str, part: float | None = None, more: Iterable[tuple[str, float]] = ()) -> Part:
    """A cell of a grid.

    Args:
        more: the lines that the view shows if the reader chooses the cell. A line is a pair of a
            text and the length of a bar, from 0 to 1.
    """
    lines = [{"text": line(told), "part": round(length, 3)} for told, length in more]
    return {"text": line(words), "part": part} | ({"more": lines} if lines else {})


def grid(
    rows: Iterable[str], columns: Iterable[str], cells: Iterable[Sequence[Part | None]],
    titles: tuple[str, str] = ("", ""), caption: str = "", style: str = "",
) -> Part:  # fmt: skip
    """A table with headers.

    Args:
        cells: the cells of each row. None is an empty cell.
        titles: the title of the rows, and the title of the columns. A title can be empty.
        style: "words" for cells with text; "tight" for small cells that show only a colour.
    """
    return {
        "kind": "grid", "caption": line(caption) if caption else "",
        "titles": [line(title) if title else "" for title in titles],
        "rows": list(map(line, rows)), "columns": list(map(line, columns)),
        "cells": list(map(list, cells)), "words": style == "words", "tight": style == "tight",
    }  # fmt: skip


def section(title: str, name: str, facts: str, parts: Sequence[Part], id: str, open: bool) -> Part:
    """A section that the reader can open and close. A section has a line of facts, and parts below
    this line."""
    return {
        "kind": "section", "title": line(title), "name": line(name) if name else "",
        "facts": line(facts), "parts": list(parts), "id": id, "open": open,
    }  # fmt: skip


def bar(height: float, said: str, above: float = 1.0) -> Part:
    """A bar of a histogram.

    Args:
        height: the height of the bar, from 0 to 1. Even the smallest height above 0 is visible.
        said: the meaning of the bar, as text.
        above: the share of the bar, from 0 to 1, that has the colour of values above a threshold.
    """
    part = max(round(height, 4), 1e-4) if height > 0 else 0
    return {"part": part, "said": line(said), "above": round(above, 3)}


def bars(
    each: Sequence[Part], said: str, caption: str, mark: tuple[int, str] | None = None
) -> Part:
    """A histogram.

    Args:
        said: the meaning of the histogram, for a screen reader.
        mark: a line in front of one bar: (index of the bar, meaning of the line). None: no line.
    """
    shown = {"at": mark[0], "said": line(mark[1])} if mark is not None else None
    return {
        "kind": "bars", "bars": list(each), "said": line(said), "caption": line(caption),
        "mark": shown,
    }  # fmt: skip


def choice(label: str, options: Iterable[tuple[str, Sequence[Part]]]) -> Part:
    """Named lists of parts, of which the reader chooses one list."""
    return {"kind": "choice", "label": line(label), "options": _named(options)}


def side(options: Iterable[tuple[str, Sequence[Part]]]) -> Part:
    """Named lists of parts, which are shown next to each other."""
    return {"kind": "side", "options": _named(options)}


def _named(options: Iterable[tuple[str, Sequence[Part]]]) -> list[Part]:
    return [{"name": line(name), "parts": list(parts)} for name, parts in options]
