"""A harvest of the toy model, compared with loops that use Hugging Face's `output_hidden_states`.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m benchmarks.harvest  # vLLM in this process
    python -m benchmarks.harvest                                   # vLLM in processes of its own

All modes read the same layers, in one run. The time of a model's start is left out. The harvest
computes all documents. A loop computes only the first of these documents (LOOPED says how many). A
loop keeps its rows in memory. The harvest writes shards, hashes and figures. One loop computes one
document at a time. The other loop computes padded batches of documents, so its rows differ in their
last bits. Each loop is measured with one thread and with all threads, and the faster figure counts.
The modes take turns, because the load of other programs changes. The loops have a process of their
own, because vLLM binds the threads of the process in which vLLM computes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import vllm_scope
from benchmarks.turns import Ratio, ratio_of
from toyworld.world import documents, fact_questions
from vllm_scope import Read
from vllm_scope.harvests.contexts import Long

TOYWORLD = Path(__file__).parent.parent / "toyworld" / "model"
LAYERS = (2, 4)
CONTEXT = 128
#: In a turn, a loop computes this number of documents with each number of threads. A loop with
#: batches computes four times as many. With these numbers and short documents, a loop and the
#: harvest take equally long in a turn. Therefore both have the same load of other programs.
LOOPED = 400
#: Loop -> the number of documents that the loop computes in one forward.
LOOPS = {"loop": 1, "loop, batches of 32": 32}
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
    """Token ids of `count` facts of up to 9 tokens, such as "The capital of Ritova is Rindos."."""
    texts = [
        "".join(question) for held_out in (False, True) for question in fact_questions(held_out)
    ]
    short = [ids for ids in tokenizer(texts)["input_ids"] if len(ids) <= 9]
    return list(islice(cycle(short), count))


def whole(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the toy world's documents."""
    return [tokenizer(one.text)["input_ids"] for one in documents(0, "train", 0, count)]


@contextmanager
def process_of_loops() -> Iterator[Executor]:
    """A process for loops. `loop` has run there one time, to load the model."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(loop, [[1, 2, 3]], 1).result()
        yield pool


def loop(ids: Sequence[Sequence[int]], num_threads: int, batch: int = 1) -> Rate:
    """Compute documents with Hugging Face, `batch` documents in one forward. Shorter documents are
    padded."""
    model = huggingface()
    torch.set_num_threads(num_threads)
    rows = []
    started = time.perf_counter()
    with torch.inference_mode():
        for first in range(0, len(ids), batch):
            some = ids[first : first + batch]
            states = _states(model, some)
            for at, one in enumerate(some):
                rows.append([states[layer + 1][at, : len(one)].clone() for layer in LAYERS])
    return Rate.since(started, ids)


def _states(model: Any, some: Sequence[Sequence[int]]) -> Any:
    if len(some) == 1:
        return model(torch.tensor(some), output_hidden_states=True).hidden_states
    longest = max(map(len, some))
    padded = torch.tensor([[*one, *[0] * (longest - len(one))] for one in some])
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in some])
    found = model(padded, attention_mask=mask, output_hidden_states=True)
    return found.hidden_states


def harvest(llm: Any, ids: Sequence[Sequence[int]], long: Long = "split") -> Rate:
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        vllm_scope.harvest(
            list(map(list, ids)), Read("resid_post", layers=list(LAYERS)), model=llm, out=out,
            long=long, context=CONTEXT, file_mib=16, progress=False,
        )  # fmt: skip
        return Rate.since(started, ids)


def compare(
    llm: Any,
    pool: Executor,
    ids: Sequence[Sequence[int]],
    long: Long = "split",
    turns: int = 3,
    loops: Mapping[str, int] = LOOPS,
) -> list[Ratio]:
    """For each loop, the ratio of the harvest's tokens per second to the loop's. Prints all rates.

    Args:
        pool: the process of the loops (`process_of_loops`).
    """
    mean = sum(map(len, ids)) / len(ids)
    print(f"{len(ids)} documents of {mean:.1f} tokens, {long}; documents and tokens per second")
    rates: dict[str, list[Rate]] = {}
    for _ in range(turns):
        now = {"harvest": harvest(llm, ids, long)}
        for name, batch in loops.items():
            some = ids[: LOOPED if batch == 1 else 4 * LOOPED]
            threads = sorted({1, os.cpu_count() or 1})
            each = [pool.submit(loop, some, n, batch).result() for n in threads]
            now[name] = max(each, key=lambda one: one.tokens)
        for name, rate in now.items():
            print(f"  {name:20} {rate.documents:8.0f} {rate.tokens:8.0f}", flush=True)
            rates.setdefault(name, []).append(rate)
    tokens = {name: [one.tokens for one in each] for name, each in rates.items()}
    ratios = [ratio_of(tokens["harvest"], tokens[name]) for name in loops]
    for name, ratio in zip(loops, ratios, strict=True):
        print(f"  harvest / {name}: {ratio}", flush=True)
    return ratios


@cache
def huggingface() -> Any:
    """The toy model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TOYWORLD, dtype=torch.float32).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--long", choices=("split", "pack"), nargs="+", default=("split", "pack"))
    args = parser.parse_args()
    from transformers import AutoTokenizer
    from vllm import LLM

    tokenizer = AutoTokenizer.from_pretrained(TOYWORLD)
    with process_of_loops() as pool:
        # vLLM's CPU backend accepts "uni" only if its engine runs in this process.
        llm = LLM(str(TOYWORLD), **ENGINE, distributed_executor_backend="uni")
        harvest(llm, facts(tokenizer, 256))  # connects, and warms up
        for ids in (facts(tokenizer, args.documents), whole(tokenizer, args.documents // 4)):
            for long in args.long:
                compare(llm, pool, ids, long, args.turns)


if __name__ == "__main__":
    main()
