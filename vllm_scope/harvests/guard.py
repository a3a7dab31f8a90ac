"""Ends an engine's processes when the process that started them is gone, however it ended.

    python -I guard.py PID            # ends the process group of the guard
    python -I guard.py PID CHILD...   # ends these processes

vLLM's EngineCore does not notice that its front-end was killed. Without a guard it would keep the
device's memory, and a new engine could not start.

Owns:  `guard`, for an engine whose process does nothing else; `guarded`, for an engine that the
       caller's process starts.
Runs:  as a small process beside each engine. The guard waits for the end of process PID. A pipe
       would not show this end, because forked processes would hold the pipe open.
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
    """Start a guard that kills the processes of this process's group when this process is gone.

    This process gets a group of its own, so the terminal's Ctrl-C does not reach it. The processes
    that it starts from now on, and their children, are in that group.
    """
    with suppress(PermissionError):  # this process leads a group already
        os.setsid()
    # -I: a module beside this file must not be imported in place of the standard library's.
    command = [sys.executable, "-I", __file__, str(os.getpid())]
    _guards.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))


@contextmanager
def guarded() -> Iterator[None]:
    """Start a guard that kills the processes started in the `with` block when this process is gone.

    The guard starts when the block ends. It is in a session of its own, so it is not killed with
    this process's group. It ends when all guarded processes have ended.
    """
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
    """Ids of the processes that this one has started, and of their children. Python's resource
    trackers are left out: they must remove what killed processes leave in shared memory."""
    import psutil

    found = set()
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if not any("resource_tracker" in word for word in one.cmdline()):
                found.add(one.pid)
    return found


#: Kept, because Python warns if a Popen is collected while its process runs.
_guards: list[subprocess.Popen[bytes]] = []


def _main() -> None:
    parent, *children = map(int, sys.argv[1:])
    running = []
    # Without children, the guard's own id takes their place: the guard does not end before PID.
    for pid in children or (os.getpid(),):
        with suppress(ProcessLookupError):
            running.append(os.pidfd_open(pid))
    if not _gone_before(parent, running):
        return
    if not children:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # kills the guard too
    for fd in running:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)


def _gone_before(parent: int, others: list[int]) -> bool:
    """Wait until `parent` or all others are gone. Returns True if `parent` was gone first.

    Args:
        others: pidfds of the other processes.
    """
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return True
    if os.getppid() != parent:  # the parent has ended; another process may have its id now
        return True
    while others:
        ready = select.select([fd, *others], [], [])[0]
        if fd in ready:
            return True
        others = [one for one in others if one not in ready]
    return False


if __name__ == "__main__":
    _main()
