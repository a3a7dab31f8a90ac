"""Reads one row at every tap of a loaded model, before the model serves requests.

Owns:  `silent_taps`, `rows_at`, `row_at`.
Runs:  in every worker, once, after compilation and warm-up.

vLLM can load a compiled graph without taps from its cache. A graph without taps computes the right
tokens, but reads no rows, and gives no error. Therefore a dummy forward checks that every tap reads
a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import Widths
from vllm_scope.program.operations import Program
from vllm_scope.request.sites import boundary_of_point, point_of

#: The value of all numbers in the slots before the forward. No model computes a row in which all
#: numbers are POISON. The value is exact in bf16 and fp16.
POISON = -1280.0


def rows_at(
    boundaries: tuple[int, ...],
    widths: Widths,
    tables: Tables,
    slots: Tensor,
    first_slot: int,
    to_host: bool,
    forward: Callable[[Callable[[], None]], object],
) -> dict[int, Tensor]:
    """The rows of all taps in one dummy forward, by boundary. Each row is a flat copy on the CPU,
    with the padding of its last slot.

    Args:
        boundaries: boundaries with a tap on this worker.
        slots: the slots that the taps write, as [n, elements of a slot], in the model's dtype.
        first_slot: the index of the first of `slots` in the arena, or in host memory.
        to_host: True if `slots` are in host memory.
        forward: a function that calls its argument, and then runs a forward of one dummy token.
    """
    program = Program.reading(tuple(point_of(boundary, 0) for boundary in boundaries))
    found = _read(program, tables, slots, first_slot, to_host, forward)
    return {
        boundary_of_point(point): found[first + i * num_slots :][:num_slots].flatten()
        for _, points, first, num_slots in program.layout.rows_at(widths)
        for i, point in enumerate(points)
    }


def silent_taps(found: Mapping[int, Tensor]) -> list[int]:
    """The boundaries whose taps wrote nothing.

    Args:
        found: the result of `rows_at`.
    """
    return [boundary for boundary, row in found.items() if not (row.float() != POISON).any()]


def row_at(
    boundary: int,
    tables: Tables,
    slots: Tensor,
    first_slot: int,
    forward: Callable[[Callable[[], None]], object],
) -> Tensor:
    """The row of one tap in a dummy forward, as a flat copy on the CPU with the last slot's
    padding.

    Args:
        slots, first_slot, forward: the same as for `rows_at`. The slots are in the arena.
    """
    program = Program.reading((point_of(boundary, 0),))
    return _read(program, tables, slots, first_slot, False, forward).flatten()


def _read(
    program: Program,
    tables: Tables,
    slots: Tensor,
    first_slot: int,
    to_host: bool,
    forward: Callable[[Callable[[], None]], object],
) -> Tensor:
    """A copy, on the CPU, of the slots that a dummy forward has written."""
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
        return slots.to("cpu", copy=True)
    finally:
        tables.clear_step()
