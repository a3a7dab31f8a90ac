"""Pictures of scores, features, sweeps and attention, in notebooks and in files. Needs no engine.

strip.py         the tokens of an answer, coloured by the scores of a probe
page.py          several strips with one legend
side.py          two answers next to each other
heatmap.py       a grid of numbers, such as the table of a sweep
sparse.py        likeliest tokens by layer and position; strongest features of each token
attention.py     attention patterns of heads
result.py        an overview of a result
feature_page.py  strongest tokens, histograms and densities of features
monitors.py      the operator's page: the findings of monitors, and the plugin's state
harvest.py       counts and figures of a harvest
parts.py         the JSON of all views
scope.js         draws the JSON, in a notebook and in a file; scope.css is its style
live.js          gets data from a server at intervals, and draws the data
static.py        draws the JSON as HTML without a script
checks.py        checks of the functions' arguments
document.py      the base of all views: the notebook's output, the widget, the file
widget.py        the view in a notebook, drawn by scope.js

    from vllm_scope.views import token_strip
    strip = token_strip(texts, out.scope.scores["risk"], threshold=0.5) # a notebook shows the strip
    strip.widget() # with keyboard control; `.show(another)` draws another view
    strip.save("strip.html") # writes a page

A view does not load external content. A text of a model or of a user never becomes markup.
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
