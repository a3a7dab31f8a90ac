"""A page of features: of each its strongest tokens in context, a histogram and its density.

Owns:  FeaturePage, `feature_page`.
From:  saes.max_activating (a table), strip.   To: a file, a notebook.

A feature opens and closes by mouse or keyboard without a script. Only the tokens of open features
are in the order of the tab key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError, shown
from vllm_scope.saes.max_activating import MaxActivating, Strong
from vllm_scope.views.document import View, safe
from vllm_scope.views.strip import TokenStrip

#: Features of a page whose reader names none, and tokens of each that are shown.
MOST_FEATURES, MOST_TOKENS = 100, 8
_HEIGHT, _BAR = 80, 6
_LEGEND = """<p class="legend">
<span class="t scored" style="--p:0">0</span>
<span class="t scored" style="--p:1">the feature's largest value</span>
<span class="t verdict">⚑strongest: the token in this context that is listed</span>
<span class="t unscored">not computed</span>
</p>"""


@dataclass(frozen=True, eq=False)
class _Feature:
    """What a page shows of one feature. `strips` show the strongest tokens in context. `usual` is
    the commonest of the strongest tokens, and how many of them are this token."""

    index: int
    label: str
    num_active: int
    density: float
    largest: float
    usual: tuple[str, int, int]
    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    strips: tuple[TokenStrip, ...]


@dataclass(frozen=True, repr=False)
class FeaturePage(View):
    """Features under each other; the first is open."""

    title: str
    intro: Sequence[str]
    features: Sequence[_Feature]

    def body(self) -> str:
        parts = [f"<p>{safe(text)}</p>" for text in self.intro]
        parts.append(_LEGEND)
        parts += [_section(one, is_open=i == 0) for i, one in enumerate(self.features)]
        return "\n".join(parts)

    def heading(self) -> str:
        return self.title


def feature_page(
    found: MaxActivating,
    decode: Callable[[int], str],
    *,
    title: str = "Features and their strongest tokens",
    features: Sequence[int] | None = None,
    labels: Mapping[int, str] | None = None,
    strongest: int = MOST_TOKENS,
    intro: Sequence[str] = (),
) -> FeaturePage:
    """A page of features; `.save(path)` writes it.

    Args:
        decode: the text of a token id, such as `lambda i: tokenizer.decode([i])`.
        features: their numbers, in the order of the page. None: those with a label, then the 100
            that are active most often.
        labels: a word or two about a feature, by its number.
        strongest: how many tokens of each are shown.
        title, intro: plain text; `intro` is a list of paragraphs.

    Raises:
        SpecError: a number that is not of a feature, or no feature is active.
    """
    labels = labels or {}
    if features is None:
        often = np.argsort(-found.num_active, kind="stable")[:MOST_FEATURES]
        named = [i for i in labels if 0 <= i < found.num_features]
        features = list(dict.fromkeys([*named, *often[found.num_active[often] > 0].tolist()]))
    for index in features:
        if not 0 <= index < found.num_features:
            raise SpecError(
                f"features has {shown(index)}; the SAE has features 0 to "
                f"{found.num_features - 1:,}."
            )
    if not features:
        raise SpecError("no feature is active at any token; there is nothing to show.")
    facts = (
        f"{found.num_tokens:,} tokens of {found.num_documents:,} documents. Shown are "
        f"{len(features):,} of {found.num_features:,} features."
    )
    if found.num_full:
        facts += (
            f" At {found.num_full:,} tokens the request's top_k features were all active: unless "
            "the SAE is a TopK SAE, weaker features may be missing there."
        )
    texts: dict[int, str] = {}
    some = [_feature(found, i, labels.get(i, ""), strongest, decode, texts) for i in features]
    return FeaturePage(title, [*intro, facts], some)


def _feature(
    found: MaxActivating, index: int, label: str, strongest: int,
    decode: Callable[[int], str], texts: dict[int, str],
) -> _Feature:  # fmt: skip
    def text(token: int) -> str:
        if token not in texts:
            texts[token] = decode(token)
        return texts[token]

    top = found.top(index)
    often = Counter(text(int(one.tokens[one.at])) for one in top).most_common(1)
    usual = (*often[0], len(top)) if often else ("", 0, 0)
    edges, counts = found.histogram(index)
    return _Feature(
        index, label, int(found.num_active[index]), float(found.density[index]),
        top[0].value if top else 0.0, usual, edges, counts,
        tuple(_strip(one, text) for one in top[:strongest]),
    )  # fmt: skip


def _strip(one: Strong, text: Callable[[int], str]) -> TokenStrip:
    return TokenStrip(
        tuple(text(token) for token in one.tokens.tolist()), one.values, None, one.at,
        one.position - one.at, f"{one.value:.4g}, request {one.label}", "strongest",
    )  # fmt: skip


def _section(one: _Feature, is_open: bool) -> str:
    name = f" {safe(one.label)}" if one.label else ""
    usual = ""
    if one.usual[1]:
        token, count, of = one.usual
        usual = f", {count} of the {of} strongest tokens are <q>{safe(token)}</q>"
    strips = "\n".join(strip.figure(one.largest or 1.0) for strip in one.strips)
    return f"""<details class="feature" id="feature-{one.index}"{" open" if is_open else ""}>
<summary><b>{one.index}</b>{name}<span class="facts"> active at {one.density:.3%} of tokens, \
at most {one.largest:.4g}{usual}</span></summary>
{_histogram(one) if one.num_active else ""}
{strips}
</details>"""


def _histogram(one: _Feature) -> str:
    """Bars from 0 to the largest value; each has its range and count as a title."""
    num_bars = int(np.flatnonzero(one.counts).max(initial=0)) + 1
    most = int(one.counts.max())
    bars = "".join(
        f'<rect x="{_BAR * i}" y="{_HEIGHT * (1 - count / most):.2f}" width="{_BAR - 1}" '
        f'height="{_HEIGHT * count / most:.2f}"><title>{one.edges[i]:.4g} to '
        f"{one.edges[i + 1]:.4g}: {count} tokens</title></rect>"
        for i, count in enumerate(one.counts[:num_bars].tolist())
    )
    said = f"Values above 0 at {one.num_active:,} tokens; the fullest bar has {most:,} tokens"
    width = _BAR * num_bars
    return f"""<figure class="bars"><svg role="img" aria-label="{said}" \
viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}">{bars}</svg>
<figcaption>0 to {one.edges[num_bars]:.4g}. {said}.</figcaption></figure>"""
