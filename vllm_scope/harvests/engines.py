"""What a harvest asks of an engine.

Owns:  the protocols Engine and Rows.
Runs:  nowhere: only types.
To:    job. `engine.offline.OfflineEngine` is an Engine.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
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


class Engine(Protocol):
    """What computes rows; engine.offline.OfflineEngine is one."""

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
    def compute(
        self, prompts: Iterable[tuple[Context, Sequence[int]]], reads: Sequence[Read]
    ) -> Generator[tuple[Context, Rows]]: ...
    def close(self) -> None: ...
