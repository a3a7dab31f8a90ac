"""How much a sweep delays other requests.

    python -m benchmarks.beside                    # toy world on a CPU
    python -m benchmarks.beside --gpu --shape 8b   # random weights

Each client sends a request of 128 tokens (32 on a CPU), receives 32 generated tokens, and sends the
next request. In the first kind of phase, no sweep runs. In each other kind of phase, a sweep runs
too, with one of the `--shares` as the argument `share` of `sweep_async`. The sweep patches
`resid_pre` of prompts of 24 tokens, at all layers and positions. The sweep yields to the clients,
so its cells are in the engine for `share / 5` of the time. Every turn has one phase of each kind.
The order of the phases is reversed in every second turn. The first turn warms up. A ratio compares
two phases of the same turn: it divides a percentile with a sweep by the percentile without a sweep.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harvest import TOYWORLD
from benchmarks.shapes import SHAPES, make_shape
from benchmarks.turns import order, ratio_of

NUM_TOKENS, NUM_SWEPT = 32, 24


class Beside:
    """Clients and sweeps on one AsyncLLM."""

    def __init__(self, engine: Any, num_clients: int, num_prompt: int) -> None:
        self._engine, self._num_clients, self._num_prompt = engine, num_clients, num_prompt
        self._random, self._names = np.random.default_rng(0), count()
        self._num_cells = 0
        self._most = min(1000, engine.model_config.get_vocab_size())

    def _prompt(self, size: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": self._random.integers(5, self._most, size).tolist()}

    async def _client(self, first: list[float], next_: list[float], whole: list[float]) -> None:
        """Send requests until the task is cancelled. Append times in seconds: to a request's first
        token (`first`), between tokens (`next_`), and of whole requests (`whole`)."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
        )
        while True:
            prompt, name = self._prompt(self._num_prompt), f"client-{next(self._names)}"
            started = last = time.perf_counter()
            into = first
            async for _ in self._engine.generate(prompt, params, name):
                now = time.perf_counter()
                into.append(now - last)
                last, into = now, next_
            whole.append(last - started)

    async def _sweeps(self, share: float) -> None:
        """Run sweeps until the task is cancelled."""
        from vllm_scope import LogitDifference, Sweep, sweep_async

        while True:
            clean, corrupted = [self._prompt(NUM_SWEPT)], [self._prompt(NUM_SWEPT)]
            swept = Sweep(clean, metric=LogitDifference(5, 50))
            await sweep_async(
                self._engine, corrupted, swept, progress=False, share=share, on_cell=self._count
            )

    def _count(self, _: object) -> None:
        self._num_cells += 1

    async def phase(self, seconds: float, share: float) -> dict[str, float]:
        """Percentiles of the clients' times in seconds, and cells per second. With share 0 no sweep
        runs."""
        times: dict[str, list[float]] = {"first token": [], "next token": [], "request": []}
        self._num_cells = 0
        calls: list[Callable[[], Any]] = [lambda: self._client(*times.values())] * self._num_clients
        calls += [lambda: self._sweeps(share)] if share else []
        tasks = [asyncio.create_task(call()) for call in calls]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task  # raises the error that ended the phase early
        if not times["request"]:
            raise RuntimeError("no request ended within a phase; give more --seconds")
        found = {
            f"{name} p{percent}": float(np.percentile(each, percent))
            for name, each in times.items() for percent in (50, 99)
        }  # fmt: skip
        return found | {"cells/s": self._num_cells / seconds}


async def compare(model: str, options: dict[str, Any], args: argparse.Namespace) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **options))
    try:
        beside = Beside(engine, args.clients, 128 if args.gpu else 32)
        found: dict[float, list[dict[str, float]]] = {share: [] for share in (0.0, *args.shares)}
        for turn in range(args.turns + 1):
            for share in order(found, turn):
                one = await beside.phase(args.seconds, share)
                if turn:
                    found[share].append(one)
    finally:
        engine.shutdown()
    for share, turns in found.items():
        print(f"share {share:g}" if share else "no sweep", flush=True)
        for name in turns[0]:
            values, alone = [one[name] for one in turns], [one[name] for one in found[0.0]]
            if name == "cells/s":
                print(f"  {name:16} {np.median(values):9.0f}")
            else:
                ratio = f"  {ratio_of(values, alone)} of that without a sweep" if share else ""
                print(f"  {name:16} {1e3 * np.median(values):9.1f} ms{ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.2, 0.5, 1.0])
    parser.add_argument("--seconds", type=float, default=6, help="of a phase")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(TOYWORLD)
        options: dict[str, Any] = {"max_model_len": 256, "disable_log_stats": True}
        if args.shape:
            model = str(make_shape(args.shape, Path(folder)))
            options["load_format"] = "dummy"
        if not args.gpu:
            options |= {"dtype": "float32", "gpu_memory_utilization": 0.3}
        options["skip_tokenizer_init"] = True
        asyncio.run(compare(model, options, args))


if __name__ == "__main__":
    main()
