"""Which content each row of a device table has.

Owns:  Places.
Runs:  in every worker, on its main thread; writes nothing to the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Content = TypeVar("Content", bound=Hashable)


@dataclass
class _Place:
    number: int
    holders: int = 0


class Places(Generic[Content]):
    """Numbered places for contents. A content keeps its place while it is held; after that
    until the place is needed, the longest unused first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._places: dict[Content, _Place] = {}
        self._contents: dict[int, Content] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def full(self) -> bool:
        return not self._free

    def find(self, content: Content) -> int | None:
        place = self._places.get(content)
        if place is None:
            return None
        if place.number in self._idle:
            self._idle.move_to_end(place.number)
        return place.number

    def at(self, content: Content) -> int:
        return self._places[content].number

    def content(self, number: int) -> Content:
        return self._contents[number]

    def put(self, content: Content) -> int:
        number = self._free.pop()
        self._places[content] = _Place(number)
        self._contents[number] = content
        self._idle[number] = None
        return number

    def hold(self, number: int) -> None:
        self._places[self._contents[number]].holders += 1
        self._idle.pop(number, None)

    def release(self, number: int) -> int:
        """Undo one hold. Returns the number of holds left."""
        place = self._places[self._contents[number]]
        place.holders -= 1
        if place.holders == 0:
            self._idle[number] = None
        return place.holders

    def idle(self) -> Iterator[int]:
        """The places that nobody holds, the longest unused first."""
        return iter(self._idle)

    def drop(self, number: int) -> None:
        del self._idle[number]
        del self._places[self._contents.pop(number)]
        self._free.append(number)
