"""All ranks of an engine give the same answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_scope.engine.worker.proving import agreed

RANK = """
import sys
import torch.distributed as dist
from types import SimpleNamespace
from vllm_scope.engine.worker.proving import agreed

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=4)
# Two stages of two ranks each: the ranks of a stage agree, then those of all stages.
tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
stages = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
groups = [SimpleNamespace(world_size=2, cpu_group=group) for group in (tensor, stages)]
for failing in (None, 0, 3):
    print(agreed("the reason" if rank == failing else None, groups))
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_rank_that_refuses_refuses_for_all(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    answers = [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]
    assert answers == [["None", "the reason", "the reason"]] * 4


def test_one_rank_asks_nobody():
    assert agreed("why", ()) == "why"
    assert agreed(None, ()) is None
