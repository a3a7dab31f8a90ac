"""Views as HTML without scripts, for example for a notebook on a site such as GitHub, or for a
report.

Owns:  `html_of`.
From:  parts.   To: View._repr_html_.

The HTML shows the same content as scope.js, with three differences. There is no keyboard control,
a choice is shown as sections that the reader can open, and a histogram is only its caption. Each
token has its numbers as a title, and as text for screen readers. This text is visible while the
token has the keyboard's focus.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import starmap

from vllm_scope.views.parts import Part


def html_of(parts: Sequence[Part]) -> str:
    """The HTML of a list of parts, without the style."""
    return "\n".join(_DRAW[part["kind"]](part) for part in parts)


def _text(part: Part) -> str:
    return f"<p>{escape(part['text'])}</p>"


def _heading(part: Part) -> str:
    return f"<h2>{escape(part['text'])}</h2>"


def _legend(part: Part) -> str:
    marks = "".join(
        f'\n<span class="{" ".join(["t", *one["marks"]])}">'
        f"{'⚑' if 'verdict' in one['marks'] else ''}{escape(one['text'])}</span>"
        for one in part["marks"]
    )
    low, high, note = (escape(part[name]) for name in ("low", "high", "note"))
    scale = "scale up" if part["up"] else "scale"
    return f'<p class="legend"><span>{low}<i class="{scale}"></i>{high}: {note}</span>{marks}\n</p>'


def _caption(part: Part) -> str:
    return f"<figcaption>{escape(part['caption'])}</figcaption>\n" if part["caption"] else ""


def _strip(part: Part) -> str:
    tokens = "".join(map(_token, part["items"]))
    return (
        f'<figure>{_caption(part)}<div class="tokens" role="list" dir="auto">{tokens}</div>'
        "</figure>"
    )


def _token(item: Part) -> str:
    marks, style, text, said = item["marks"], "", item["text"], escape(item["said"])
    if item["part"] is not None:
        marks, style = ["scored", *marks], f' style="--p:{item["part"]:.3f}"'
    flag = '<span class="flag" aria-hidden="true">⚑</span>' if "verdict" in marks else ""
    # A line break at the end of a token must be outside the token's frame.
    end = "\n" if text.endswith("\n") else ""
    return (
        f'<span class="{" ".join(["t", *marks])}" role="listitem" tabindex="0" title="{said}"'
        f'{style}>{flag}<span class="text">{escape(text.removesuffix(end))}</span>'
        f'<span class="value" dir="ltr"> {said} </span></span>{end}'
    )


def _grid(part: Part) -> str:
    down, across = map(escape, part["titles"])
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in part["columns"])
    top = f'<th scope="colgroup" colspan="{len(part["columns"])}">{across}</th>' if across else ""
    rows = starmap(_row, zip(part["rows"], part["cells"], strict=True))
    style = "".join(f" {name}" for name in ("words", "tight") if part[name])
    return (
        f'<figure>{_caption(part)}<div class="grid{style}"><table>\n'
        + (f"<tr><td></td>{top}</tr>\n" if top else "")
        + f'<tr><th scope="col">{down}</th>{columns}</tr>\n{"".join(rows)}</table></div></figure>'
    )


def _row(name: str, cells: Sequence[Part | None]) -> str:
    return f'<tr><th scope="row">{escape(name)}</th>{"".join(map(_cell, cells))}</tr>\n'


def _cell(cell: Part | None) -> str:
    if cell is None:
        return "<td></td>"
    more = "&#10;".join(escape(line["text"]) for line in cell.get("more", ()))
    title = f' title="{more}"' if more else ""
    colour = "" if cell["part"] is None else f' class="scored" style="--p:{cell["part"]:.3f}"'
    return f"<td{title}{colour}>{escape(cell['text'])}</td>"


def _section(part: Part) -> str:
    name = f" {escape(part['name'])}" if part["name"] else ""
    return (
        f'<details class="feature"{" open" if part["open"] else ""}><summary>'
        f'<b>{escape(part["title"])}</b>{name}<span class="facts"> {escape(part["facts"])}</span>'
        f"</summary>\n{html_of(part['parts'])}\n</details>"
    )


def _bars(part: Part) -> str:
    return f'<p class="facts">{escape(part["caption"])}</p>'


def _options(part: Part) -> str:
    """The options of a part with their names, one option below another. If the part is a choice,
    the reader can open and close each option, and at the start only the first option is open."""
    if part["kind"] == "side":
        return "\n".join(
            f"<h3>{escape(one['name'])}</h3>\n{html_of(one['parts'])}" for one in part["options"]
        )
    return "\n".join(
        f"<details{'' if i else ' open'}><summary>{escape(part['label'])} {escape(one['name'])}"
        f"</summary>\n{html_of(one['parts'])}\n</details>"
        for i, one in enumerate(part["options"])
    )


_DRAW = {
    "text": _text, "heading": _heading, "legend": _legend, "strip": _strip, "grid": _grid,
    "section": _section, "bars": _bars, "choice": _options, "side": _options,
}  # fmt: skip
