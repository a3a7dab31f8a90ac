"""Ready rows, for benchmarks without an engine.

Runs:  in the process of `benchmarks.harvest_rate`; or in a process that `benchmarks.stream` starts
       in place of `vllm_scope.feeds.feeder`.

With ready rows, a benchmark measures only the way of rows from the engine to a batch or to the
disk. The measured time contains no computation of a model.
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

#: The number of tokens in a context, and of numbers in a row.
LENGTH, WIDTH = 512, 4096


@dataclass(frozen=True)
class Ready:
    """The rows of a context. All contexts have the same rows."""

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
        """Rows of `resid_post`. A token's rows are adjacent, as an engine delivers them."""
        table = torch.randn(LENGTH, num_layers, WIDTH).bfloat16()
        return Ready([
            Column(("resid_post", layer, "after"), table[:, layer], np.arange(LENGTH), (WIDTH,))
            for layer in range(num_layers)
        ])  # fmt: skip


class ReadyEngine:
    """An engine that returns ready rows, and computes no rows."""

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
        """Do nothing, because the engine has no resources."""


if __name__ == "__main__":
    from vllm_scope.feeds.feeder import main

    stand_in: Any = ModuleType("vllm_scope.engine.offline")
    stand_in.OfflineEngine = ReadyEngine
    sys.modules[stand_in.__name__] = stand_in
    main()
