"""Assigns rows of the device tables to their contents (programs, vectors, operations).

Owns:  Places; FreePlaces, for places whose contents the host never looks up.
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
    """Numbered places of a table. Each place can have a content. A content keeps its place while
    the content is held. When no hold is left, the place is idle. The place keeps its content until
    a new content needs the place. The place that has been idle longest is used first."""

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
        """Allocate free places, which the caller later gives back with `give_back`. `find` does not
        know the contents of these places."""
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
        """Hold several contents, which must be distinct. If no place is free for a new content, an
        idle place is used.

        Returns:
            The place of each content, and the indices of new contents in `contents`. None if there
            are too few free and idle places; in this case no content is held.
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
        """Undo one hold. Returns the number of holds that the place still has."""
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
    """The free places of a table. An array stores the places, because one request allocates
    thousands of places.

    Attributes:
        count: the number of free places.
    """

    def __init__(self, count: int) -> None:
        self._free = np.arange(count - 1, -1, -1, dtype=np.int32)
        self.count = count

    def take(self, count: int) -> NDArray[np.int32]:
        """Allocate free places, and return their numbers, int32 [count]. The caller must first
        check that enough places are free."""
        self.count -= count
        return self._free[self.count : self.count + count].copy()

    def give_back(self, places: NDArray[np.int32]) -> None:
        self._free[self.count : self.count + len(places)] = places
        self.count += len(places)
