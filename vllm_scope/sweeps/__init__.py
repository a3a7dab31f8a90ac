"""Sweeps: one edit at every place of a grid, and what each does to the next token.

metrics.py  what a cell's value is: Metric, and LogitDifference, Logprob, KL
sweep.py    what a caller asks for, and its prompts as token ids
source.py   the rows that edits take their vectors from
paths.py    path patching: the further requests of a cell that acts along direct paths alone
plan.py     which requests a sweep is made of, and in which order
yielding.py when they are sent while others have requests in the engine
table.py    the values with their names, as files and as a picture
wire.py     a sweep and its table as JSON, for HTTP

Here is no engine: engine/frontend/sweep_runs.py sends the requests of a plan. numpy, no torch.
"""

from vllm_scope.sweeps.metrics import KL, LogitDifference, Logprob, Metric
from vllm_scope.sweeps.plan import Cell
from vllm_scope.sweeps.sweep import Sweep
from vllm_scope.sweeps.table import SweepTable

__all__ = ["KL", "Cell", "LogitDifference", "Logprob", "Metric", "Sweep", "SweepTable"]
