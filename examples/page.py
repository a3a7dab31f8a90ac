"""The page of coloured tokens: one static file that loads no other file.

Owns:  Token, Example, Section, Places, and their HTML. Style and script: page.html.
From:  demo.py, which chooses the content.   To: a browser, with a light or dark theme. The page
       works without a mouse. Without JavaScript, it shows the layer that demo.py has selected.

Promise: every text from a caller is escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

_TEMPLATE = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Token:
    """One token, and the probabilities that the probes of all layers give at this token.

    `probabilities` is None for the last sampled token, because this token has no row.
    """

    text: str
    generated: bool
    probabilities: tuple[float, ...] | None


@dataclass(frozen=True)
class Example:
    """One prompt with its continuation. `truth` is the word for the prompt's label."""

    truth: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Places:
    """A table of AUROCs: one row for each named token of the prompts, one column for each layer."""

    title: str
    caption: str
    auroc: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Section:
    """One concept with the words for its two labels, and examples.

    Attributes:
        low, high: the words for probability 0 and 1.
        layers: the layers' names, in the order of `Token.probabilities`.
        selected: index of the layer that is shown first.
    """

    title: str
    caption: str
    low: str
    high: str
    layers: tuple[str, ...]
    selected: int
    examples: tuple[Example, ...]
    places: Places | None = None


def render(title: str, intro: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole page as HTML. `intro` is paragraphs of plain text."""
    return _TEMPLATE.substitute(
        title=escape(title),
        intro="\n".join(f"<p>{escape(paragraph)}</p>" for paragraph in intro),
        sections="\n".join(_section(i, section) for i, section in enumerate(sections)),
    )


def _section(index: int, section: Section) -> str:
    examples = "\n".join(_example(section, example) for example in section.examples)
    return f"""<section aria-labelledby="title-{index}" data-high="{escape(section.high)}">
<h2 id="title-{index}">{escape(section.title)}</h2>
<p class="muted">{escape(section.caption)}</p>
<div class="controls">
<fieldset><legend>After layer</legend>{_layer_buttons(index, section)}</fieldset>
<div class="legend">{escape(section.low)} <i aria-hidden="true"></i> {escape(section.high)}</div>
</div>
{examples}
{_places(section.places, section.layers) if section.places else ""}
</section>"""


def _layer_buttons(index: int, section: Section) -> str:
    return "".join(
        f'<label><input type="radio" name="layer-{index}" data-name="{escape(_place(name))}"'
        f"{' checked' if i == section.selected else ''}><span>{escape(name)}</span></label>"
        for i, name in enumerate(section.layers)
    )


def _place(layer: str) -> str:
    return f"after layer {layer}" if layer.isdigit() else layer


def _example(section: Section, example: Example) -> str:
    tokens = "".join(_token(token, section.selected) for token in example.tokens)
    return f"""<figure>
<figcaption>In truth: <b>{escape(example.truth)}</b></figcaption>
<p class="text" tabindex="0">{tokens}</p>
{_strip(section, example)}
</figure>"""


def _token(token: Token, layer: int) -> str:
    special = token.text.startswith("<|") and token.text.endswith("|>")
    names = {
        "generated": token.generated,
        "special": special,
        "unread": token.probabilities is None,
    }
    css = " ".join(["t", *(name for name, holds in names.items() if holds)])
    data = ""
    if token.probabilities is not None:
        values = " ".join(f"{p:.3f}" for p in token.probabilities)
        data = f' data-p="{values}" style="--p:{token.probabilities[layer]:.3f}"'
    return f'<span class="{css}"{data}>{escape(token.text)}</span>'


def _strip(section: Section, example: Example) -> str:
    """All layers in one picture: a column for each token, the last layer on top."""
    read = [token for token in example.tokens if token.probabilities is not None]
    top = len(section.layers) - 1
    cells = "".join(
        f'<rect x="{x}" y="{top - layer}" width="1" height="1" style="--p:{p:.2f}"/>'
        for x, token in enumerate(read)
        for layer, p in enumerate(token.probabilities or ())
    )
    num_prompt = sum(not token.generated for token in read)
    height = len(section.layers)
    names = "".join(
        f'<li data-layer="{layer}"{" class=shown" if layer == section.selected else ""}>'
        f"{escape(section.layers[layer])}</li>"
        for layer in range(top, -1, -1)
    )
    return f"""<div class="strip" aria-hidden="true"><ol>{names}</ol>
<svg viewBox="0 0 {len(read)} {height}" preserveAspectRatio="none" shape-rendering="crispEdges">
{cells}
<line x1="{num_prompt}" x2="{num_prompt}" y1="0" y2="{height}"/>
<rect class="cursor" width="1" height="{height}"/>
</svg></div>"""


def _places(places: Places, layers: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(layer)}</th>' for layer in layers)
    body = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f'<td style="--p:{value:.2f}">{value:.2f}</td>' for value in values)
        + "</tr>"
        for name, values in places.auroc.items()
    )
    return f"""<h3>{escape(places.title)}</h3>
<p class="muted">{escape(places.caption)}</p>
<div class="scroll"><table>
<thead><tr><th scope="col">after layer</th>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>"""
