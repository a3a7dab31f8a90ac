"""The process of a feed whose rows are ready, in place of an engine that computes them.

Runs:  started by `benchmarks.stream`, as `vllm_scope.feeds.feeder` is started.

It shows what the way from the engine to the batch carries, without a model's time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from vllm_scope.results.column import Column

#: Tokens of a context, and numbers of a row.
LENGTH, WIDTH = 512, 4096


@dataclass(frozen=True)
class Ready:
    """Rows of a context: the same each time."""

    column: Column
    status: str = "complete"
    expected: int = LENGTH
    error: str | None = None

    def columns(self) -> list[Column]:
        return [self.column]


class ReadyEngine:
    """Computes nothing."""

    most_tokens, vocabulary, end, num_layers, model = LENGTH, 1 << 20, None, None, "ready"

    def __init__(self, model: str, options: object, sites: object) -> None:
        rows = torch.randn(LENGTH, WIDTH).bfloat16()
        label = ("resid_post", 0, "after")
        self._rows = Ready(Column(label, rows, np.arange(LENGTH), (WIDTH,)))

    def settings(self, reads: object) -> dict[str, Any]:
        return {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        raise NotImplementedError

    def compute(self, prompts: Iterable[tuple[Any, Any]], reads: object) -> Iterator[Any]:
        for context, _ in prompts:
            yield context, self._rows

    def close(self) -> None:
        """Nothing is open."""


if __name__ == "__main__":
    from vllm_scope.feeds.feeder import main

    stand_in: Any = ModuleType("vllm_scope.engine.offline")
    stand_in.OfflineEngine = ReadyEngine
    sys.modules[stand_in.__name__] = stand_in
    main()
