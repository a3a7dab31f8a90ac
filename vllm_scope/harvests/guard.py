"""Ends an engine's processes when the process that started them is gone, however it ended.

    python -I guard.py PID

vLLM's EngineCore does not see that its front-end was killed: it would keep the device's memory, and
an engine in its place could not start.

Owns:  `guard`.
Runs:  as a small process beside each engine of several, in the process group that it ends. It waits
       for the process of the given id, without a pipe: forked processes would hold that open.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress


def guard() -> None:
    """Have processes end with this one: those that it starts from now on, and theirs, are killed
    when it is gone. It gets a process group of its own, and thus no Ctrl-C of the terminal."""
    with suppress(PermissionError):  # it leads a group already
        os.setsid()
    # -I: modules beside this file do not stand for those of the standard library.
    command = [sys.executable, "-I", __file__, str(os.getpid())]
    _guards.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))


#: Kept: a Popen that is forgotten warns that its process still runs.
_guards: list[subprocess.Popen[bytes]] = []


def _main() -> None:
    parent = int(sys.argv[1])
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(parent)
        if os.getppid() == parent:  # else it ended before, and the id may be another's
            select.select([fd], [], [])
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process too


if __name__ == "__main__":
    _main()
