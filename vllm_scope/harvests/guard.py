"""Ends an engine's processes after the process that started them has ended or was killed.

    python -I guard.py PID            # ends the process group of the guard
    python -I guard.py PID CHILD...   # ends these processes

vLLM's EngineCore does not notice that its front-end was killed. Without a guard, EngineCore would
keep the device's memory, and a new engine could not start.

Owns:  `guard`, for an engine in a process that has no other work; `guarded`, for an engine that the
       caller's process starts.
Runs:  in one small process for each engine. The guard waits until the process PID has ended. The
       guard does not wait on a pipe from PID, because processes that PID forked keep such a pipe
       open.
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
    """Start a guard. After this process has ended, the guard kills all processes of this process's
    group.

    If this process does not lead a process group yet, this function makes a new group for it.
    Ctrl-C in the terminal then does not end this process. Processes that this process starts later,
    and their children, are in the same group.
    """
    with suppress(PermissionError):  # this process already leads a group
        os.setsid()
    # With -I, Python does not import a file of this folder in place of a standard module.
    command = [sys.executable, "-I", __file__, str(os.getpid())]
    _guards.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))


@contextmanager
def guarded() -> Iterator[None]:
    """Start a guard. After this process has ended, the guard kills the processes that the `with`
    block has started.

    The guard starts when the block ends without an exception. The guard has a separate session, so
    that a signal to this process's group does not end the guard. If all guarded processes end
    earlier, the guard ends too.
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
    """Ids of the processes that this process has started, and of the children of these processes.

    Python's resource trackers are left out, because they free the shared memory of killed
    processes.
    """
    import psutil

    found = set()
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if not any("resource_tracker" in word for word in one.cmdline()):
                found.add(one.pid)
    return found


#: The Popen objects of the guards. They are kept here, because Python warns if a Popen object is
#: deleted while its process runs.
_guards: list[subprocess.Popen[bytes]] = []


def _main() -> None:
    parent, *children = map(int, sys.argv[1:])
    running = []
    # Without children, the list has only the guard itself. The guard still runs, so `_gone_before`
    # returns only after PID has ended.
    for pid in children or (os.getpid(),):
        with suppress(ProcessLookupError):
            running.append(os.pidfd_open(pid))
    if not _gone_before(parent, running):
        return
    if not children:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # kills the guard itself too
    for fd in running:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)


def _gone_before(parent: int, others: list[int]) -> bool:
    """Wait until `parent` or all `others` have ended. Returns True if `parent` ended first.

    Args:
        parent: the id of a process.
        others: the pidfds of other processes.
    """
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return True
    if os.getppid() != parent:  # the parent has ended, and another process may now have its id
        return True
    while others:
        ready = select.select([fd, *others], [], [])[0]
        if fd in ready:
            return True
        others = [one for one in others if one not in ready]
    return False


if __name__ == "__main__":
    _main()
