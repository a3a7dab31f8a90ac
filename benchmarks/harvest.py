"""A harvest of the toy model, beside a loop with Hugging Face's `output_hidden_states`.

    python -m benchmarks.harvest

Both in one run, on the same token ids, at the same layers, without the time that a model takes to
start. The loop computes one document at a time and keeps its rows in memory; the harvest writes
shards, hashes and figures. The loop is measured with one thread and with all, and the faster one
counts. Turns alternate, because other programs' load drifts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

import vllm_scope
from toyworld.world import documents, fact_questions
from vllm_scope import Read
from vllm_scope.harvests.contexts import Long

TOYWORLD = Path(__file__).parent.parent / "toyworld" / "model"
LAYERS = (2, 4)
CONTEXT = 128
#: Documents of the loop, which is slow where other programs run beside its threads.
LOOPED = 100
#: Arguments of the LLM.
ENGINE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 4096,
    "gpu_memory_utilization": 0.3, "enable_prefix_caching": False,
}  # fmt: skip


@dataclass(frozen=True)
class Rate:
    """Documents and tokens per second."""

    documents: float
    tokens: float

    @staticmethod
    def since(started: float, ids: Sequence[Sequence[int]]) -> Rate:
        seconds = time.perf_counter() - started
        return Rate(len(ids) / seconds, sum(map(len, ids)) / seconds)


def facts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the toy world's shortest facts, such as "The capital of Ritova is Rindos."."""
    texts = [
        "".join(question) for held_out in (False, True) for question in fact_questions(held_out)
    ]
    short = [ids for ids in tokenizer(texts)["input_ids"] if len(ids) <= 9]
    return list(islice(cycle(short), count))


def whole(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the toy world's documents."""
    return [tokenizer(one.text)["input_ids"] for one in documents(0, "train", 0, count)]


def loop(model: Any, ids: Sequence[Sequence[int]], num_threads: int) -> Rate:
    torch.set_num_threads(num_threads)
    rows = []
    started = time.perf_counter()
    with torch.inference_mode():
        for some in ids:
            states = model(torch.tensor([some]), output_hidden_states=True).hidden_states
            rows.append([states[layer + 1][0].clone() for layer in LAYERS])
    return Rate.since(started, ids)


def harvest(llm: Any, ids: Sequence[Sequence[int]], long: Long = "split") -> Rate:
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        vllm_scope.harvest(
            list(map(list, ids)), Read("resid_post", layers=list(LAYERS)), model=llm, out=out,
            long=long, context=CONTEXT, file_mib=16, progress=False,
        )  # fmt: skip
        return Rate.since(started, ids)


def compare(
    llm: Any, model: Any, ids: Sequence[Sequence[int]], long: Long = "split", turns: int = 3
) -> float:
    """The best rate of the harvest over the best of the loop. Prints all."""
    mean = sum(map(len, ids)) / len(ids)
    print(f"{len(ids)} documents of {mean:.1f} tokens, {long}; documents and tokens per second")
    best: dict[str, Rate] = {}
    for _ in range(turns):
        now = {"harvest": harvest(llm, ids, long)}
        for num_threads in sorted({1, os.cpu_count() or 1}):
            now[f"loop, {num_threads} threads"] = loop(model, ids[:LOOPED], num_threads)
        for name, rate in now.items():
            print(f"  {name:20} {rate.documents:8.0f} {rate.tokens:8.0f}", flush=True)
            best[name] = max(rate, best.get(name, rate), key=lambda one: one.tokens)
    loops = max(rate.tokens for name, rate in best.items() if name != "harvest")
    ratio = best["harvest"].tokens / loops
    print(f"  the harvest is {ratio:.1f} times as fast as the loop", flush=True)
    return ratio


def huggingface() -> tuple[Any, Any]:
    """The toy model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TOYWORLD, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(TOYWORLD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--documents", type=int, default=2000)
    count = parser.parse_args().documents
    from vllm import LLM

    model, tokenizer = huggingface()
    llm = LLM(str(TOYWORLD), **ENGINE)
    for ids in (facts(tokenizer, count), whole(tokenizer, count // 4)):
        compare(llm, model, ids, "split")
        compare(llm, model, ids, "pack")


if __name__ == "__main__":
    main()
