"""Rows per second of `vllm_scope.stream`, compared with a loop over `generate` with a Read.

    python -m benchmarks.stream             # both parts
    python -m benchmarks.stream --ready     # the second part, without an engine

The first part measures rows per second of an engine. All modes use the same documents of the toy
world, the same layers and the same engine options. One mode runs after another. The time of the
engine's start is left out. The loop computes 64 prompts at a time and joins their rows to batches.
The feed mixes the rows. The time of each mode begins after its first batch. By then, a feed has
filled half of its buffer.

The second part measures GB per second of ready rows (`benchmarks.ready`, 4096 bf16 values each), in
turns with a copy within memory that is used again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

import vllm_scope
from benchmarks import ready
from benchmarks.harvest import ENGINE, LAYERS, TOYWORLD
from benchmarks.readback import copied
from toyworld.world import documents
from vllm_scope import Read, scope
from vllm_scope.feeds import start

READ = Read("resid_post", layers=list(LAYERS))
BATCH, TOGETHER = 1024, 64


def loop(llm: Any, ids: list[list[int]]) -> Iterator[Tensor]:
    """Batches of BATCH rows of the first layer, in order. Rows left at the end are dropped."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, ignore_eos=True, extra_args=scope(READ)
    )
    waiting: list[Tensor] = []
    for first in range(0, len(ids), TOGETHER):
        prompts = [{"prompt_token_ids": some} for some in ids[first : first + TOGETHER]]
        for output in llm.generate(prompts, params, use_tqdm=False):
            waiting.append(output.scope["resid_post", LAYERS[0]])
        rows = torch.cat(waiting)
        whole = len(rows) // BATCH * BATCH
        yield from rows[:whole].split(BATCH)
        waiting = [rows[whole:]]


def fed(ids: list[list[int]], model: Any, **options: Any) -> Iterator[Tensor]:
    with vllm_scope.stream(ids, READ, model=model, batch_size=BATCH, **options) as feed:
        for batch in feed:
            yield batch["resid_post", LAYERS[0]]


def rate(batches: Iterator[Tensor]) -> float:
    """Rows per second after the first batch."""
    next(batches)
    started, count = time.perf_counter(), 0
    for batch in batches:
        count += len(batch)
    return count / (time.perf_counter() - started)


def gigabytes_per_second(num_contexts: int = 600, turns: int = 5) -> tuple[float, float]:
    """GB per second of a feed of ready rows, and of a copy of memory. Medians of the turns."""
    start.COMMAND = ("-m", "benchmarks.ready")
    ids, read, copy = [[1] * ready.LENGTH] * num_contexts, Read("resid_post", layer=0), copied()
    found: list[tuple[float, float]] = []
    for _ in range(turns):
        with vllm_scope.stream(ids, read, model="ready", batch_size=BATCH) as feed:
            next(feed)
            started, num_bytes = time.perf_counter(), 0
            for batch in feed:
                num_bytes += batch["resid_post", 0].nbytes
            seconds = time.perf_counter() - started
        started = time.perf_counter()
        num_copied = copy()
        found.append((num_bytes / seconds, num_copied / (time.perf_counter() - started)))
    rates = tuple(zip(*found, strict=True))
    return median(rates[0]) / 1e9, median(rates[1]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ready", action="store_true")
    if not parser.parse_args().ready:
        of_an_engine()
    fed_rate, copy_rate = gigabytes_per_second()
    print(f"rows that are ready {fed_rate:.2f} GB/s, a copy {copy_rate:.2f} GB/s", flush=True)


def of_an_engine() -> None:
    from transformers import AutoTokenizer
    from vllm import LLM

    tokenizer = AutoTokenizer.from_pretrained(TOYWORLD)
    ids = [tokenizer(one.text)["input_ids"] for one in documents(0, "train", 0, 4000)]
    small = {"buffer_rows": 8 * BATCH}
    print("a process", rate(fed(ids, str(TOYWORLD), engine=ENGINE, **small)), flush=True)
    llm = LLM(str(TOYWORLD), **ENGINE)
    for _ in range(2):
        print("the loop", rate(loop(llm, ids)), flush=True)
        print("an LLM", rate(fed(ids, llm, **small)), flush=True)


if __name__ == "__main__":
    main()
