"""A harvest to a local disk, compared with an engine without reads, and with a plain write.

    python -m benchmarks.harvest_rate --shape 8b   # random weights, on a GPU
    python -m benchmarks.harvest_rate              # the toy model
    python -m benchmarks.harvest_rate --ready      # rows that are ready, without an engine

With an engine, all documents differ, and have 1,024 tokens (512 for the toy model). The modes take
turns. The first turn has an eighth of the documents, and warms up. A ratio compares two modes of
the same turn, and is printed with a 95 % interval. A harvest's time is from the call of
`vllm_scope.harvest` until all shards and the manifest exist. The folder is deleted afterwards.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import vllm_scope
from benchmarks import ready
from benchmarks.harvest import TOYWORLD
from benchmarks.shapes import SHAPES, make_shape
from benchmarks.turns import order, ratio_of
from vllm_scope import Read
from vllm_scope.files import FileOptions
from vllm_scope.files.index import DocumentSpan
from vllm_scope.harvests.contexts import Context
from vllm_scope.harvests.storing import Storing


def start(shape: str | None, folder: Path) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {"max_model_len": 2048, "load_format": "dummy"}
    if shape is None:
        options = {"max_model_len": 1024, "dtype": "float32", "gpu_memory_utilization": 0.3}
    model = TOYWORLD if shape is None else make_shape(shape, folder)
    return LLM(
        str(model), skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=True,
        **options,
    )  # fmt: skip


def plain(llm: Any, ids: list[list[int]], out: str) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)


def harvest(llm: Any, layers: list[int], ids: list[list[int]], out: str) -> None:
    read = Read("resid_post", layers=layers)
    vllm_scope.harvest(ids, read, model=llm, out=out, progress=False)


def compare(llm: Any, folder: str, length: int, num_documents: int, turns: int) -> None:
    """Print each mode's tokens per second, and its ratio to the engine without reads."""
    config = llm.llm_engine.vllm_config.model_config
    most, layers = config.get_vocab_size(), config.get_total_num_hidden_layers()
    random = np.random.default_rng(0)
    modes: dict[str, Callable[[list[list[int]], str], None]] = {"no reads": partial(plain, llm)}
    for count in (1, 4):
        some = np.linspace(0, layers - 1, count + 2).round().astype(int)[1:-1].tolist()
        modes[f"harvest, layers: {count}"] = partial(harvest, llm, some)
    rates: dict[str, list[float]] = {name: [] for name in modes}
    for turn in range(turns + 1):
        for name in order(modes, turn):
            num = num_documents if turn else max(1, num_documents // 8)
            ids = random.integers(5, most, (num, length)).tolist()
            with tempfile.TemporaryDirectory(dir=folder) as out:
                started, cpu = time.perf_counter(), time.process_time()
                modes[name](ids, out)
                seconds, busy = time.perf_counter() - started, time.process_time() - cpu
            rate = len(ids) * length / seconds
            print(f"  {name:20} {rate:9.0f} tokens/s, {busy / seconds:4.1f} cores", flush=True)
            rates[name].append(rate)
    first, *others = modes
    for name in others:
        print(f"  {name} / {first}: {ratio_of(rates[name][1:], rates[first][1:])}", flush=True)


def store(folder: str, num_layers: int, num_contexts: int) -> float:
    """Bytes per second of a harvest of ready rows: hashes, figures and shards. No engine runs."""
    ids = list(range(ready.LENGTH))
    span = [DocumentSpan(f"{i}", 0, len(ids), len(ids)) for i in range(num_contexts)]
    engine = ready.ReadyEngine(num_layers=num_layers)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        started = time.perf_counter()
        with closing(Storing(engine, (), FileOptions.parse({"root": out}))) as storing:
            for _ in storing.compute(Context(ids, (one,)) for one in span):
                pass
        seconds = time.perf_counter() - started
        num_bytes = sum(size for _, size in storing.found.values())
    return num_bytes / seconds


def write(folder: str, num_bytes: int = 1 << 31) -> float:
    """Bytes per second of one thread that writes the same memory again and again."""
    block = os.urandom(8 << 20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        for _ in range(num_bytes // len(block)):
            file.write(block)
        return num_bytes / (time.perf_counter() - started)


def compare_ready(folder: str, turns: int) -> None:
    """Print how many bytes per second `store` and `write` reach."""
    rates: dict[str, list[float]] = {}
    for _ in range(turns):
        rates.setdefault("written alone", []).append(write(folder))
        for num_layers in (1, 4):
            name = f"harvest, layers: {num_layers}"
            rates.setdefault(name, []).append(store(folder, num_layers, 1000 // num_layers))
    for name, each in rates.items():
        low, middle, high = (1e-9 * f(each) for f in (min, median, max))
        print(f"  {name:20} {middle:.2f} GB/s ({low:.2f} to {high:.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--ready", action="store_true")
    parser.add_argument("--out", default=".bench", help="folder of the shards")
    # The default is large, because the harvest's start and end together take half a second. This
    # must be a small share of the harvest's time.
    parser.add_argument("--documents", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    if args.ready:
        compare_ready(args.out, args.turns)
        return
    with tempfile.TemporaryDirectory() as folder:
        llm = start(args.shape, Path(folder))
        length = 512 if args.shape is None else 1024
        compare(llm, args.out, length, args.documents, args.turns)


if __name__ == "__main__":
    main()
