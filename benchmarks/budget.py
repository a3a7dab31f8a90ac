"""The host's time for each part of a step, while every request reads one layer.

    python -m benchmarks.budget --shape 0.5b --gpu

The engine and its front-end run in this process. The benchmark times the parts of vllm-scope that
the worker's main thread calls in a step, and one part of the drain thread. Parts within other parts
are timed in another run, because timing a part takes about 3 microseconds. There are two figures
for each part, in microseconds: the median time of a call by the clock, and its median CPU time. The
time by the clock includes waits for Python's lock, which the front-end and the drain thread hold
too. If the front-end is in another process, these waits are shorter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.engine import Workload, measure
from benchmarks.shapes import SHAPES, make_shape

ROOT = Path(__file__).parent.parent
#: The timed parts: (class, method, name in the table). An indented part is within an earlier part.
PARTS = [
    ("vllm_scope.engine.worker.steps.Steps", "begin", "before the forward"),
    ("vllm_scope.worker.plan.Planner", "begin_step", "  plan"),
    ("vllm_scope.transport.ring.HostRing", "acquire", "  room in the ring"),
    ("vllm_scope.graph.tap.tables.Tables", "load_step", "  upload, if any"),
    ("vllm_scope.engine.worker.steps.Steps", "end", "after the forward"),
    ("vllm_scope.worker.drain.Drain", "submit_written", "  event"),
    ("vllm_scope.worker.drain.Drain", "submit", "  copy"),
    ("vllm_scope.worker.deliverer.Deliverer", "deliver", "drain thread"),
]


#: name -> (seconds on the clock, seconds of CPU) of each call.
Times = dict[str, list[tuple[float, float]]]


def timed(totals: Times, on: set[str], name: str, function: Callable[..., Any]) -> Any:
    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if name not in on:
            return function(*args, **kwargs)
        clock, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            totals[name].append((time.perf_counter() - clock, time.thread_time() - cpu))

    return wrapped


def watch(on: set[str]) -> Times:
    """From now on, time the parts of PARTS whose names are in `on`."""
    from importlib import import_module

    totals: Times = defaultdict(list)
    for path, method, name in PARTS:
        module, _, owner = path.rpartition(".")
        found = getattr(import_module(module), owner)
        setattr(found, method, timed(totals, on, name, getattr(found, method)))
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        model = ROOT / "toyworld" / "model"
        options: dict[str, Any] = {}
        if args.shape:
            model, options = make_shape(args.shape, Path(folder)), {"load_format": "dummy"}
        from vllm import LLM

        names = [name for _, _, name in PARTS]
        inner = {name for name in names if name.startswith(" ")}
        on: set[str] = set()
        totals = watch(on)
        share = 0.5 if args.gpu else 0.2
        llm = LLM(
            str(model), skip_tokenizer_init=True, max_model_len=512, enable_prefix_caching=False,
            gpu_memory_utilization=share, enforce_eager=not args.gpu, **options,
        )  # fmt: skip
        for batch in (1, 64, 256):
            work = Workload(f"batch {batch}", batch, 64, 128, layers=[4])
            totals.clear()
            for some in ((), inner, set(names) - inner):
                on.clear()
                on.update(some)
                seconds = measure(llm, work)["seconds"]
            print(f"batch {batch}: {1e6 * seconds / 128:.0f} us a step in all")
            print(f"  {'':20} {'clock':>8} {'CPU':>8} {'calls':>6}")
            for name in names:
                if totals[name]:
                    clock, cpu = (
                        1e6 * statistics.median(x) for x in zip(*totals[name], strict=True)
                    )
                    print(f"  {name:20} {clock:8.1f} {cpu:8.1f} {len(totals[name]):6}", flush=True)


if __name__ == "__main__":
    main()
