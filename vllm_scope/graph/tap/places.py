"""Keeps the table row of each content, for the tables on the device.

Owns:  Places; FreePlaces, for contents that the host never looks up.
Runs:  in every worker, on the main thread. Does not write to the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Content = TypeVar("Content", bound=Hashable)


class Places(Generic[Content]):
    """Numbered places for contents. A content keeps its place while it is held. After that, the
    place is idle, and another content can replace it. The longest idle place is replaced first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._numbers: dict[Content, int] = {}
        self._contents: dict[int, Content] = {}
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, content: Content) -> int | None:
        number = self._numbers.get(content)
        if number is not None and number in self._idle:
            self._idle.move_to_end(number)
        return number

    def content(self, number: int) -> Content:
        return self._contents[number]

    def take(self, count: int) -> list[int]:
        """Allocate free places until `give_back`. `find` does not find contents at these places."""
        first = len(self._free) - count
        taken, self._free[first:] = self._free[first:], []
        return taken[::-1]

    def give_back(self, numbers: Iterable[int]) -> None:
        self._free += numbers

    def put(self, content: Content) -> int:
        number = self._free.pop()
        self._numbers[content] = number
        self._contents[number] = content
        self._idle[number] = None
        return number

    def hold(self, number: int) -> None:
        self._holders[number] += 1
        self._idle.pop(number, None)

    def hold_all(self, contents: Sequence[Content]) -> tuple[list[int], list[int]] | None:
        """Hold different contents. If new contents need room, contents in idle places are dropped.

        Returns:
            The place of each content, and the indices of new contents. None if there is no room.
        """
        numbers, new, known = self._numbers, [], []
        for i, content in enumerate(contents):
            number = numbers.get(content)
            if number is None:
                new.append(i)
            else:
                self.hold(number)
                known.append(number)
        while len(new) > len(self._free) and self._idle:
            self.drop(next(iter(self._idle)))
        if len(new) > len(self._free):
            self.release_all(known)
            return None
        for i in new:
            number = self._free.pop()
            numbers[contents[i]], self._contents[number] = number, contents[i]
            self._holders[number] = 1
        return [numbers[content] for content in contents], new

    def release(self, number: int) -> int:
        """Undo one hold. Returns the number of holds left."""
        self._holders[number] -= 1
        if not self._holders[number]:
            self._idle[number] = None
        return self._holders[number]

    def release_all(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.release(number)

    def idle(self) -> Iterator[int]:
        """The places that no request holds, the longest idle place first."""
        return iter(self._idle)

    def drop(self, number: int) -> None:
        del self._idle[number]
        del self._numbers[self._contents.pop(number)]
        self._free.append(number)


class FreePlaces:
    """The free places as an array, because one request allocates thousands of places.

    Attributes:
        count: the number of free places.
    """

    def __init__(self, count: int) -> None:
        self._free = np.arange(count - 1, -1, -1, dtype=np.int32)
        self.count = count

    def take(self, count: int) -> NDArray[np.int32]:
        """Allocate free places, int32 [count]. The caller must check `count` first."""
        self.count -= count
        return self._free[self.count : self.count + count].copy()

    def give_back(self, places: NDArray[np.int32]) -> None:
        self._free[self.count : self.count + len(places)] = places
        self.count += len(places)
