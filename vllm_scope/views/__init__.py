"""Scores and features as HTML, for notebooks and as files. Needs no torch and no engine.

strip.py         the tokens of an answer, coloured by a probe's score
page.py          several strips with one legend
feature_page.py  features: their strongest tokens, histograms and densities
harvest.py       counts and figures of a harvest
heatmap.py       a grid of numbers, such as the table of a sweep
document.py      what all share: style, escaped text, the whole document

    from vllm_scope.views import token_strip
    token_strip(texts, out.scope.scores["risk"], threshold=0.5)  # a notebook shows it

The HTML has no script and loads nothing, and every text in it is escaped.
"""

from vllm_scope.views.feature_page import FeaturePage, feature_page
from vllm_scope.views.page import TokenPage, token_page
from vllm_scope.views.strip import TokenStrip, token_strip

__all__ = [
    "FeaturePage", "TokenPage", "TokenStrip", "feature_page", "token_page", "token_strip",
]  # fmt: skip
