"""Decides when the drain thread looks at the items that wait for it.

Owns:  Pace.
Runs:  `look`, `rest` and `sleep` on the drain thread, the other methods on any thread.

The thread delivers several steps at a time. It looks again after LINGER_S, or sooner if a request
has ended, because its caller waits. The thread shares the GIL with the thread that launches the
model: waking up for each step of 1 ms cost that thread a third of its speed (measured, H200, 0.5B
shape). On a GPU it therefore begins no work during a launch. If no caller looks at values of its
own before its request ends, rows and scores may wait longer: a message of one step costs the
front-end 0.6 ms, one of 16 steps 0.7 to 0.9 ms (measured, 16 requests, two busy cores).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: How long rows may wait for the next step's rows, if some caller follows its request.
LINGER_S = 0.004
#: How long rows may wait if no caller follows its request.
LINGER_UNSEEN_S = 0.08
#: How long the last rows of a request may wait.
LINGER_AT_END_S = 0.002
#: How long the thread waits for a launch to end before it looks all the same.
MOST_LAUNCH_S = 0.05
#: The thread owes REST times its working time as rest. If it owes more than MOST_OWED_S, it rests
#: after each look, even if a request has ended, for LINGER_AT_END_S to MOST_REST_S. Its rest is not
#: longer, because a worker that needs room in a ring waits for the thread. If it owes less, the end
#: of a request cuts its rest short, for example when a few short requests come at once.
REST, MOST_REST_S, MOST_OWED_S = 4, 0.04, 0.2


class Pace:
    """Decides how long the drain thread sleeps and rests. Other threads can end both early.

    Attributes:
        sleeping: True while the thread waits for something to do.
    """

    def __init__(self) -> None:
        self.sleeping = False
        #: Seconds of rest that the thread owes, and when they were counted.
        self._owed, self._rested = 0.0, time.monotonic()
        self._wake = threading.Event()
        #: Since the thread last looked: a request has ended; the thread should look soon, or now.
        self._ended, self._soon, self._now = (threading.Event() for _ in range(3))
        #: Cleared from `begin_launch` to `end_launch`.
        self._between_launches = threading.Event()
        self._between_launches.set()
        #: Running requests whose callers read values of their own as they arrive.
        self._followed: set[int] = set()

    @property
    def is_followed(self) -> bool:
        """True if some caller follows its request."""
        return bool(self._followed)

    def follow(self, key: int) -> None:
        """Look every LINGER_S until this request ends: its caller reads rows as they arrive."""
        if not self._followed:
            self._soon.set()  # the thread may rest for longer
        self._followed.add(key)

    def unfollow(self, key: int) -> None:
        """Note that no caller follows this request any more."""
        self._followed.discard(key)

    def ended(self) -> None:
        """Note that a request has ended. Its caller waits."""
        for news in (self._ended, self._soon):
            if not news.is_set():  # many requests end in one step, and is_set() is faster
                news.set()

    def soon(self) -> None:
        """Let the thread look as soon as if a caller followed its request."""
        self._soon.set()

    def hurry(self) -> None:
        """Let the thread look now, without rest."""
        for news in (self._now, self._ended, self._soon, self._wake, self._between_launches):
            news.set()

    def begin_launch(self) -> None:
        """Keep the drain thread from beginning a look until `end_launch`. The worker's thread
        launches the model in hundreds of operations. Each operation releases the GIL, and would
        have to wait for the drain thread to get the GIL back."""
        self._between_launches.clear()

    def end_launch(self) -> None:
        if not self._between_launches.is_set():
            self._between_launches.set()

    def await_launch(self) -> None:
        """Wait for the end of a launch, unless something waits for the thread (`hurry`). The launch
        may have begun after the call of `hurry`."""
        if not self._now.is_set():
            self._between_launches.wait(MOST_LAUNCH_S)

    def wake(self) -> None:
        """Wake the thread if it sleeps. If it rests, its rest goes on."""
        if self.sleeping:
            self._wake.set()

    def look(self) -> None:
        """Begin a look: clear the events that asked for it."""
        for news in (self._ended, self._soon, self._now):
            news.clear()

    def sleep(self, is_idle: Callable[[], bool]) -> None:
        """Wait for `wake`, unless there is something to do."""
        self.sleeping = True
        if is_idle():
            self._wake.wait()
        self._wake.clear()
        self.sleeping = False

    def rest(self, worked_s: float) -> None:
        """Rest, so that several items gather.

        Args:
            worked_s: CPU seconds of the last look.
        """
        earned = REST * worked_s
        now = time.monotonic()
        self._owed, self._rested = max(0.0, self._owed - now + self._rested) + earned, now
        least, usual = LINGER_AT_END_S, max(LINGER_S, min(earned, MOST_REST_S))
        if self._owed > MOST_OWED_S:
            least = min(max(least, earned), MOST_REST_S)
        if self._now.wait(least):
            return
        if least < usual and self._ended.wait(usual - least):
            return
        linger_s = LINGER_S if self._followed else LINGER_UNSEEN_S
        self._soon.wait(max(0.0, linger_s - max(least, usual)))
