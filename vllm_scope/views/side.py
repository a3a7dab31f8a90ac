"""A picture of two answers next to each other, such as a plain and a steered answer. Tokens that
differ between the answers are marked.

Owns:  `side_by_side`.
From:  strip.   To: a notebook, a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from vllm_scope.errors import SpecError
from vllm_scope.views.checks import expect, texts_of, words_of
from vllm_scope.views.document import Picture
from vllm_scope.views.parts import Part, side, text
from vllm_scope.views.strip import TokenStrip, score_legend, token_strip


def side_by_side(
    plain: TokenStrip | Sequence[str],
    other: TokenStrip | Sequence[str],
    *,
    names: tuple[str, str] = ("plain", "steered"),
    title: str = "Two answers",
) -> Picture:
    """A picture of two answers next to each other. If the answers have scores, the scores give the
    colours.

    Args:
        plain, other: each a strip, or a list of the texts of an answer's tokens. A list of texts
            has no scores, and its threshold is None. Both arguments must have the same threshold.
        names: the names of the two answers.

    Raises:
        SpecError: a text has a wrong type, the thresholds differ, or there are not two names.
    """
    words_of(title, "title")
    expect(len(texts_of(names, "names")) == 2, "names", names, "a name for each of the two answers")
    strips = [_strip_of(plain, "plain"), _strip_of(other, "other")]
    one, two = strips
    if one.threshold != two.threshold:
        raise SpecError(
            f"the strips have the thresholds {one.threshold} and {two.threshold}; a colour must "
            "mean the same in both strips, so give both strips one threshold."
        )
    differs: tuple[set[int], set[int]] = set(), set()
    matcher = SequenceMatcher(None, one.tokens, two.tokens, autojunk=False)
    for kind, *ends in matcher.get_opcodes():
        if kind != "equal":
            differs[0].update(range(*ends[:2]))
            differs[1].update(range(*ends[2:]))
    counts = " and ".join(
        f"{len(some)} of {len(strip.tokens)}" for some, strip in zip(differs, strips, strict=True)
    )
    spread = max(strip.spread for strip in strips)
    each = [
        (name, [strip.strip(spread, some)])
        for name, strip, some in zip(names, strips, differs, strict=True)
    ]
    about: list[Part] = [text(f"{counts} tokens differ; different tokens have a frame.")]
    if any(np.isfinite(strip.scores).any() for strip in strips):
        about.append(score_legend(one.threshold, spread))
    return Picture(title, [*about, side(each)])


def _strip_of(given: TokenStrip | Sequence[str], name: str) -> TokenStrip:
    if isinstance(given, TokenStrip):
        return given
    texts = texts_of(given, name)
    return token_strip(texts, [np.nan] * len(texts))
