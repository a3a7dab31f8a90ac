"""Ends an engine's processes when the process that started them is gone, however it ended.

    python -I guard.py PID            # the process group of the guard
    python -I guard.py PID CHILD...   # these processes

vLLM's EngineCore does not see that its front-end was killed: it would keep the device's memory, and
an engine in its place could not start.

Owns:  `guard`, for an engine whose process does nothing else; `guarded`, for an engine that the
       caller's process starts.
Runs:  as a small process beside each engine. It waits for the process with the given id. A pipe
       would not tell of its end, because forked processes would hold the pipe open.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def guard() -> None:
    """Have processes end with this one: those that it starts from now on, and theirs, are killed
    when it is gone. It gets a process group of its own, and thus no Ctrl-C of the terminal."""
    with suppress(PermissionError):  # it leads a group already
        os.setsid()
    # -I: modules beside this file do not stand for those of the standard library.
    command = [sys.executable, "-I", __file__, str(os.getpid())]
    _guards.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))


@contextmanager
def guarded() -> Iterator[None]:
    """Have the processes that are started in the `with` block killed when this one is gone. This
    holds once the block has ended. The guard is not killed with this process's group, and it ends
    when all of them have ended."""
    before = _started()
    yield
    pids = sorted(_started() - before)
    if pids:
        command = [sys.executable, "-I", __file__, *map(str, (os.getpid(), *pids))]
        null = subprocess.DEVNULL
        _guards.append(subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, start_new_session=True
        ))  # fmt: skip


def _started() -> set[int]:
    """The processes that this one has started, and those that they have. Without Python's trackers
    of resources, which remove what killed processes leave in shared memory."""
    import psutil

    found = set()
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if not any("resource_tracker" in word for word in one.cmdline()):
                found.add(one.pid)
    return found


#: Kept: a Popen that is forgotten warns that its process still runs.
_guards: list[subprocess.Popen[bytes]] = []


def _main() -> None:
    parent, *children = map(int, sys.argv[1:])
    running = []
    for pid in children or (os.getpid(),):  # this process does not end before the other one
        with suppress(ProcessLookupError):
            running.append(os.pidfd_open(pid))
    if not _gone_before(parent, running):
        return
    if not children:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # this process too
    for fd in running:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)


def _gone_before(parent: int, others: list[int]) -> bool:
    """Wait until a process is gone. False once all others are gone before it.

    Args:
        others: their pidfds.
    """
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return True
    if os.getppid() != parent:  # it ended before, and the id may be another's
        return True
    while others:
        ready = select.select([fd, *others], [], [])[0]
        if fd in ready:
            return True
        others = [one for one in others if one not in ready]
    return False


if __name__ == "__main__":
    _main()
