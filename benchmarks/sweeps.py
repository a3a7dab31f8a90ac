"""CPU time of an engine's processes for a cell of a sweep, compared with a plain request.

    python -m benchmarks.sweeps              # CPU of the front-end and of the engine's processes
    python -m benchmarks.sweeps --profile F  # one process; writes F.plain.txt and F.sweep.txt

The toy world, 20 prompts of 12 tokens, 6 layers: 1,440 cells. Plain requests have 20 other prompts
of 12 tokens, each 72 times, and return log-probabilities of the metric's tokens. Sweeps and plain
requests take turns. The first turn warms up. The figures are milliseconds by the clock, and of CPU.
Other programs disturb the CPU time less than the clock.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

NUM_PROMPTS = 20
ROOT = Path(__file__).parents[1]


def cpu() -> tuple[float, float]:
    """CPU seconds of this process, and of the processes that it has started."""
    children = psutil.Process().children(recursive=True)
    times = [child.cpu_times() for child in children if child.is_running()]
    return time.process_time(), sum(one.user + one.system for one in times)


def measured(call: Callable[[], int], turns: int) -> list[tuple[float, float, float]]:
    """(wall, CPU of this process, CPU of the others) of one cell in milliseconds, for each turn."""
    found = []
    for _ in range(turns):
        start, before = time.perf_counter(), cpu()
        num = call()
        wall, after = time.perf_counter() - start, cpu()
        seconds = (wall, after[0] - before[0], after[1] - before[1])
        found.append((1e3 * seconds[0] / num, 1e3 * seconds[1] / num, 1e3 * seconds[2] / num))
    return found


def calls(llm: Any) -> dict[str, Callable[[], int]]:
    """Kind -> a function that computes plain requests or cells, and returns their number."""
    from vllm import SamplingParams

    from vllm_scope import LogitDifference, Sweep, sweep

    random = np.random.default_rng(0)
    params = SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, logprob_token_ids=[5, 50]
    )

    def prompts() -> list[Any]:
        """Prompts that are new at each call, so that a sweep cannot use caches of earlier calls."""
        ids = random.integers(5, 1000, (NUM_PROMPTS, 12)).tolist()
        return [{"prompt_token_ids": one} for one in ids]

    def plain() -> int:
        repeated = [one for one in prompts() for _ in range(6 * 12)]
        return len(llm.generate(repeated, params, use_tqdm=False))

    def swept() -> int:
        asked = Sweep(prompts(), metric=LogitDifference(5, 50))
        return sweep(llm, prompts(), asked, progress=False).values.size

    return {"plain": plain, "sweep": swept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    if args.profile is not None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(
        str(ROOT / "toyworld" / "model"), dtype="float32", max_model_len=256,
        gpu_memory_utilization=0.3, disable_log_stats=True,
    )  # fmt: skip
    found = calls(llm)
    for call in found.values():
        call()
    if args.profile is not None:
        for kind, call in found.items():
            profile = cProfile.Profile()
            num = profile.runcall(call)
            path = args.profile.with_suffix(f".{kind}.txt")
            with path.open("w") as file:
                stats = pstats.Stats(profile, stream=file)
                stats.sort_stats("tottime").print_stats(60)
                stats.sort_stats("cumulative").print_stats(120)
            print(f"{kind}: {num} requests, {path}")
        return
    turns: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in found}
    for _ in range(args.turns):
        for kind, call in found.items():
            turns[kind] += measured(call, 1)
    print("ms of a request      wall  front-end  engine   (medians; lowest)")
    for kind, each in turns.items():
        columns = list(zip(*each, strict=True))
        medians = " ".join(f"{statistics.median(column):8.3f}" for column in columns)
        lowest = " ".join(f"{min(column):.3f}" for column in columns)
        print(f"{kind:16} {medians}   ({lowest})")


if __name__ == "__main__":
    main()
