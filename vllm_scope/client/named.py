"""Parts of an answer, by the names of the request's actions.

Owns:  Named.
To:    answers, features.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn, TypeVar

V = TypeVar("V")


class Named(dict[str, V]):
    """A dict whose error for a missing name lists the names that exist."""

    #: The word that the error's text uses for the values.
    what: ClassVar[str]

    def __missing__(self, name: str) -> NoReturn:
        names = ", ".join(map(repr, self)) or "none"
        raise KeyError(f"{name!r} has no {self.what} here; this choice has those of {names}.")
