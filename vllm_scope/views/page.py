"""A page of token strips with one legend, so that a colour means the same score in each.

Owns:  TokenPage.
From:  strip.   To: a file, a notebook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_scope.errors import SpecError
from vllm_scope.views.document import View, safe
from vllm_scope.views.strip import TokenStrip, legend


@dataclass(frozen=True, repr=False)
class TokenPage(View):
    """Strips under headings. `intro`: paragraphs above them."""

    title: str
    groups: Mapping[str, Sequence[TokenStrip]]
    intro: Sequence[str]

    def body(self) -> str:
        strips = [strip for group in self.groups.values() for strip in group]
        spread = max(strip.spread for strip in strips)
        parts = [*(f"<p>{safe(text)}</p>" for text in self.intro)]
        parts.append(legend(strips[0].threshold, spread))
        for name, group in self.groups.items():
            parts += [f"<h2>{safe(name)}</h2>"] if name else []
            parts += [strip.figure(spread) for strip in group]
        return "\n".join(parts)

    def heading(self) -> str:
        return self.title


def token_page(
    title: str,
    strips: Sequence[TokenStrip] | Mapping[str, Sequence[TokenStrip]],
    *,
    intro: Sequence[str] = (),
) -> TokenPage:
    """A page of strips; `.save(path)` writes it.

    Args:
        title, intro: plain text; `intro` is a list of paragraphs.
        strips: in their order; or heading -> the strips below it.

    Raises:
        SpecError: there is no strip, or their thresholds differ.
    """
    groups = strips if isinstance(strips, Mapping) else {"": strips}
    thresholds = {strip.threshold for group in groups.values() for strip in group}
    if len(thresholds) != 1:
        raise SpecError(
            f"the strips have {len(thresholds)} thresholds; a page has one legend, so pass at "
            "least one strip, and strips of one threshold."
        )
    return TokenPage(title, groups, intro)
