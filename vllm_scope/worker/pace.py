"""Decides when the drain thread processes its waiting items.

Owns:  Pace.
Runs:  `await_launch`, `look`, `rest` and `sleep` on the drain thread, the other methods on other
       threads.

The drain thread delivers several steps at a time. A request is followed if its caller reads rows
while the request runs, or if a sink other than `memory` gets its rows. After the thread has
delivered steps, it usually rests for LINGER_S if a request is followed, else for LINGER_UNSEEN_S.
If a request has ended, this rest is shorter, because the request's caller waits for the last rows.
The drain thread shares the GIL with the thread that launches the model. If each step takes 1 ms and
the drain thread wakes up for each step, the launching thread loses a third of its speed (measured
on an H200, with the shape of a 0.5B model). On a GPU, the drain thread therefore starts no work
during a launch. Longer rests save time of the front-end. For a message with the rows of one step,
the front-end needs 0.6 ms. For a message with the rows of 16 steps, it needs only 0.7 to 0.9 ms
(measured with 16 requests, on two busy cores).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: How long the drain thread rests if a request is followed. The rest can be longer; see REST.
LINGER_S = 0.004
#: How long the drain thread rests if no request is followed, and no other thread ends the rest.
LINGER_UNSEEN_S = 0.08
#: How long the drain thread rests if a request has ended. The rest can be longer; see REST.
LINGER_AT_END_S = 0.002
#: The longest time that the drain thread waits for the end of a launch.
MOST_LAUNCH_S = 0.05
#: For each second of work, the drain thread owes REST seconds of rest. If the thread owes more than
#: MOST_OWED_S seconds, each rest takes LINGER_AT_END_S to MOST_REST_S, even if a request has ended.
#: This rest has an upper limit, because a worker that needs room in the arena or in the ring waits
#: for the thread. If the thread owes at most MOST_OWED_S, the end of a request ends the rest.
REST, MOST_REST_S, MOST_OWED_S = 4, 0.04, 0.2


class Pace:
    """Decides how long the drain thread sleeps and rests. Other threads can end each sleep or rest
    early.

    Attributes:
        sleeping: True while the drain thread waits for an item.
    """

    def __init__(self) -> None:
        self.sleeping = False
        #: `_owed`: the seconds of rest that the thread owes. `_rested`: the time of the last change
        #: of `_owed`.
        self._owed, self._rested = 0.0, time.monotonic()
        self._wake = threading.Event()
        #: Three events since the drain thread last processed items. `_ended`: a request has ended.
        #: `_soon`: the thread should process items soon. `_now`: the thread should process items at
        #: once.
        self._ended, self._soon, self._now = (threading.Event() for _ in range(3))
        #: `begin_launch` clears this event, and `end_launch` and `hurry` set this event.
        self._between_launches = threading.Event()
        self._between_launches.set()
        #: The keys of the running requests that are followed.
        self._followed: set[int] = set()

    @property
    def is_followed(self) -> bool:
        """True if a running request is followed."""
        return bool(self._followed)

    def follow(self, key: int) -> None:
        """Follow a request. Until the request ends, the drain thread usually rests for LINGER_S
        instead of LINGER_UNSEEN_S."""
        if not self._followed:
            self._soon.set()  # ends a longer rest
        self._followed.add(key)

    def unfollow(self, key: int) -> None:
        """Record that this request is not followed any more."""
        self._followed.discard(key)

    def ended(self) -> None:
        """Record that a request has ended. The request's caller waits for the last rows."""
        for news in (self._ended, self._soon):
            if not news.is_set():  # is_set() is faster, and many requests can end at once
                news.set()

    def soon(self) -> None:
        """Shorten the rest of the drain thread from LINGER_UNSEEN_S to LINGER_S."""
        self._soon.set()

    def hurry(self) -> None:
        """Let the drain thread process items now, without rest."""
        for news in (self._now, self._ended, self._soon, self._wake, self._between_launches):
            news.set()

    def begin_launch(self) -> None:
        """Let the drain thread start no work until `end_launch`. The worker's thread launches the
        model in hundreds of operations, and each operation releases the GIL. If the drain thread
        worked at the same time, the worker's thread would wait for the GIL after each operation."""
        self._between_launches.clear()

    def end_launch(self) -> None:
        if not self._between_launches.is_set():
            self._between_launches.set()

    def await_launch(self) -> None:
        """Wait for the end of a launch, at most MOST_LAUNCH_S. If `hurry` was called since the last
        `look`, return at once, even if the launch began after the call of `hurry`."""
        if not self._now.is_set():
            self._between_launches.wait(MOST_LAUNCH_S)

    def wake(self) -> None:
        """If the drain thread sleeps, wake the thread. If the thread rests, the rest continues."""
        if self.sleeping:
            self._wake.set()

    def look(self) -> None:
        """Clear the events by which other threads ask the drain thread to process its items."""
        for news in (self._ended, self._soon, self._now):
            news.clear()

    def sleep(self, is_idle: Callable[[], bool]) -> None:
        """If `is_idle()` is True, sleep until another thread calls `wake` or `hurry`."""
        self.sleeping = True
        if is_idle():
            self._wake.wait()
        self._wake.clear()
        self.sleeping = False

    def rest(self, worked_s: float) -> None:
        """Rest, so that several items collect before the drain thread processes items again.

        Args:
            worked_s: The CPU time, in seconds, that the last items took on this thread.
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
