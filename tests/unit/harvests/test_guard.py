"""Processes that end when the one that started them is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

#: Starts a process, then one in a `guarded` block that has a child, and says their ids.
SCRIPT = """
import psutil, subprocess, sys, time
from vllm_scope.harvests.guard import guarded
sleep = "import time; time.sleep(300)"
nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
before = subprocess.Popen([sys.executable, "-c", sleep])
with guarded():
    inside = subprocess.Popen([sys.executable, "-c", nested])
    while not psutil.Process(inside.pid).children():
        time.sleep(0.01)
after = subprocess.Popen([sys.executable, "-c", sleep])
print(before.pid, inside.pid, after.pid, flush=True)
{then}
"""


def _script(then: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{then}", then)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    before, inside, after = (psutil.Process(int(pid)) for pid in process.stdout.readline().split())
    return process, [before, inside, after, *inside.children()]


def _run(processes: list[psutil.Process]) -> list[bool]:
    return [one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes]


def _soon(processes: list[psutil.Process], wanted: list[bool]) -> list[bool]:
    end = time.monotonic() + 10
    while (found := _run(processes)) != wanted and time.monotonic() < end:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_was_started_inside_ends_with_a_killed_process(number):
    process, some = _script("time.sleep(300)")
    try:
        assert _run(some) == [True] * 4
        os.kill(process.pid, number)
        process.wait()
        assert _soon(some, [True, False, True, False]) == [True, False, True, False]
    finally:
        for one in some:
            if one.is_running():
                one.kill()


def test_the_guard_ends_when_nothing_is_left_to_guard():
    process, some = _script("inside.wait(); time.sleep(300)")
    try:
        guards = [one for one in psutil.Process(process.pid).children() if "-I" in one.cmdline()]
        assert len(guards) == 1
        for one in some[::-1]:
            one.kill()
        assert _soon(guards, [False]) == [False]
        assert process.poll() is None
    finally:
        process.kill()


def test_a_block_that_starts_nothing_needs_no_guard():
    script = "import psutil\nfrom vllm_scope.harvests.guard import guarded\n"
    script += "with guarded(): pass\nprint(len(psutil.Process().children()))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.split() == ["0"], found.stderr
