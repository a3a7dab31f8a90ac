"""When a sweep may send cells while the engine has other requests.

Owns:  Yielding.
Runs:  in the process that runs the sweep: on the caller's event loop or in an API server process.
From:  engine.frontend.sweeping, which looks for other requests; engine.core.variants, which sees
       requests of other front-ends.

A step with cells takes several times as long as a step that only decodes. A few cells in every step
would delay other requests in every step. So a sweep sends a group of cells, waits until the group
has ended, and pauses.
"""

from __future__ import annotations

import time
from typing import Final

#: The ids of all requests of sweeps begin with this prefix.
SWEPT: Final = "sweep-"
#: While the engine has other requests, cells are in the engine for `TIME * share` of the time.
TIME: Final = 0.2
#: The most tokens in one group of cells.
TOKENS: Final = 256
#: After the last other request was seen, other requests count as present for this many seconds. A
#: client that sends one request after another has no request in the engine for moments.
LINGER_S: Final = 1.0
#: The longest pause, in seconds. A pause is a multiple of the time that the group of cells before
#: the pause took. If that group had to wait in the engine, its time was long.
LONGEST_PAUSE_S: Final = 10.0


class Yielding:
    """Decides when one sweep waits for other requests.

    Attributes:
        share: the part of a step that the sweep's cells take if there are no other requests.
        elsewhere: True if the engine's last answer said that it had requests of other front-ends.
    """

    def __init__(self, share: float) -> None:
        self.share, self.elsewhere = share, False
        #: The time until which other requests count as present.
        self._until = 0.0
        #: `_sent`: the time when the running cells were sent, or None. `_ended`: the time when the
        #: last cells ended. `_took`: the seconds that the last cells took.
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
        """True if the sweep must not send cells now. `num_running` of its cells are in the engine.
        The sweep calls this one time before each group of cells."""
        now = time.monotonic()
        if self._sent is not None and not num_running:
            self._ended, self._took = now, now - self._sent
            self._sent = None
        if not self.look(others):
            self._sent = None
            return False
        return num_running > 0 or now < self._resumes

    def send(self) -> None:
        """Record that a sweep that yields sends cells now."""
        if self._sent is None:
            self._sent = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds for which `waits` stays True, if the sweep has no running cells and no other
        requests arrive."""
        ends = self._resumes if self.elsewhere else min(self._resumes, self._until)
        return max(0.0, ends - time.monotonic())

    @property
    def _resumes(self) -> float:
        pause = self._took * (1 / (TIME * self.share) - 1)
        return self._ended + min(pause, LONGEST_PAUSE_S)
