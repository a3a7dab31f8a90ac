"""Work that answers do not wait for is done once, in order, and soon, or when somebody asks."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import pytest

from vllm_scope.control.backlog import MOST_WAITING, Backlog

PATIENCE_S = 60


@pytest.fixture
def idle(monkeypatch):
    """A backlog whose thread does not wake."""
    monkeypatch.setattr(Backlog, "_run", lambda self: None)
    return Backlog()


def test_the_thread_does_everything_in_order():
    done, last = [], threading.Event()
    backlog = Backlog()
    for i in range(100):
        backlog.add(lambda i=i: done.append(i))
    backlog.add(last.set)
    assert last.wait(PATIENCE_S)
    assert done == list(range(100))
    assert backlog.waiting == 0


def test_the_thread_does_not_begin_at_once():
    backlog, done = Backlog(), threading.Event()
    began = time.monotonic()
    backlog.add(done.set)
    assert time.monotonic() - began > 0.015 or not done.is_set()
    assert done.wait(PATIENCE_S)


def test_who_asks_waits_for_what_another_thread_is_doing(idle):
    doing, may_end = threading.Event(), threading.Event()
    done = []

    def slow():
        doing.set()
        may_end.wait(PATIENCE_S)
        done.append("slow")

    idle.add(slow)
    other = threading.Thread(target=idle.work_off)
    other.start()
    doing.wait(PATIENCE_S)
    threading.Timer(0.05, may_end.set).start()
    idle.work_off()
    assert done == ["slow"]
    other.join()


def test_who_asks_does_not_wait_for_what_comes_later(idle):
    done = []

    def more():
        done.append(0)
        idle.add(more)

    idle.add(more)
    idle.work_off()
    assert done == [0]
    assert idle.waiting == 1


def test_a_flood_is_worked_off_as_it_comes(idle):
    done = []
    for i in range(MOST_WAITING + 10):
        idle.add(lambda i=i: done.append(i))
    assert idle.waiting == MOST_WAITING
    assert done == list(range(10))


def test_an_error_is_logged_and_what_comes_after_it_is_done(idle, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    done = []
    idle.add(lambda: 1 // 0)
    idle.add(lambda: done.append(1))
    idle.work_off()
    assert done == [1]
    assert "ZeroDivisionError" in caplog.text


def test_what_waits_when_the_process_ends_is_done():
    code = (
        "from vllm_scope.control.backlog import Backlog\n"
        "backlog = Backlog()\n"
        "for i in range(900): backlog.add(lambda i=i: print(i))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(i) for i in range(900)]
