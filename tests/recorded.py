"""An engine of recorded rows, for harvests that are killed often: it starts at once.

    python -m tests.recorded DATASET OUT '{"long": "pack"}'

The row of a token is the table's row of its id, changed by its position; a context's rows are thus
a function of its tokens, as a model's are. Contexts end out of order, as in an engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_scope import Read
from vllm_scope.files import FileOptions
from vllm_scope.harvests.documents import find_documents
from vllm_scope.harvests.job import Harvest, Job
from vllm_scope.harvests.manifest import locked
from vllm_scope.harvests.shards import take_left
from vllm_scope.harvests.storing import Storing
from vllm_scope.results.column import Column

VOCABULARY, WIDTH = 300, 64


@dataclass
class Rows:
    """A context's rows at every stream of the reads."""

    token_ids: list[int]
    reads: tuple[Read, ...]
    table: Tensor
    status: str = "complete"
    error: str | None = None

    @property
    def expected(self) -> int:
        return len(self.token_ids) * len(self.streams)

    @property
    def streams(self) -> list[tuple[str, int]]:
        return [(read.site, layer) for read in self.reads for layer in read.layer_numbers or (0,)]

    def columns(self) -> list[Column]:
        at = np.arange(len(self.token_ids))
        rows = self.table[torch.tensor(self.token_ids)] + torch.from_numpy(at)[:, None] / 8
        return [
            Column((*s, "after"), (rows * (s[1] + 1)).bfloat16(), at, (WIDTH,))
            for s in self.streams
        ]


@dataclass
class RecordedEngine:
    """See the file's head.

    Attributes:
        computed: names of the contexts that were computed, in order.
        more: further settings.
    """

    most_tokens: int = 40
    model: str = "recorded"
    dtype: str = "bfloat16"
    vocabulary: int = VOCABULARY
    end: int | None = 0
    num_layers: int | None = 6
    computed: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def settings(self, reads: tuple[Read, ...]) -> dict[str, Any]:
        return {"model": self.model, "dtype": self.dtype} | self.more

    @cached_property
    def table(self) -> Tensor:
        return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[1 + byte for byte in text.encode()] for text in texts]

    def compute(self, prompts: Any, reads: tuple[Read, ...]) -> Iterator[tuple[Any, Rows]]:
        together: list[tuple[Any, Any]] = []
        for item in prompts:
            together.append(item)
            if len(together) == 7:
                yield from self._ended(together, reads)
                together = []
        yield from self._ended(together, reads)

    def _ended(self, some: list[Any], reads: tuple[Read, ...]) -> Iterator[tuple[Any, Rows]]:
        for context, ids in reversed(some):
            self.computed.append(context.name)
            yield context, Rows(list(ids), reads, self.table)

    def close(self) -> None:
        """Nothing is open."""


READS = (Read("resid_post", layers=[1, 3]), Read("embed"))


def harvest(
    dataset: Any, out: Any, engine: RecordedEngine | None = None, **options: Any
) -> Harvest:
    """A harvest by a recorded engine, into small shards."""
    named = {name: options.pop(name) for name in ("column", "id_column") if name in options}
    reads = options.pop("reads", READS)
    files = FileOptions.parse({"root": str(out), "file_mib": 1})
    job = Job(find_documents(dataset, **named), reads, files, progress=False, **options)
    engine = engine or RecordedEngine()
    with locked(str(out)):
        take_left(files)
        with closing(Storing(engine, reads, files)) as store:
            return job.run(engine, store)


if __name__ == "__main__":
    recorded = RecordedEngine()
    harvest(sys.argv[1], sys.argv[2], recorded, **json.loads(sys.argv[3]))
    print(json.dumps(recorded.computed))
