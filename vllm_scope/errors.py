"""The package's errors, and the effect of each error.

ScopeError
  SpecError      the request is wrong        that request only (HTTP 400)
  ConfigError    an option is wrong, or a    refuse to start, or that call
                 package is missing          only
  CapacityError  no room for this request    that request only (HTTP 429)
  CompatError    this vLLM or this model     refuse to start, or refuse taps
                 is not supported
  FileError      a file is damaged, or       that file only
                 cannot be read or written

A message says what is wrong. Where possible, the message also names the given value, the allowed
values, and the next step for the caller. All parts of the package use the functions `checked_...`
to check single values.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any


class _Short(reprlib.Repr):
    """A short repr that reads only the shown keys. reprlib.Repr would sort all keys."""

    def repr_dict(self, x: Any, level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)

    def repr_set(self, x: Any, level: int) -> str:
        return super().repr_set(set(islice(x, self.maxset + 1)), level)

    def repr_frozenset(self, x: Any, level: int) -> str:
        return super().repr_frozenset(frozenset(islice(x, self.maxfrozenset + 1)), level)


_short = _Short()
_short.maxstring = _short.maxother = 80
_short.maxlist = _short.maxtuple = _short.maxdict = 8


def shown(value: object) -> str:
    """The repr of a value for an error text: shortened, and on one line."""
    return re.sub(r"\n\s*", " ", _short.repr(value))


def checked_word(value: object, allowed: Collection[str], where: str) -> str:
    """Return the value. Raises SpecError if it is not one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise SpecError(f"{where} is {shown(value)}; it must be one of {', '.join(allowed)}.")
    return value


def checked_flag(value: object, where: str) -> bool:
    """Return the value. Raises SpecError if it is not a bool."""
    if not isinstance(value, bool):
        raise SpecError(f"{where} is {shown(value)}; it must be true or false.")
    return value


def checked_count(value: object, most: int, where: str) -> int:
    """Return the value. Raises SpecError if it is not a whole number from 1 to `most`."""
    if type(value) is not int or not 1 <= value <= most:
        raise SpecError(f"{where} is {shown(value)}; it must be a whole number from 1 to {most:,}.")
    return value


def checked_ending(path: str | PathLike[str], *endings: str) -> str:
    """The ending of a path. Raises FileError if the ending is not in `endings`."""
    ending = Path(path).suffix
    if ending not in endings:
        listed = (" or " if len(endings) == 2 else ", ").join(endings)
        raise FileError(
            f"{shown(str(path))} does not end with {listed}; give a name that ends with one of "
            "them."
        )
    return ending


def reason_of(error: Exception) -> str:
    """One line that says why another library failed. For most errors, this is the first line of the
    error's text, or, if the text is empty, the name of its class."""
    details = getattr(error, "errors", None)
    text = str(error)
    if "cached snapshot folder" in text:  # Hugging Face's advice is about its own functions
        return (
            "it is in no folder and not in Hugging Face's cache, and nothing may be downloaded "
            "(HF_HUB_OFFLINE); give a folder, or a name that is in the cache"
        )
    if callable(details) and details():  # the first line of pydantic's text is only a count
        first = details()[0]
        where = f"{first['loc'][0]}: " if first["loc"] else ""
        text = where + str(first["msg"]).removeprefix("Value error, ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class ScopeError(Exception):
    """Base of every error that vllm-scope raises."""


class SpecError(ScopeError, ValueError):
    """A request is wrong or not possible. Only that request fails."""


class ConfigError(ScopeError, ValueError):
    """An option is wrong, or a package that the option needs is not installed. If the option is in
    `additional_config["scope"]`, the engine does not start."""


class CapacityError(ScopeError):
    """There is no room for this request now. The caller can send the request again later."""


class UnheldError(CapacityError):
    """A request names vectors by their digests, and EngineCore does not have them. If the caller
    sends the request again, the front-end sends the vectors with it."""


class CompatError(ScopeError):
    """This vLLM, or this model, is not supported."""


class FileError(ScopeError):
    """A file is damaged, is not a file of this package, or cannot be read or written. A call also
    raises this error if the content of its files does not fit its arguments."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """If the block raises a SpecError or CapacityError, put `where` before the error's text. An
    example of `where` is "prompts[3]"."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    except UnheldError as error:
        raise UnheldError(f"{where}: {error}") from None
    except CapacityError as error:
        raise CapacityError(f"{where}: {error}") from None
