"""What a sink has done.

Owns:  Counters, and their sum over the threads of a sink.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Of one sink, since the start; the last three are of now.

    Attributes:
        rows: rows and scores that the sink was given.
        bytes: of these.
        waits, wait_ms: how often and how long the drain thread waited for room.
        drops: rows that were dropped.
        spilled_bytes: that went to disk in between.
        errors: calls that raised, and stalls.
        queue_bytes, held_bytes, spill_bytes: that wait.
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
