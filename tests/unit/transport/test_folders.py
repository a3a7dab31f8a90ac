"""Folders in the temporary one: none is left by a server, however its processes end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from tests.warm_start import cold
from vllm_scope.server.store import Store
from vllm_scope.transport.folders import RUN, end_run, hold, prefix
from vllm_scope.transport.receiver import KIND, Receiver

#: What an API server holds.
API_SERVER = """
import os, sys, time
from pathlib import Path
from vllm_scope.transport.receiver import Receiver
from vllm_scope.server.store import Store

receiver = Receiver(lambda message: None, lambda header: None)
store = Store(Path(sys.argv[1]), os.environ["VLLM_SCOPE_RUN"], 10_000, 600.0)
memory = bytearray(b"x") * (1 << 28)  # to let go of which takes a while
print("ready", flush=True)
time.sleep(60)
"""
#: What the first process of a server does: it starts API servers, and kills them.
SERVER = """
import atexit, os, subprocess, sys
from vllm_scope.transport.folders import end_run

results, code = sys.argv[1:]
atexit.register(end_run, os.environ["VLLM_SCOPE_RUN"], os.getpid(), results)
command = [sys.executable, "-c", code, results]
children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
for child in children:
    assert child.stdout.readline() == b"ready\\n"
print(len(os.listdir(os.environ["TMPDIR"])), len(os.listdir(results)))
for child in children:
    child.kill()  # and it is not waited for
"""


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The temporary folder, and that of results."""
    found = tmp_path / "t", tmp_path / "results"
    for place in found:
        place.mkdir()
    monkeypatch.setenv("TMPDIR", str(found[0]))
    monkeypatch.setattr(tempfile, "tempdir", str(found[0]))
    return found


def test_folders_of_killed_api_servers_are_removed_by_the_process_that_started_them(
    places, monkeypatch
):
    monkeypatch.setenv(RUN, "0123456789abcdef" * 2)
    command = [sys.executable, "-c", SERVER, str(places[1]), API_SERVER]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == ["2", "1"]
    assert [list(place.iterdir()) for place in places] == [[], []]


def test_only_folders_that_no_process_holds_are_removed(places):
    living, left, other = (places[0] / f"{prefix(KIND)}{name}" for name in ("1-a", "1-b", "2-a"))
    for folder in (living, left, other):
        folder.mkdir()
    holder = hold(living)
    started = time.monotonic()
    end_run("1", os.getpid(), str(places[1]))
    assert time.monotonic() - started < 1, "nobody waits for what is this process's own"
    assert sorted(places[0].iterdir()) == [living, other]
    end_run("2", os.getpid() + 1)
    assert other.exists(), "a forked process ends nothing"
    os.close(holder)


def _end_with_a_receiver(place):
    tempfile.tempdir = place
    Receiver(lambda message: None, lambda header: None)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_child_process_that_ends_leaves_no_folder(method, places):
    """Forked children of multiprocessing never come to atexit."""
    with cold():
        context = multiprocessing.get_context(method)
    child = context.Process(target=_end_with_a_receiver, args=(str(places[0]),))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert list(places[0].iterdir()) == []


def test_folders_of_a_killed_server_are_removed_by_the_next_one(places):
    code = (
        "import os, signal; from vllm_scope.transport.receiver import Receiver; "
        "r = Receiver(lambda m: None, lambda h: None); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    (left,) = places[0].iterdir()
    os.utime(left, (time.time() - 3600,) * 2)
    Receiver(lambda message: None, lambda header: None).close()
    assert list(places[0].iterdir()) == []


def test_a_running_process_keeps_its_results(places):
    store = Store(places[1], "feedbeef", 10_000, 600.0)
    end_run("feedbeef", os.getpid(), str(places[1]))
    assert list(places[1].iterdir())
    store.close()
    assert not list(places[1].iterdir())
