"""Scores as HTML, for notebooks and as files. Needs no torch and no engine.

strip.py     the tokens of an answer, coloured by a probe's score
page.py      several strips with one legend
document.py  what both share: style, escaped text, the whole document

    from vllm_scope.views import token_strip
    token_strip(texts, out.scope.scores["risk"], threshold=0.5)  # a notebook shows it

The HTML has no script and loads nothing, and every text in it is escaped.
"""

from vllm_scope.views.page import TokenPage, token_page
from vllm_scope.views.strip import TokenStrip, token_strip

__all__ = ["TokenPage", "TokenStrip", "token_page", "token_strip"]
