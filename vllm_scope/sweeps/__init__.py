"""A sweep applies one edit at each place of a grid, and measures the effect on the next token.

metrics.py  Metric, and the metrics LogitDifference, Logprob and KL, which compute a cell's value
sweep.py    the sweep that a caller requests, and the token ids of its prompts
source.py   the rows from which edits take their vectors
paths.py    path patching, in which a cell's edit acts only along direct paths
plan.py     the requests of a sweep, and the order of these requests
yielding.py says when a sweep sends cells while the engine has other requests
table.py    the values of a sweep with their names, as files and as a picture
wire.py     a sweep and its table as JSON, for HTTP

No file of this folder calls an engine. engine/frontend/sweep_runs.py sends the requests of a plan.
This folder imports numpy, and imports torch only when a sweep reads rows.
"""

from vllm_scope.sweeps.metrics import KL, LogitDifference, Logprob, Metric
from vllm_scope.sweeps.plan import Cell
from vllm_scope.sweeps.sweep import Sweep
from vllm_scope.sweeps.table import SweepTable

__all__ = ["KL", "Cell", "LogitDifference", "Logprob", "Metric", "Sweep", "SweepTable"]
