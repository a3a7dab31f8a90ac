"""Protocols of a harvest: the engine that computes rows, and the store that writes them.

Owns:  the protocols EngineFacts, Engine, Rows and Store.
Runs:  no code runs: this module has only types.
To:    job. `engine.offline.OfflineEngine` is an Engine. `storing.Storing` is a Store of one engine.
       `several.SeveralEngines` is a Store of several engines, and is their EngineFacts too.
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
    """The facts that are needed to make prompts, and the settings on which rows depend."""

    @property
    def model(self) -> str: ...
    @property
    def most_tokens(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    def settings(self, reads: Sequence[Read]) -> dict[str, Any]:
        """The settings on which rows depend, without the prompts. One setting is `model`."""
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
        versions: package -> version, in the processes of the engines.
    """

    @property
    def found(self) -> Mapping[str, tuple[str, int]]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    def compute(self, contexts: Iterable[Context]) -> Generator[Context]:
        """Yield each context after its rows are computed, in any order. If the caller closes the
        generator early, the computed rows are still written. Raises ScopeError."""
        ...

    def flush(self) -> None:
        """Wait until the rows of all computed contexts are visible. Raises FileError."""
        ...
