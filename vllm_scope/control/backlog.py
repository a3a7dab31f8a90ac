"""Does work on a thread, about 20 ms after the work was added. No answer waits for this work.

Owns:  Backlog.
Runs:  in the front-end. `add` and `work_off` can be called on any thread.
From:  engine.judge (completions whose verdicts must be counted).

Promise: pieces of work are done one at a time, in the order in which they were added. Before the
process exits normally, the waiting work is done. Between two pieces, the GIL is released.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from vllm_scope.control.background import Background

logger = logging.getLogger("vllm.vllm_scope")
#: Name of the thread.
NAME = "vllm-scope-backlog"
#: Delay of the work, in seconds. During this delay, requests that ended together get their answers.
LATER_S = 0.02
#: Largest number of pieces of work that can wait.
MOST_WAITING = 1024


class Backlog(Background):
    """Work that waits for a thread. If a piece of work raises an error, the error is logged."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._waiting: deque[Callable[[], None]] = deque()
        #: `add` sets this event. The thread clears the event before the thread does the work.
        self._came = threading.Event()
        #: Locked while a piece of work is removed from `_waiting` and done.
        self._working = threading.Lock()
        atexit.register(self.work_off)

    @property
    def waiting(self) -> int:
        """The number of pieces of work that wait."""
        return len(self._waiting)

    def add(self, work: Callable[[], None]) -> None:
        """Add a piece of work. The thread does `work` about LATER_S seconds later. If more than
        MOST_WAITING pieces of work wait, the calling thread does the oldest piece now."""
        self._start()
        self._waiting.append(work)
        if not self._came.is_set():
            self._came.set()
        if len(self._waiting) > MOST_WAITING:
            self._do_one()

    def work_off(self) -> None:
        """Do all work that was added before this call, on the calling thread. If another thread has
        already begun a piece of work, wait for its end."""
        for _ in range(len(self._waiting)):
            self._do_one()
            time.sleep(0)  # releases the GIL, so that other threads can run
        with self._working:  # wait for a piece that another thread does now
            pass

    def _do_one(self) -> None:
        with self._working:
            try:
                work = self._waiting.popleft()
            except IndexError:  # another thread has done the last piece
                return
            try:
                work()
            except Exception:
                logger.exception("vllm-scope: something about a request was not counted")

    def _run(self) -> None:
        while True:
            self._came.wait()
            time.sleep(LATER_S)
            self._came.clear()
            while self._waiting:
                self.work_off()
