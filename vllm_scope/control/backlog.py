"""Work for which no answer waits: a thread does it a little later.

Owns:  Backlog.
Runs:  in the front-end. `add` and `work_off` on any thread.
From:  engine.judge (completions whose verdicts are to be counted).

Promise: work is done in the order in which it was added, one piece at a time. Work that waits when
the process ends is done too. The thread releases the GIL between two pieces.
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
#: Largest number of pieces of work that may wait.
MOST_WAITING = 1024


class Backlog(Background):
    """Work that waits for a thread. Its errors are logged."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._waiting: deque[Callable[[], None]] = deque()
        #: Set if the thread has work to do.
        self._came = threading.Event()
        #: Held while a piece of work is taken and done.
        self._working = threading.Lock()
        atexit.register(self.work_off)

    @property
    def waiting(self) -> int:
        """The number of pieces of work that wait."""
        return len(self._waiting)

    def add(self, work: Callable[[], None]) -> None:
        """Have the thread do `work` about LATER_S later. If more than MOST_WAITING pieces wait, the
        calling thread does the oldest one now."""
        self._start()
        self._waiting.append(work)
        if not self._came.is_set():
            self._came.set()
        if len(self._waiting) > MOST_WAITING:
            self._do_one()

    def work_off(self) -> None:
        """Do all work that was added so far, on the calling thread."""
        for _ in range(len(self._waiting)):
            self._do_one()
            time.sleep(0)  # other threads may take the GIL between two pieces
        with self._working:  # wait for the piece that another thread has taken
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
