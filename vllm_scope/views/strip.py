"""The token strip, which shows the tokens of an answer, coloured by the scores of a probe.

Owns:  TokenStrip, `token_strip` (makes a TokenStrip), `score_legend`.
From:  texts and scores of tokens.   To: a notebook, a file, views.page.

Colour is never the only sign of a token's score. A token above the threshold is underlined. The
verdict's token has a flag and a frame. Each token has its score as text.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import index
from typing import Protocol, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_scope.errors import SpecError, shown
from vllm_scope.vectors.probe_files import finite
from vllm_scope.views.checks import expect, texts_of, whole_of, words_of
from vllm_scope.views.document import View
from vllm_scope.views.parts import Part, colour, item, legend, strip


class HasPosition(Protocol):
    """An object with a position, such as a `Verdict`."""

    @property
    def position(self) -> int: ...


@dataclass(frozen=True, eq=False, repr=False)
class TokenStrip(View):
    """The tokens of an answer with their scores. A notebook shows the tokens in colour.

    Attributes:
        scores: float32 [num_tokens]. If a score is NaN, the token has no score.
        threshold: the middle of the colour scale. If None, the middle is 0, and no token is marked
            as above the threshold.
        verdict: the index of the token with the verdict, or None.
        first_position: the position of `tokens[0]`.
        caption: the text above the tokens. The caption can be empty.
        mark: the meaning of the flag, in words.
    """

    tokens: tuple[str, ...]
    scores: NDArray[np.float32]
    threshold: float | None
    verdict: int | None
    first_position: int
    caption: str
    mark: str = "verdict"

    @property
    def spread(self) -> float:
        """The largest distance of a finite score from the middle of the colour scale. A score at
        this distance has the strongest colour. If there is no distance above 0, the result is 1."""
        finite = self.scores[np.isfinite(self.scores)].astype(np.float64)
        return float(np.abs(finite - (self.threshold or 0)).max(initial=0)) or 1.0

    def parts(self) -> list[Part]:
        return [score_legend(self.threshold, self.spread, self.mark), self.strip(self.spread)]

    def heading(self) -> str:
        return self.caption or "Tokens by score"

    def strip(self, spread: float, differs: Container[int] = ()) -> Part:
        """The tokens, without the legend.

        Args:
            spread: the distance from the middle at which the colour is strongest. Strips with the
                same legend must have the same spread.
            differs: indices of tokens that are marked as different.
        """
        items = [self._token(i, spread, i in differs) for i in range(len(self.tokens))]
        return strip(items, self.caption)

    def _token(self, i: int, spread: float, differs: bool) -> Part:
        is_marked = {
            "unscored": np.isnan(self.scores[i]), "above": self._is_above(i), "differs": differs,
            "verdict": i == self.verdict,
        }  # fmt: skip
        marks = [name for name, is_so in is_marked.items() if is_so]
        part = colour(float(self.scores[i]), self.threshold or 0.0, spread)
        return item(self.tokens[i], part, self._said(i, differs), marks)

    def _is_above(self, i: int) -> bool:
        # The comparison is in float32, as in the engine.
        return self.threshold is not None and bool(self.scores[i] > self.threshold)

    def _said(self, i: int, differs: bool) -> str:
        said = ["no score"]
        if not np.isnan(self.scores[i]):
            said = [f"{self.scores[i]:.4g}"]
            if self.threshold is not None:
                said.append(f"{'above' if self._is_above(i) else 'not above'} the threshold")
        if i == self.verdict:
            said.append(self.mark)
        if differs:
            said.append("differs")
        return ", ".join([*said, f"position {self.first_position + i}"])

    def __repr__(self) -> str:
        return f"TokenStrip({len(self.tokens)} tokens, threshold {self.threshold})"


def token_strip(
    tokens: Sequence[str],
    scores: ArrayLike,
    *,
    threshold: float | None = None,
    verdict: SupportsIndex | HasPosition | None = None,
    first_position: int = 0,
    caption: str = "",
) -> TokenStrip:
    """A strip of tokens, coloured by score. `.save(path)` writes the strip as a page.

    Args:
        tokens: the text of each token, such as `tokenizer.decode([i])`.
        scores: numbers [num_tokens] on the CPU, which are scores or aggregates. If a number is NaN
            or None, the token has no score. The last score can be missing, because the last token
            of an answer was sampled but not processed.
        threshold: the probe's threshold. If None, no token is marked as above the threshold.
        verdict: the position of the verdict, or the `Verdict` itself.
        first_position: the position of `tokens[0]`. If this is the first generated token, pass the
            number of prompt tokens.
        caption: plain text above the tokens.

    Raises:
        SpecError: the numbers of tokens and scores disagree; the position of the verdict is outside
            the tokens; an argument has a wrong type; or the threshold is not finite.
    """
    expect(tokens is not None, "tokens", tokens, "a list of texts")
    texts = texts_of(tokens, "tokens")
    first_position = whole_of(first_position, "first_position")
    words_of(caption, "caption")
    values = _as_scores(scores, len(texts))
    at = _as_index(verdict, first_position, len(texts))
    threshold = None if threshold is None else finite(threshold, "threshold")
    return TokenStrip(texts, values, threshold, at, first_position, caption)


def _as_scores(scores: ArrayLike, num_tokens: int) -> NDArray[np.float32]:
    try:
        values = np.array(scores, np.float32)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"scores are {shown(scores)}; pass a list of numbers.") from None
    if values.ndim != 1 or len(values) not in (num_tokens, num_tokens - 1):
        raise SpecError(
            f"scores have the shape {list(values.shape)}; {num_tokens} tokens have {num_tokens} "
            f"scores, or {num_tokens - 1} if the last token was not processed."
        )
    return np.pad(values, (0, num_tokens - len(values)), constant_values=np.nan)


def _as_index(
    verdict: SupportsIndex | HasPosition | None, first_position: int, num_tokens: int
) -> int | None:
    if verdict is None:
        return None
    try:
        position = index(verdict if isinstance(verdict, SupportsIndex) else verdict.position)
    except (AttributeError, TypeError):
        raise SpecError(f"verdict is {shown(verdict)}; pass a position or a Verdict.") from None
    if not 0 <= position - first_position < num_tokens:
        raise SpecError(
            f"verdict is at position {position}; the {num_tokens} tokens begin at position "
            f"{first_position}. Pass the position of the first token as first_position."
        )
    return position - first_position


def score_legend(threshold: float | None, spread: float, mark: str = "verdict") -> Part:
    """The legend of strips, which explains colours and marks."""
    middle = threshold or 0.0
    low, high = f"{middle - spread:.3g}", f"{middle + spread:.3g}"
    marks = [(mark, ("verdict",)), ("no score", ("unscored",))]
    if threshold is None:
        return legend(low, high, "the middle is 0", marks)
    marks.insert(0, ("above the threshold", ("above",)))
    return legend(low, high, f"the middle is the threshold, {middle:.4g}", marks)
