"""Processes that tests "spawn" are forked from one process, with the state of a spawned process."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.warm_start import cold


def tell(answers: Connection, depth: int) -> None:
    """Send what this process is, and let a process of its own do the same."""
    imported = "vllm.v1.engine.core" in sys.modules
    answers.send((os.getppid(), os.environ.get("ONLY_HERE"), torch.get_num_threads(), imported))
    print(f"process {depth}", flush=True)
    if depth < 2:
        assert start(tell, answers, depth + 1) == 0


def start(target, *arguments) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


def test_a_process_has_the_state_of_its_starter_and_the_imports_of_the_origin(monkeypatch, capfd):
    monkeypatch.setenv("ONLY_HERE", "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as vLLM sets it for a worker
    ours, theirs = multiprocessing.Pipe()
    assert start(tell, theirs, 1) == 0
    (origin, *first), (again, *second) = ours.recv(), ours.recv()
    assert first == second == ["yes", 1, True]
    assert origin == again != os.getpid()  # a process's own process has the same origin
    assert capfd.readouterr().out == "process 1\nprocess 2\n"
    monkeypatch.delenv("ONLY_HERE")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert start(tell, theirs, 2) == 0
    assert ours.recv() == (origin, None, 2, True)


def test_in_a_cold_block_processes_are_spawned():
    ours, theirs = multiprocessing.Pipe()
    with cold():
        assert start(tell, theirs, 2) == 0
    parent, _, _, imported = ours.recv()
    assert (parent, imported) == (os.getpid(), False)


def leave(path: Path) -> None:
    atexit.register(path.write_text, "ended")
    sys.exit(7)


def end_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_process_ends_as_a_spawned_one(tmp_path):
    assert start(leave, tmp_path / "said") == 7
    assert (tmp_path / "said").read_text() == "ended"
    assert start(end_by_signal) == -signal.SIGKILL
