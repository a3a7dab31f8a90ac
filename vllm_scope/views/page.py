"""A page of token strips with one legend. A colour means the same score in all strips of the page.

Owns:  TokenPage.
From:  strip.   To: a file, a notebook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_scope.errors import SpecError
from vllm_scope.views import parts
from vllm_scope.views.checks import expect, texts_of, words_of
from vllm_scope.views.document import View
from vllm_scope.views.parts import Part
from vllm_scope.views.strip import TokenStrip, score_legend


@dataclass(frozen=True, repr=False)
class TokenPage(View):
    """Strips under headings. `intro` has the paragraphs above the strips."""

    title: str
    groups: Mapping[str, Sequence[TokenStrip]]
    intro: Sequence[str]

    def parts(self) -> list[Part]:
        strips = [strip for group in self.groups.values() for strip in group]
        spread = max(strip.spread for strip in strips)
        found = [*map(parts.text, self.intro), score_legend(strips[0].threshold, spread)]
        for name, group in self.groups.items():
            found += [parts.heading(name)] if name else []
            found += [strip.strip(spread) for strip in group]
        return found

    def heading(self) -> str:
        return self.title


def token_page(
    title: str,
    strips: Sequence[TokenStrip] | Mapping[str, Sequence[TokenStrip]],
    *,
    intro: Sequence[str] = (),
) -> TokenPage:
    """A page of strips. `.save(path)` writes the page to a file.

    Args:
        title, intro: plain text. `intro` is a list of paragraphs.
        strips: a list of strips, or a mapping from each heading to the strips below the heading.

    Raises:
        SpecError: `strips` is empty, an item or the title has a wrong type, or the thresholds
            differ.
    """
    words_of(title, "title")
    groups = strips if isinstance(strips, Mapping) else {"": strips}
    for heading, group in groups.items():
        is_list = isinstance(heading, str) and isinstance(group, Sequence)
        is_so = is_list and all(isinstance(one, TokenStrip) for one in group)
        expect(
            is_so, "strips", strips, "a list of token strips, or a dict of such lists by heading"
        )
    thresholds = {strip.threshold for group in groups.values() for strip in group}
    if len(thresholds) != 1:
        raise SpecError(
            f"the strips have {len(thresholds)} thresholds; a page has one legend. Pass at "
            "least one strip, and only strips with the same threshold."
        )
    return TokenPage(title, groups, texts_of(intro, "intro"))
