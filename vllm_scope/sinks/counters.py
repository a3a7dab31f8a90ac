"""Totals of one sink.

Owns:  Counters, and their sum over the threads of a sink.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Totals of one sink since the start. The last three are present values.

    Attributes:
        rows, bytes: rows and scores that the sink was given.
        waits, wait_ms: how often and how long the drain thread waited for room.
        drops: rows that were dropped.
        spilled_bytes: bytes that waited on disk.
        errors: calls that raised, and stalls.
        queue_bytes, held_bytes, spill_bytes: bytes in the queue, of running requests, on disk.
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
