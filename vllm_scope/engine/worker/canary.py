"""Reads one row at every tap of a loaded model, before the model serves requests.

Owns:  `silent_taps`, `rows_at`.
Runs:  in every worker, once, after compilation and warm-up.

vLLM can load a compiled graph without taps from its cache. A graph without taps computes the right
tokens, but reads no rows, and gives no error. Therefore a dummy forward checks that every tap reads
a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.operations import Program
from vllm_scope.request.sites import boundary_of_point, point_of

#: The value of all numbers in the slots before the forward. No model computes a row in which all
#: numbers are POISON. The value is exact in bf16 and fp16.
POISON = -1280.0

#: A function that first calls its argument, which plans a step. Then the function runs a forward of
#: one dummy token, and returns the model's output.
Forward = Callable[[Callable[[], None]], object]


def rows_at(
    boundaries: Sequence[int],
    tables: Tables,
    slots: Tensor,
    first_slot: int,
    to_host: bool,
    forward: Forward,
) -> dict[int, Tensor]:
    """The rows of all taps in one dummy forward, by boundary. Each row is a flat copy on the CPU,
    with the padding of its last slot.

    Args:
        boundaries: boundaries with a tap on this worker.
        slots: the slots that the taps write, as [n, elements of a slot], in the model's dtype.
        first_slot: the index of the first of `slots` in the arena, or in host memory.
        to_host: True if `slots` are in host memory.
    """
    program = Program.reading(tuple(point_of(boundary, 0) for boundary in boundaries))
    slots.fill_(POISON)
    tables.begin_step()

    def plan() -> None:
        tables.load_step(
            np.zeros(1, np.int64),
            np.array([tables.program_id(program)], np.int32),
            np.zeros(1, np.int32),
            np.array([first_slot], np.int64),
            to_host,
        )

    try:
        forward(plan)
        if slots.is_cuda or to_host:
            torch.cuda.synchronize()
        found = slots.to("cpu", copy=True)
    finally:
        tables.clear_step()
    return {
        boundary_of_point(point): found[first + i * num_slots :][:num_slots].flatten()
        for _, points, first, num_slots in program.layout.rows_at(tables.widths)
        for i, point in enumerate(points)
    }


def silent_taps(found: Mapping[int, Tensor]) -> list[int]:
    """The boundaries whose taps wrote nothing.

    Args:
        found: the result of `rows_at`.
    """
    return [boundary for boundary, row in found.items() if not (row.float() != POISON).any()]
