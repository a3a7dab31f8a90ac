"""The feeder copies rows beside an engine, which wants the cores: no copy wakes torch's threads."""

from __future__ import annotations

from tests.torch_threads import threads_made_by

ROWS = """
import os
import numpy as np
from vllm_scope.feeds.memory import POSITIONS, Field, SharedRows
from vllm_scope.files.buffers import Buffers

fields = [POSITIONS, Field("resid_post.5", "bfloat16", (4096,))]
memory = SharedRows(os.memfd_create("rows"), 512, fields)
rows = torch.ones((256, 3, 4096), dtype=torch.bfloat16)[:, 1]
slots = np.arange(256)[::-1].copy()
def work():
    memory.write(slots, [torch.arange(256), rows])
    positions, found = memory.read(slots, Buffers(0).empty)
    assert positions[0] == 0 and found.view(torch.int16).numpy().min() == 0x3F80
"""


def test_rows_are_copied_in_and_out_without_torchs_threads() -> None:
    assert threads_made_by(ROWS) == 0
