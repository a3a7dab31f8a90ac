"""Processes that tests "spawn" are forked from one process, and differ from spawned ones in nothing
else."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection


def tell(answers: Connection, depth: int) -> None:
    """Send what this process is, and let a process of its own do the same."""
    answers.send((os.getppid(), os.environ.get("ONLY_HERE"), "vllm.v1.engine.core" in sys.modules))
    print(f"process {depth}", flush=True)
    if depth < 2:
        start(answers, depth + 1)


def start(answers: Connection, depth: int) -> int | None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=tell, args=(answers, depth))
    process.start()
    process.join(60)
    return process.exitcode


def test_a_process_has_the_state_of_its_starter_and_the_imports_of_the_origin(monkeypatch, capfd):
    monkeypatch.setenv("ONLY_HERE", "yes")
    ours, theirs = multiprocessing.Pipe()
    assert start(theirs, 1) == 0
    (origin, *first), (again, *second) = ours.recv(), ours.recv()
    assert first == second == ["yes", True]
    assert origin == again != os.getpid()  # a process's own process has the same origin
    assert capfd.readouterr().out == "process 1\nprocess 2\n"
    monkeypatch.delenv("ONLY_HERE")
    start(theirs, 2)
    assert ours.recv() == (origin, None, True)


def test_a_failure_ends_the_process_with_its_code():
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=sys.exit, args=(7,))
    process.start()
    process.join(60)
    assert process.exitcode == 7
