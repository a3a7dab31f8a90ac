"""What a harvest asks of an engine, and of what writes its rows.

Owns:  the protocols EngineFacts, Engine, Rows and Store.
Runs:  nowhere: only types.
To:    job. `engine.offline.OfflineEngine` is an Engine. `storing.Storing` is a Store of one engine;
       `several.SeveralEngines` is a Store, and the facts of its engines.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from vllm_scope.harvests.contexts import Context
from vllm_scope.request.actions import Read
from vllm_scope.results.column import Column


class Rows(Protocol):
    """The rows of a context; a ScopeResult is one."""

    @property
    def status(self) -> str: ...
    @property
    def expected(self) -> int: ...
    @property
    def error(self) -> str | None: ...
    def columns(self) -> list[Column]: ...


class EngineFacts(Protocol):
    """What prompts are made with, and what rows depend on beside them."""

    @property
    def model(self) -> str: ...
    @property
    def most_tokens(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    def settings(self, reads: Sequence[Read]) -> dict[str, Any]:
        """What rows depend on beside their prompts, `model` among it."""
        ...

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]: ...


class Engine(EngineFacts, Protocol):
    """What computes rows."""

    @property
    def num_layers(self) -> int | None:
        """Of the model; None: not known."""
        ...

    def compute(
        self, prompts: Iterable[tuple[Context, Sequence[int]]], reads: Sequence[Read]
    ) -> Generator[tuple[Context, Rows]]: ...
    def close(self) -> None: ...


class Store(Protocol):
    """What computes contexts and writes their rows to shards.

    Attributes:
        found: name -> SHA-256 and size of each file that it has made visible.
        versions: package -> version, where the engines run.
    """

    @property
    def found(self) -> Mapping[str, tuple[str, int]]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    def compute(self, contexts: Iterable[Context]) -> Generator[Context]:
        """Each context once its rows are computed, in no certain order. If it ends early, the rows
        that were computed are written. Raises ScopeError."""
        ...

    def flush(self) -> None:
        """Return once the rows of all contexts that were computed are visible. Raises FileError."""
        ...
