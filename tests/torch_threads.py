"""Torch's threads: those that some work makes in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

COUNT = """
import os, time, torch
{setup}
torch.set_num_threads(8)
before = len(os.listdir("/proc/self/task"))
work()
time.sleep(0.1)  # for threads that have just ended
print(len(os.listdir("/proc/self/task")) - before)
"""


def threads_made_by(setup: str) -> int:
    """Args: setup: Python that defines `work`; `torch` is imported."""
    answer = subprocess.run(
        [sys.executable, "-c", COUNT.format(setup=setup)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "8"}, check=True,
    )  # fmt: skip
    return int(answer.stdout)
