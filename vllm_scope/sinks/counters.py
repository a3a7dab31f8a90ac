"""Totals of one sink.

Owns:  Counters.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Totals of one sink since the engine started. The last three fields are current values.

    Attributes:
        rows, bytes: number of rows and scores that the sink got, and their size in bytes.
        waits, wait_ms: how often, and for how many ms, the drain thread has waited for free room.
        drops: number of dropped rows and scores.
        spilled_bytes: number of bytes that have waited on disk.
        errors: number of calls that raised an exception, plus the number of requests that failed
            because the sink stalled or did not publish their rows.
        queue_bytes, held_bytes, spill_bytes: bytes of the rows that wait in the queue's memory, of
            the rows that are kept for running requests, and of the rows that wait on disk.
    """

    rows: int = 0
    bytes: int = 0
    waits: int = 0
    wait_ms: float = 0.0
    drops: int = 0
    spilled_bytes: int = 0
    errors: int = 0
    queue_bytes: int = 0
    held_bytes: int = 0
    spill_bytes: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )
