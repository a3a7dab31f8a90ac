"""Rows that are ready, in place of an engine that computes them.

Runs:  in the process of `benchmarks.harvest_rate`; or in a process that `benchmarks.stream` starts
       in place of `vllm_scope.feeds.feeder`.

They show what the way from the engine to the batch or to the disk carries, without a model's time.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence
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

    found: list[Column]
    status: str = "complete"
    error: str | None = None

    @property
    def expected(self) -> int:
        return LENGTH * len(self.found)

    def columns(self) -> list[Column]:
        return self.found

    @staticmethod
    def of(num_layers: int) -> Ready:
        """Of `resid_post`; a token's rows lie one behind another, as an engine delivers them."""
        table = torch.randn(LENGTH, num_layers, WIDTH).bfloat16()
        return Ready([
            Column(("resid_post", layer, "after"), table[:, layer], np.arange(LENGTH), (WIDTH,))
            for layer in range(num_layers)
        ])  # fmt: skip


class ReadyEngine:
    """Computes nothing."""

    most_tokens, vocabulary, end, num_layers, model = LENGTH, 1 << 20, None, None, "ready"

    def __init__(
        self, model: str = "ready", options: object = None, sites: object = (), num_layers: int = 1
    ) -> None:
        self._rows = Ready.of(num_layers)

    def settings(self, reads: object) -> dict[str, Any]:
        return {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        raise NotImplementedError

    def compute(self, prompts: Iterable[tuple[Any, Any]], reads: object) -> Generator[Any]:
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
