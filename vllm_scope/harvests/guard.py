"""Ends an engine's processes when the process that started them is gone, however it ended.

    python -I guard.py PID ...

vLLM's EngineCore does not see that its front-end was killed: it would keep the device's memory, and
an engine in its place could not start.

Owns:  `guarded`.
Runs:  as a small process beside each engine of several. It reads standard input, which ends when
       the process at the other end ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress


def guarded(pids: Sequence[int]) -> None:
    """Have processes end with this one: they are killed when this process is gone."""
    if pids:
        # -I: modules beside this file do not stand for those of the standard library.
        command = [sys.executable, "-I", __file__, *map(str, pids)]
        # The pipe is never written to. A session of its own: a terminal's Ctrl-C is not for it.
        started = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        _guards.append(started)


#: Their pipes end with this process, and not before.
_guards: list[subprocess.Popen[bytes]] = []


def _main() -> None:
    opened = []
    for pid in map(int, sys.argv[1:]):
        with suppress(ProcessLookupError):
            opened.append(os.pidfd_open(pid))  # stays this process's, if the number is used again
    sys.stdin.buffer.read()
    for fd in opened:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)


if __name__ == "__main__":
    _main()
