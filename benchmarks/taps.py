"""The time of a tap on a GPU: replays of a graph of taps, with and without programs.

    python -m benchmarks.taps

One graph has one tap for each of 33 boundaries. CUDA events measure the time of one replay: the
total, and the total divided by 33. No model runs between the taps, so the time is the taps'
own time. Read rows go to the arena or directly to the host.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from vllm_scope.graph.tap import kernel
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.program.operations import OP_ADD, Op, Program, build_program
from vllm_scope.request.arrays import Array
from vllm_scope.request.sites import point_of

NUM_TAPS = 33


def programs(hidden_size: int) -> dict[str, Program | None]:
    def vector(seed: int) -> Array:
        numbers = np.random.default_rng(seed).normal(size=hidden_size).astype("<f4")
        return Array((hidden_size,), numbers.tobytes())

    points = tuple(point_of(2 * i, 0) for i in range(NUM_TAPS))
    return {
        "idle": None,
        "read 1": Program.reading(points[16:17]),
        "read all": Program.reading(points),
        "add 1": build_program((), {(32, 0): [Op(OP_ADD, 0, vector(1), 1.0)]}),
    }


def launch_all(
    hidden: torch.Tensor, residual: torch.Tensor, arena: torch.Tensor, tables: Tables
) -> None:
    for tap in range(NUM_TAPS):
        kernel.tap_rows(
            hidden, residual, arena, tables.tokens, tables.programs, tables.ops,
            tables.vectors, tables.taps[tap], tables.host, 0, 0,
        )  # fmt: skip


def time_replays(graph: torch.cuda.CUDAGraph, repeat: int = 50) -> float:
    """Microseconds of one replay, median."""
    times = []
    for _ in range(repeat):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return float(statistics.median(times))


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=4096)
    args = parser.parse_args()
    hidden_size, device, dtype = args.hidden_size, torch.device("cuda"), torch.bfloat16
    widths = Widths((hidden_size * 2,))
    boundaries = tuple(2 * i for i in range(NUM_TAPS))
    print(f"{'rows':>6} {'what':10} {'to':6} {'us a tap':>9} {'us in all':>9}")
    for rows in (1, 64, 256):
        tables = Tables(boundaries, rows, hidden_size, widths, device, 8.0)
        arena = torch.empty((rows * NUM_TAPS * widths.row_slots[0], 8), dtype=dtype, device=device)
        hidden = torch.randn((rows, hidden_size), dtype=dtype, device=device)
        residual = torch.randn_like(hidden)
        host = torch.empty((len(arena), SLOT_BYTES), dtype=torch.uint8, pin_memory=True)
        tables.host.fill_(host.data_ptr())

        run = partial(launch_all, hidden, residual, arena, tables)
        graph = capture(run)
        for name, program in programs(hidden_size).items():
            for to_host in (False, True) if program is not None else (False,):
                tables.begin_step()
                if program is None:
                    tables.clear_step()
                else:
                    number = tables.program_id(program, hold=True)
                    slots = program.layout.slots(widths)
                    tables.load_step(
                        np.arange(rows), np.full(rows, number, np.int32),
                        np.zeros(rows, np.int32), np.arange(rows) * slots, to_host,
                    )  # fmt: skip
                where = "host" if to_host else "arena"
                spent = time_replays(graph)
                print(
                    f"{rows:6} {name:10} {where:6} {spent / NUM_TAPS:9.2f} {spent:9.1f}", flush=True
                )


if __name__ == "__main__":
    main()
