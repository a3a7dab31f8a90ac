"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float) -> None:
    """Wait until `holds` returns something true. Fails after `seconds`."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, f"it does not hold after {seconds} s"
        time.sleep(0.001)
