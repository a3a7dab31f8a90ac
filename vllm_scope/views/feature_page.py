"""A page with the strongest tokens, a histogram and the density of each feature.

Owns:  FeaturePage, `feature_page`.
From:  saes.max_activating, strip. To: a file, a notebook.

The reader opens and closes features by mouse or keyboard. At first, only the first feature is open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError
from vllm_scope.saes.max_activating import MaxActivating, Strong
from vllm_scope.views.checks import expect, labels_of, numbers_of, texts_of, words_of
from vllm_scope.views.document import View
from vllm_scope.views.parts import Part, bar, bars, legend, section, text
from vllm_scope.views.strip import TokenStrip

#: By default, a page shows at most MOST_FEATURES features without a label, and at most MOST_TOKENS
#: tokens for each feature.
MOST_FEATURES, MOST_TOKENS = 100, 8
_LEGEND = legend(
    "0", "the feature's largest value", "the middle of the colours is 0",
    [("strongest: the token in this context that is listed", ("verdict",)),
     ("not computed", ("unscored",))],
    up=True,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Feature:
    """The numbers and texts of one feature on a page.

    Attributes:
        strips: the strongest tokens with their context.
        usual: the most frequent text among the strongest tokens, the number of strongest tokens
            with this text, and the number of all strongest tokens.
    """

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
    """A page of features, one below the other."""

    title: str
    intro: Sequence[str]
    features: Sequence[_Feature]

    def parts(self) -> list[Part]:
        shown = [_section(one, is_open=i == 0) for i, one in enumerate(self.features)]
        return [*map(text, self.intro), _LEGEND, *shown]

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
    """A page of features. `.save(path)` writes the page to a file.

    Args:
        decode: a function that returns the text of a token id, such as `lambda i:
            tokenizer.decode([i])`.
        features: the numbers of the features, in the order of the page. If None, the page shows all
            features with a label, then the 100 most frequently active features.
        labels: short descriptions of features, by the number of the feature.
        strongest: the largest number of tokens to show for each feature.
        title, intro: plain text. `intro` is a list of paragraphs.

    Raises:
        SpecError: `found` is not a table, another argument has a wrong type, a feature does not
            exist, `features` is empty, or no feature is active.
    """
    expect(
        isinstance(found, MaxActivating), "found", found,
        "a MaxActivating, such as the result of load_max_activating(path)",
    )  # fmt: skip
    words_of(title, "title")
    expect(callable(decode), "decode", decode, "a function, such as lambda i: decode([i])")
    labels, paragraphs = labels_of(labels), texts_of(intro, "intro")
    is_count = isinstance(strongest, int) and strongest >= 1
    expect(is_count, "strongest", strongest, "a whole number, at least 1")
    if features is None:
        often = np.argsort(-found.num_active, kind="stable")[:MOST_FEATURES]
        named = [i for i in labels if 0 <= i < found.num_features]
        features = list(dict.fromkeys([*named, *often[found.num_active[often] > 0].tolist()]))
    there = range(found.num_features)
    features = numbers_of(features, "features", there, f"the SAE has features 0 to {there[-1]:,}")
    if not features:
        raise SpecError("there is nothing to show: `features` is empty, or no feature is active.")
    facts = (
        f"{found.num_tokens:,} tokens of {found.num_documents:,} documents. Shown are "
        f"{len(features):,} of {found.num_features:,} features."
    )
    if found.num_full:
        facts += (
            f" At {found.num_full:,} tokens the request's top_k features were all active: unless "
            "the SAE is a TopK SAE, weaker features may be missing at these tokens."
        )
    texts: dict[int, str] = {}
    some = [_feature(found, i, labels.get(i, ""), strongest, decode, texts) for i in features]
    return FeaturePage(title, [*paragraphs, facts], some)


def _feature(
    found: MaxActivating, index: int, label: str, strongest: int,
    decode: Callable[[int], str], texts: dict[int, str],
) -> _Feature:  # fmt: skip
    def text_of(token: int) -> str:
        if token not in texts:
            text = texts[token] = decode(token)
            expect(isinstance(text, str), "what `decode` returns", text, "a text")
        return texts[token]

    top = found.top(index)
    often = Counter(text_of(int(one.tokens[one.at])) for one in top).most_common(1)
    usual = (*often[0], len(top)) if often else ("", 0, 0)
    edges, counts = found.histogram(index)
    return _Feature(
        index, label, int(found.num_active[index]), float(found.density[index]),
        top[0].value if top else 0.0, usual, edges, counts,
        tuple(_strip(one, text_of) for one in top[:strongest]),
    )  # fmt: skip


def _strip(one: Strong, text_of: Callable[[int], str]) -> TokenStrip:
    return TokenStrip(
        tuple(text_of(token) for token in one.tokens.tolist()), one.values, None, one.at,
        one.position - one.at, f"{one.value:.4g}, request {one.label}", "strongest",
    )  # fmt: skip


def _section(one: _Feature, is_open: bool) -> Part:
    facts = f"active at {one.density:.3%} of tokens, at most {one.largest:.4g}"
    if one.usual[1]:
        token, count, of = one.usual
        facts += f", {count} of the {of} strongest tokens are “{token}”"
    strips = [strip.strip(one.largest or 1.0) for strip in one.strips]
    shown = [*([_histogram(one)] if one.num_active else ()), *strips]
    return section(f"{one.index}", one.label, facts, shown, f"feature-{one.index}", is_open)


def _histogram(one: _Feature) -> Part:
    """A histogram from 0 to the largest value. Each bar has its range and count as text."""
    num_bars = int(np.flatnonzero(one.counts).max(initial=0)) + 1
    most = int(one.counts.max())
    each = [
        bar(count / most, f"{one.edges[i]:.4g} to {one.edges[i + 1]:.4g}: {count} tokens")
        for i, count in enumerate(one.counts[:num_bars].tolist())
    ]
    said = f"Values above 0 at {one.num_active:,} tokens; the fullest bar has {most:,} tokens"
    return bars(each, said, f"0 to {one.edges[num_bars]:.4g}. {said}.")
