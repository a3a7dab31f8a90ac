"""Sweeps: one edit at every place of a grid, and each edit's effect on the next token.

metrics.py  the value of a cell: Metric, and LogitDifference, Logprob, KL
sweep.py    the caller's sweep, and its prompts as token ids
source.py   the rows from which edits take their vectors
paths.py    path patching: the further requests of a cell whose edit acts only along direct paths
plan.py     the requests of a sweep, and their order
yielding.py when cells are sent while the engine has other requests
table.py    the values with their names, as files and as a picture
wire.py     a sweep and its table as JSON, for HTTP

No file of this folder calls an engine: engine/frontend/sweep_runs.py sends the requests of a plan.
This folder needs numpy. torch is needed only if a sweep reads rows.
"""

from vllm_scope.sweeps.metrics import KL, LogitDifference, Logprob, Metric
from vllm_scope.sweeps.plan import Cell
from vllm_scope.sweeps.sweep import Sweep
from vllm_scope.sweeps.table import SweepTable

__all__ = ["KL", "Cell", "LogitDifference", "Logprob", "Metric", "Sweep", "SweepTable"]
