"""Protocols of the engine that computes the rows of a harvest, and of the store that writes rows.

Owns:  the protocols EngineFacts, Engine, Rows and Store.
Runs:  nowhere, because this file has only types.
To:    job. `engine.offline.OfflineEngine` implements Engine. `storing.Storing` implements Store for
       one engine. `several.SeveralEngines` implements Store and EngineFacts for several engines.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from vllm_scope.harvests.contexts import Context
from vllm_scope.request.actions import Read
from vllm_scope.results.column import Column


class Rows(Protocol):
    """The computed rows of a context. A ScopeResult implements this protocol."""

    @property
    def status(self) -> str: ...
    @property
    def expected(self) -> int: ...
    @property
    def error(self) -> str | None: ...
    def columns(self) -> list[Column]: ...


class EngineFacts(Protocol):
    """The properties of an engine that a harvest needs to make prompts, and the engine's
    settings."""

    @property
    def model(self) -> str: ...
    @property
    def most_tokens(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    def settings(self, reads: Sequence[Read]) -> dict[str, Any]:
        """The engine's settings that change the rows. One of these settings is `model`."""
        ...

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]: ...


class Engine(EngineFacts, Protocol):
    """An engine that computes the rows of prompts."""

    @property
    def num_layers(self) -> int | None:
        """The number of the model's layers, or None if this number is not known."""
        ...

    def compute(
        self, prompts: Iterable[tuple[Context, Sequence[int]]], reads: Sequence[Read]
    ) -> Generator[tuple[Context, Rows]]: ...
    def close(self) -> None: ...


class Store(Protocol):
    """Computes contexts and writes their rows to shards.

    Attributes:
        found: the files that the store has made visible. Maps the name of each file to (SHA-256,
            size).
        versions: maps packages to their versions in the processes of the engines.
    """

    @property
    def found(self) -> Mapping[str, tuple[str, int]]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    def compute(self, contexts: Iterable[Context]) -> Generator[Context]:
        """Yield each context after its rows are computed, in any order. Raises ScopeError.

        If the caller closes the generator early, the store still writes the computed rows.
        """
        ...

    def flush(self) -> None:
        """Wait until the rows of all computed contexts are visible. Raises FileError."""
        ...
