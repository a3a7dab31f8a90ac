"""Pictures of scores, features, sweeps and attention, in notebooks and in files. Needs no engine.

strip.py         the tokens of an answer, coloured by the scores of a probe
page.py          several strips with one legend
side.py          two answers next to each other
heatmap.py       a grid of numbers, such as the table of a sweep
sparse.py        the likeliest tokens by layer and position, the strongest features of each token
attention.py     attention patterns of heads
result.py        an overview of a result
feature_page.py  strongest tokens, histograms and densities of features
monitors.py      the operator's page, with the findings of monitors and the plugin's state
harvest.py       counts and figures of a harvest
parts.py         the JSON of all views
scope.js         draws the JSON in a notebook and in a file, with the style scope.css
live.js          gets data from a server at intervals, and draws the data
static.py        draws the JSON as HTML without a script
checks.py        checks of the arguments of functions that make views
document.py      the base class of all views, which makes the notebook's output and files
widget.py        the notebook's widget that shows a view, drawn by scope.js

    from vllm_scope.views import token_strip
    strip = token_strip(texts, out.scope.scores["risk"], threshold=0.5) # a notebook shows the strip
    strip.widget() # with keyboard control; `.show(another)` draws another view
    strip.save("strip.html") # writes a page

A view does not load external content. No text of a model or of a user is interpreted as HTML.
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
