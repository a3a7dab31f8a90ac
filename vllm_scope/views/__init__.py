"""Scores, features, sweeps and attention as pictures, for notebooks and as files. Needs no engine.

strip.py         the tokens of an answer, coloured by a probe's score
page.py          several strips with one legend
side.py          two answers side by side
heatmap.py       a grid of numbers, such as the table of a sweep
sparse.py        likeliest tokens by layer and position; strongest features of each token
attention.py     attention patterns of heads
result.py        an overview of a result
feature_page.py  features: their strongest tokens, histograms and densities
monitors.py      the operator's page: what a server's monitors find, and the plugin's state
harvest.py       counts and figures of a harvest
parts.py         the JSON of which every view is made
scope.js         draws the JSON, in a notebook and in a file; scope.css is its style
live.js          gets data from a server at intervals, and draws them
static.py        draws the JSON as HTML without a script
checks.py        checks of the functions' arguments
document.py      what all views share: the notebook's output, the widget, the file
widget.py        the view in a notebook, drawn by scope.js

    from vllm_scope.views import token_strip
    strip = token_strip(texts, out.scope.scores["risk"], threshold=0.5)  # a notebook shows it
    strip.widget()  # with movement by keyboard; `.show(another)` draws another view in it
    strip.save("strip.html")  # writes a page

A view loads nothing from elsewhere, and no text of a model or of a user becomes markup.
"""

from vllm_scope.views.attention import attention_map
from vllm_scope.views.document import Picture
from vllm_scope.views.feature_page import FeaturePage, feature_page
from vllm_scope.views.monitors import monitor_page
from vllm_scope.views.page import TokenPage, token_page
from vllm_scope.views.side import side_by_side
from vllm_scope.views.sparse import feature_list, lens_grid
from vllm_scope.views.strip import TokenStrip, token_strip

__all__ = [
    "FeaturePage", "Picture", "TokenPage", "TokenStrip", "attention_map", "feature_list",
    "feature_page", "lens_grid", "monitor_page", "side_by_side", "token_page", "token_strip",
]  # fmt: skip
