"""A harvest writes its shards beside an engine, which wants the cores: no figure and no copy wakes
torch's threads, one for each core."""

from __future__ import annotations

import pytest

from tests.torch_threads import threads_made_by

pytestmark = pytest.mark.long

#: Each makes torch's threads, if anything does. A process keeps them once they are made. numba
#: imports scipy.linalg, whose OpenBLAS makes threads of its own, which wait: they are there before.
WORK = {
    "figures": """
import scipy.linalg
from vllm_scope.harvests.statistics import Statistics

rows = torch.ones((1024, 3, 4096), dtype=torch.bfloat16)[:, 1]
def work():
    assert Statistics.of_rows(iter([rows])).counts[0] == 1024
""",
    "figures of wide rows": """
import scipy.linalg
from vllm_scope.harvests.statistics import Statistics

rows = torch.ones((3, 70_000), dtype=torch.bfloat16)
def work():
    assert Statistics.of_rows(iter([rows])).counts[0] == 3
""",
    "shards of long requests and of short ones": """
import tempfile
import scipy.linalg
import numpy as np
from vllm_scope.files import FileOptions, RequestRecord, Writer
from vllm_scope.files.roots import make_publisher
from vllm_scope.files.sharded import ShardedLayout
from vllm_scope.harvests.statistics import Statistics

table = torch.ones((2000, 3, 512), dtype=torch.bfloat16)
folder = tempfile.mkdtemp()
options, publisher = FileOptions.parse({"root": folder}), make_publisher(folder, fsync=False)
layout = ShardedLayout(options, publisher, Statistics.summary)
writer = Writer(options, publisher, layout, copies=False)
def work():
    for count in [2000, 2000, *[20] * 200]:
        request = writer.begin()
        request.write("resid_post", 1, np.arange(count), table[:count, 1])
        request.finish(RequestRecord("", range(count), (), "toy", count, count))
    writer.close()
""",
}


def test_a_shard_wakes_none_of_torchs_threads() -> None:
    assert {name: threads_made_by(setup) for name, setup in WORK.items()} == dict.fromkeys(WORK, 0)
