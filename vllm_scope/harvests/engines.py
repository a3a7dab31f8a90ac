"""Protocols of a harvest: the engine that computes rows, and the store that writes them.

Owns:  the protocols EngineFacts, Engine, Rows and Store.
Runs:  nowhere: only types.
To:    job. `engine.offline.OfflineEngine` is an Engine. `storing.Storing` is a Store of one engine;
       `several.SeveralEngines` is a Store of several engines, and their EngineFacts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from vllm_scope.harvests.contexts import Context
from vllm_scope.request.actions import Read
from vllm_scope.results.column import Column


class Rows(Protocol):
    """The rows of a context. A ScopeResult implements this protocol."""

    @property
    def status(self) -> str: ...
    @property
    def expected(self) -> int: ...
    @property
    def error(self) -> str | None: ...
    def columns(self) -> list[Column]: ...


class EngineFacts(Protocol):
    """Facts of an engine: those needed to make prompts, and the settings on which rows depend."""

    @property
    def model(self) -> str: ...
    @property
    def most_tokens(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    def settings(self, reads: Sequence[Read]) -> dict[str, Any]:
        """The settings, besides the prompts, on which rows depend; `model` is one of them."""
        ...

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]: ...


class Engine(EngineFacts, Protocol):
    """An engine that computes rows."""

    @property
    def num_layers(self) -> int | None:
        """The number of the model's layers; None if it is not known."""
        ...

    def compute(
        self, prompts: Iterable[tuple[Context, Sequence[int]]], reads: Sequence[Read]
    ) -> Generator[tuple[Context, Rows]]: ...
    def close(self) -> None: ...


class Store(Protocol):
    """Computes contexts and writes their rows to shards.

    Attributes:
        found: name -> SHA-256 and size of each file that the store has made visible.
        versions: package -> version, where the engines run.
    """

    @property
    def found(self) -> Mapping[str, tuple[str, int]]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    def compute(self, contexts: Iterable[Context]) -> Generator[Context]:
        """Yield each context once its rows are computed, in any order. If the generator ends early,
        the rows that were computed are written. Raises ScopeError."""
        ...

    def flush(self) -> None:
        """Return once the rows of all computed contexts are visible. Raises FileError."""
        ...
