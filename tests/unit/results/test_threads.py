"""What a request costs the front-end is done on the thread that asks: with its rows few, torch's
threads take longer to wake than to work, one for each core, and the engine's processes want these
cores."""

from __future__ import annotations

from tests.torch_threads import threads_made_by

#: Each makes torch's threads, if anything does. A process keeps them once they are made.
WORK = {
    "the rows of a sweep's cells": """
from vllm_scope.request.sites import Place
from vllm_scope.sweeps.source import ReadRows

READ = torch.ones((24, 8192), dtype=torch.bfloat16)

class Result:
    def positions(self, *place):
        return torch.arange(24)
    def __getitem__(self, place):
        return READ

rows = ReadRows(Result())
def work():
    assert rows.at(Place("resid_pre", 1), list(range(24))).sum() == 24 * 8192
""",
    "features": """
from vllm_scope.batch.sparse import SparseRows
from vllm_scope.results.features import SparseFeatures

rows = SparseRows(torch.arange(32, dtype=torch.int32).repeat(400, 1), torch.ones((400, 32)))
tokens = torch.arange(400)
def work():
    assert len(SparseFeatures(rows, tokens)) == 400 * 32
""",
}


def test_a_request_wakes_none_of_torchs_threads() -> None:
    assert {name: threads_made_by(setup) for name, setup in WORK.items()} == dict.fromkeys(WORK, 0)


def test_a_parallel_operation_would_be_seen() -> None:
    rows = "rows = torch.ones((24, 8192))"
    assert threads_made_by(f"{rows}\ndef work():\n    rows[torch.arange(24)]") > 0
