"""Decides when a sweep sends cells while the engine has other requests.

Owns:  Yielding.
Runs:  in the process of the sweep, which is the caller's process or an API server process.
From:  engine.frontend.sweeping (looks for other requests of this process), engine.core.variants
       (sees the requests of all front-ends).

A step with cells takes several times as long as a step that only decodes. If every step had a few
cells, other requests would be slower in every step. Therefore a sweep sends a group of cells, waits
until the group has ended, and pauses.
"""

from __future__ import annotations

import time
from typing import Final

#: The ids of all requests of sweeps begin with this prefix.
SWEPT: Final = "sweep-"
#: While there are other requests, the cells of a sweep run for the fraction `TIME * share` of the
#: time.
TIME: Final = 0.2
#: The most tokens in a group of several cells. A group of one cell can have more tokens.
TOKENS: Final = 256
#: Other requests count as present for this many seconds after the sweep last saw one. Otherwise, a
#: client that sends one request after another would count as absent between two requests.
LINGER_S: Final = 1.0
#: The longest pause, in seconds. The length of a pause is a multiple of the time that the group of
#: cells before the pause took. This time is long if the group had to wait in the engine.
LONGEST_PAUSE_S: Final = 10.0


class Yielding:
    """Decides when one sweep waits for other requests.

    Attributes:
        share: the part of a step that cells can take if there are no other requests.
        elsewhere: whether EngineCore has requests outside of sweeps, according to the newest answer
            that contains this information. EngineCore sees the requests of all front-ends,
            including this process.
    """

    def __init__(self, share: float) -> None:
        self.share, self.elsewhere = share, False
        #: The time until which other requests count as present.
        self._until = 0.0
        #: `_sent` is the time when the running cells were sent, or None. `_ended` is the time when
        #: the last group of cells ended. `_took` is how many seconds this group took.
        self._sent: float | None = None
        self._ended, self._took = 0.0, 0.0

    def look(self, others: bool) -> bool:
        """Whether the sweep must yield to other requests.

        Args:
            others: whether the engine has other requests now.
        """
        now = time.monotonic()
        if others:
            self._until = now + LINGER_S
        return self.elsewhere or now < self._until

    def waits(self, num_running: int, others: bool) -> bool:
        """Whether the sweep must wait before it sends more cells.

        The sweep calls this method before each group of cells, and again after each wait.

        Args:
            num_running: how many cells of the sweep are in the engine.
            others: whether the engine has other requests now.
        """
        now = time.monotonic()
        if self._sent is not None and not num_running:
            self._ended, self._took = now, now - self._sent
            self._sent = None
        if not self.look(others):
            self._sent = None
            return False
        return num_running > 0 or now < self._resumes

    def send(self) -> None:
        """Record that the sweep sends cells now, while other requests are present."""
        if self._sent is None:
            self._sent = time.monotonic()

    @property
    def pause(self) -> float:
        """The number of seconds for which `waits` stays True, if the sweep has no running cells and
        no other requests arrive."""
        ends = self._resumes if self.elsewhere else min(self._resumes, self._until)
        return max(0.0, ends - time.monotonic())

    @property
    def _resumes(self) -> float:
        pause = self._took * (1 / (TIME * self.share) - 1)
        return self._ended + min(pause, LONGEST_PAUSE_S)
