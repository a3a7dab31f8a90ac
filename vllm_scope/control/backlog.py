"""Work that answers do not wait for: done on a thread, a little later.

Owns:  Backlog.
Runs:  in the front-end. `add` and `work_off` on any thread.
From:  engine.judge (completions whose verdicts are to be counted).

Promise: work is done in its order, one piece at a time, also that of the last moment before the
process ends. The thread gives up Python's lock between two pieces.
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
#: Seconds after which the thread begins. Requests that end together have their answers by then.
LATER_S = 0.02
#: Pieces of work that may wait.
MOST_WAITING = 1024


class Backlog(Background):
    """Work that waits for a thread. Its errors are logged."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._waiting: deque[Callable[[], None]] = deque()
        #: The thread has something to do.
        self._came = threading.Event()
        #: Held while a piece of work is taken and done.
        self._working = threading.Lock()
        self._at_exit = False

    @property
    def waiting(self) -> int:
        """How many pieces of work wait."""
        return len(self._waiting)

    def add(self, work: Callable[[], None]) -> None:
        """Do something LATER_S later. If more than MOST_WAITING pieces wait, the calling thread
        does the oldest."""
        self._start()
        if not self._at_exit:
            self._at_exit = True
            atexit.register(self.work_off)
        self._waiting.append(work)
        if not self._came.is_set():
            self._came.set()
        if len(self._waiting) > MOST_WAITING:
            self._do_one()

    def work_off(self) -> None:
        """Do all that was added so far, on the calling thread."""
        for _ in range(len(self._waiting)):
            self._do_one()
            time.sleep(0)  # other threads may have Python's lock between two pieces
        with self._working:  # what another thread has taken is done, too
            pass

    def _do_one(self) -> None:
        with self._working:
            try:
                work = self._waiting.popleft()
            except IndexError:  # another thread was faster
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
