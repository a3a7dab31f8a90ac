"""How much a request may say in a face's words, checked before anything is built.

Owns:  Room (what is left for one request), and checks of counts: of items, of JSON text, of
       numbers in lists, of base64.
Runs:  in the front-end, on the event loop of an API server.
To:    vllm_lens and steering_http.

Promise: a refusal costs a few lengths, or a count of characters. No check looks through a list
or an object whose length was not compared before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_scope.errors import SpecError
from vllm_scope.request.bounded_json import PACKED, decode
from vllm_scope.request.selectors import MAX_ITEMS
from vllm_scope.request.spec import MAX_EDITS, MAX_READS, MAX_SPEC_BYTES

#: In one request, by what is counted.
MOST = {
    "edits": MAX_EDITS,
    "reads": MAX_READS,
    "positions": MAX_ITEMS,
    # All layers of 80 with 8192 numbers each, and more. Python makes 20 of them in a microsecond.
    "numbers in lists": 1 << 20,
    # What a spec has room for: base64 of float32.
    "numbers": MAX_SPEC_BYTES * 3 // 16,
}
_NO_NUMBERS = (str, bytes, list, tuple, Mapping)


class Room:
    """What one request has said so far, and may still say."""

    def __init__(self) -> None:
        self._taken = dict.fromkeys(MOST, 0)

    def take(self, what: str, count: int, where: str) -> None:
        """Count something of the request.

        Args:
            what: a key of MOST.

        Raises:
            SpecError: that is more than a request may have.
        """
        self._taken[what] += count
        if self._taken[what] > MOST[what]:
            more = f" {PACKED}" if what == "numbers in lists" else ""
            raise SpecError(
                f"{where} brings the request to {self._taken[what]:,} {what}; at most "
                f"{MOST[what]:,}.{more}"
            )


def few(value: Any, most: int, what: str, where: str) -> None:
    """Raise SpecError where a list or an object has more than `most` items."""
    if isinstance(value, list | tuple | Mapping) and len(value) > most:
        raise SpecError(f"{where} has {len(value):,} {what}; at most {most:,}.")


def parsed(value: Any, where: str) -> Any:
    """What JSON says, where it is still text.

    Raises:
        SpecError: not JSON, or more than a request may say.
    """
    if not isinstance(value, str):
        return value
    found = decode(value, where, MOST["numbers in lists"])
    if isinstance(found, str):
        raise SpecError(f"{where} is a JSON string in a JSON string; encode it once.")
    return found


def check_vector(value: Any, size: int, room: Room, where: str) -> None:
    """Raise SpecError where a list or an array is not one vector of `size` numbers.

    What is neither is let pass.
    """
    of_lists = isinstance(value, list | tuple)
    shape: tuple[int, ...] = (len(value),) if of_lists else getattr(value, "shape", ())
    if len(shape) == 1 and shape[0] != size:
        raise SpecError(f"{where} has {shape[0]:,} numbers; this model's rows have {size}.")
    if not of_lists:
        return
    room.take("numbers in lists", size, where)
    if any(issubclass(kind, _NO_NUMBERS) for kind in set(map(type, value))):
        raise SpecError(f"{where} has more than numbers; it is a list of {size} numbers.")


def check_base64(text: Any, num_bytes: int, where: str) -> None:
    """Raise SpecError where base64 has another length than that of `num_bytes` bytes."""
    length = 4 * -(-num_bytes // 3)
    if isinstance(text, str) and len(text) != length:
        raise SpecError(
            f"{where}.data has {len(text):,} characters; the {num_bytes:,} bytes that dtype and "
            f"shape say take {length:,} in base64."
        )
