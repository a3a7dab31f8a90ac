"""Calls the server for `read`, `steer` and `watch`, shows errors, and parses options."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console
from rich.text import Text

from vllm_scope.errors import ScopeError
from vllm_scope.request.sites import MAX_LAYERS

if TYPE_CHECKING:
    from vllm_scope.client import ScopeClient, ScopeData

#: A layer's number, or the first and the last number of a range.
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class Server:
    """A server's address, and the fields of each request to it."""

    url: str
    api_key: str | None
    max_tokens: int
    temperature: float

    @property
    def fields(self) -> dict[str, float]:
        return {"max_tokens": self.max_tokens, "temperature": self.temperature}


@contextmanager
def asking(server: Server, console: Console) -> Iterator[ScopeClient]:
    """Yield a client of the server. A ScopeError or an OSError in the `with` block ends the program
    with status 1, after a sentence about the error (no sentence for a BrokenPipeError)."""
    try:
        from vllm_scope.client import ScopeClient, UnreachableError
    except ImportError as error:
        _fail(console, str(error))
    try:
        with ScopeClient(server.url, server.api_key) as client:
            yield client
    except BrokenPipeError:  # the reader of the pipe has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except UnreachableError as error:
        _fail(console, f"{error} Start a server there (vllm serve), or name another with --url.")
    except (ScopeError, OSError) as error:
        _fail(console, sentence_of(error))


def print_answer(console: Console, text: Text) -> None:
    """Print a model's answer. If the output is a pipe or a file, long lines are not wrapped."""
    console.print(text, soft_wrap=not console.is_terminal)


def sentence_of(error: Exception) -> str:
    """The sentence to print for an error of this package, a system error or an ImportError."""
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"there is no file {error.filename}; give the path of one that is there."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; give another path, or correct this path."
    said = str(error) or type(error).__name__
    if isinstance(error, ImportError):  # without httpx, KEYS cannot be imported
        return said
    from vllm_scope.client.messages import KEYS

    return said.replace(KEYS, "give the server's key with --api-key, or as VLLM_API_KEY")


def _fail(console: Console, sentence: str) -> NoReturn:
    console.print(Text(sentence, "red"), soft_wrap=True)
    sys.exit(1)


def scope_of(server: Server, scope: ScopeData | None) -> ScopeData:
    """The `scope` of an answer to a request with actions. Raises ScopeError if the answer has no
    `scope`."""
    if scope is None:
        raise ScopeError(
            f"{server.url} ignored the actions of the request; it is a server without vllm-scope. "
            "Give the URL of a server with vllm-scope as --url."
        )
    return scope


def check_whole(scope: ScopeData) -> None:
    """Raises ScopeError if a request is not complete."""
    if scope.status != "complete":
        raise ScopeError(f"the request is {scope.status}: {scope.error or 'rows were lost'}")


def layers_of(text: str) -> str | list[int]:
    """The layers that a text names: "all", or a list of numbers for a text such as 2,5 or 0-3."""
    if text == "all":
        return text
    found: list[int] = []
    for part in text.split(","):
        given = _RANGE.fullmatch(part)
        if given is None:
            raise ScopeError(f"layers are 'all', or numbers such as 2,5 or 0-3, not {text!r}.")
        some = range(int(given[1]), int(given[2] or given[1]) + 1)
        if not some:
            raise ScopeError(
                f"layers have {part!r}; the first number of a range must be the smaller."
            )
        if len(some) > MAX_LAYERS:
            raise ScopeError(f"layers have {part!r}, {len(some):,} layers; at most {MAX_LAYERS:,}.")
        found += some
    return found


def printable(text: str) -> str:
    """A text whose characters are escaped if they are not printable, except newlines and tabs."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
