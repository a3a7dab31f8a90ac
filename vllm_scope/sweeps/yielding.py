"""When a sweep may send cells while the engine has other requests.

Owns:  Yielding.
Runs:  where the sweep runs: on the caller's event loop or in an API server process.
From:  engine.frontend.sweeping, which looks for other requests; engine.core.variants, which sees
       requests of other front-ends.

A step with cells in it takes several times as long as a step that only decodes. A few cells in
every step would delay other requests in every step. So a sweep sends some cells at once, waits
until they have ended, and pauses.
"""

from __future__ import annotations

import time
from typing import Final

#: The ids of all requests of sweeps begin with this.
SWEPT: Final = "sweep-"
#: While there are other requests, cells are in the engine for `TIME * share` of the time.
TIME: Final = 0.2
#: The largest number of tokens of the cells that are sent at once.
TOKENS: Final = 256
#: Other requests count as present for this long after the last one was seen, because a client that
#: sends one request after another has none in the engine between two of them.
LINGER_S: Final = 1.0
#: The longest pause. A pause is a multiple of the time that the cells before it took, and that time
#: is long if these cells had to wait in the engine.
LONGEST_PAUSE_S: Final = 10.0


class Yielding:
    """Decides when one sweep waits for other requests.

    Attributes:
        share: the part of a step that the sweep's cells take while there are no other requests.
        elsewhere: True if the engine had requests of other front-ends when it last answered.
    """

    def __init__(self, share: float) -> None:
        self.share, self.elsewhere = share, False
        #: The time until which other requests count as present.
        self._until = 0.0
        #: The time when the running cells were sent, or None; the time when the last cells ended;
        #: the seconds that these took.
        self._sent: float | None = None
        self._ended, self._took = 0.0, 0.0

    def look(self, others: bool) -> bool:
        """True if the sweep must yield to other requests.

        Args:
            others: True if there are other requests now.
        """
        now = time.monotonic()
        if others:
            self._until = now + LINGER_S
        return self.elsewhere or now < self._until

    def waits(self, num_running: int, others: bool) -> bool:
        """True if no cells may be sent now, while `num_running` of the sweep's cells are in the
        engine. Call it once before each group of cells that are sent at once."""
        now = time.monotonic()
        if self._sent is not None and not num_running:
            self._ended, self._took = now, now - self._sent
            self._sent = None
        if not self.look(others):
            self._sent = None
            return False
        return num_running > 0 or now < self._resumes

    def send(self) -> None:
        """Note that cells are sent now, while the sweep yields."""
        if self._sent is None:
            self._sent = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds for which `waits` stays True, if none of the sweep's cells is in the engine and
        no other requests come."""
        ends = self._resumes if self.elsewhere else min(self._resumes, self._until)
        return max(0.0, ends - time.monotonic())

    @property
    def _resumes(self) -> float:
        pause = self._took * (1 / (TIME * self.share) - 1)
        return self._ended + min(pause, LONGEST_PAUSE_S)
