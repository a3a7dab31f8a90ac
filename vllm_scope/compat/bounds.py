"""Checks the sizes of the values of a face's keys, before anything is built from these values.

Owns:  Room, which limits the sizes of one request; checks of lists, objects, JSON text and vectors.
Runs:  in the front-end. For HTTP requests, the event loop of the API server runs this code.
To:    vllm_lens and steering_http.

Promise: the refusal of a value costs a few comparisons of lengths, or a few passes over the
characters of a JSON text. Each check compares the length of a list before it reads the items.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.bounded_json import PACKED, decode
from vllm_scope.request.selectors import MAX_ITEMS
from vllm_scope.request.spec import MAX_EDITS, MAX_READS, MAX_SPEC_BYTES
from vllm_scope.vectors.hooks import mapping

#: Maps each quantity that is counted to the limit of this quantity in one request.
MOST = {
    "edits": MAX_EDITS,
    "reads": MAX_READS,
    "positions": MAX_ITEMS,
    # Enough for 80 layers with 8,192 numbers each. Python creates about 20 numbers in 1 µs.
    "numbers in lists": 1 << 20,
    # The number of float32 numbers that fit into the largest spec as base64.
    "numbers": MAX_SPEC_BYTES * 3 // 16,
}
_NO_NUMBERS = (str, bytes, list, tuple, Mapping)


class Room:
    """Counts one request's edits, reads and other quantities, which are the keys of MOST.

    A count above its limit in MOST is refused.
    """

    def __init__(self) -> None:
        self._taken = dict.fromkeys(MOST, 0)

    def take(self, what: str, count: int, where: str) -> None:
        """Add `count` to the request's count of `what`, which is a key of MOST.

        Raises:
            SpecError: the request's count of `what` is above the limit in MOST.
        """
        # `min` keeps the count short enough for the error text below, because Python does not print
        # a number of more than 4,300 digits.
        self._taken[what] += min(count, sys.maxsize)
        if self._taken[what] > MOST[what]:
            more = f" {PACKED}" if what == "numbers in lists" else ""
            raise SpecError(
                f"{where} brings the request to {self._taken[what]:,} {what}; at most "
                f"{MOST[what]:,}.{more}"
            )


def few(value: object, most: int, what: str, where: str) -> None:
    """Raise SpecError if a list or an object has more than `most` items."""
    if isinstance(value, list | tuple | Mapping) and len(value) > most:
        raise SpecError(f"{where} has {len(value):,} {what}; at most {most:,}.")


def few_fields(value: object, most: int, what: str, where: str) -> Mapping[object, object]:
    """The fields of an object, or {} for None. Raises SpecError for more than `most` fields."""
    few(value, most, what, where)
    return mapping(value, where)


def check_fields(
    fields: Mapping[object, object], needed: Sequence[str], optional: Sequence[str], where: str
) -> None:
    """Raise SpecError if a needed field is missing, or if there is an unknown field."""
    if not set(needed) <= set(fields) <= {*needed, *optional}:
        raise SpecError(
            f"{where} has {shown(sorted(fields, key=str))}; its fields are "
            f"{', '.join((*needed, *optional))}."
        )


def parsed(value: object, where: str) -> object:
    """Decode a JSON text. A value that is not a str is returned unchanged.

    Raises:
        SpecError: the text is not JSON, is the JSON of a string, or has too many items.
    """
    if not isinstance(value, str):
        return value
    found: object = decode(value, where, MOST["numbers in lists"])
    if isinstance(found, str):
        raise SpecError(f"{where} is a JSON string in a JSON string; encode the value one time.")
    return found


def check_vector(value: object, size: int, room: Room, where: str) -> None:
    """Check a vector that is a list or a 1-D array. Any other value is accepted here.

    Raises:
        SpecError: the vector's length is not `size`, an item of a list is a text, a list or an
            object, or the request's lists have too many numbers.
    """
    numbers = value if isinstance(value, list | tuple) else None
    shape = list(getattr(value, "shape", ())) if numbers is None else [len(numbers)]
    if len(shape) == 1 and shape[0] != size:
        raise SpecError(f"{where} has {shape[0]:,} numbers; this model's rows have {size}.")
    if numbers is None:
        return
    room.take("numbers in lists", size, where)
    if any(issubclass(kind, _NO_NUMBERS) for kind in set(map(type, numbers))):
        raise SpecError(f"{where} must be a list of {size} numbers, and has other items.")
