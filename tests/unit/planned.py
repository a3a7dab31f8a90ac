"""A planner and its tables, without arena and drain."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_scope import Ablate, Add, Probe, Read, Replace, Spec
from vllm_scope.batch.labels import StepBatch
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.compiler import OVERSHOOT, RequestProgram
from vllm_scope.program.held import Held
from vllm_scope.program.layout import Widths
from vllm_scope.program.operations import LogRange
from vllm_scope.request.actions import Action
from vllm_scope.request.packed import pack
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites, boundary_of_point
from vllm_scope.worker.plan import Planner

CPU = torch.device("cpu")
HIDDEN_SIZE = 4
#: float32 rows of one slot.
ROW_BYTES = 16
SITES = Sites(12, HIDDEN_SIZE, "float32", tuple(range(0, 25, 2)))


def resolved(*actions: Action) -> Resolved:
    kinds = (Read, Probe, (Add, Ablate, Replace))
    spec = Spec(*(tuple(a for a in actions if isinstance(a, kind)) for kind in kinds))
    return spec.resolve(SITES)


def compile_actions(*actions: Action, num_prompt: int = 4, here=SITES.boundaries) -> RequestProgram:
    ids = np.ones(num_prompt, np.int64)
    return RequestProgram.compile(resolved(*actions), SITES, frozenset(here), num_prompt, ids)


def held(program: RequestProgram, num_positions: int, key: Hashable = None) -> Held | None:
    """What a request holds from its start: nothing if it only reads.

    Args:
        key: as in RequestProgram.held.
    """
    if not program.has_vectors:
        return None
    return program.held(program.columns(num_positions + OVERSHOOT), key)


@dataclass
class Engine:
    """A planner and its tables, without arena and drain."""

    num_programs: int = 4096
    vectors_mib: float = 1.0
    logged: int = 0
    tables: Tables = field(init=False)
    planner: Planner = field(init=False)

    def __post_init__(self) -> None:
        self.tables = Tables(
            SITES.boundaries,
            1024,
            HIDDEN_SIZE,
            Widths((ROW_BYTES,)),
            CPU,
            self.vectors_mib,
            self.num_programs,
        )
        self.planner = Planner(self.tables)

    def add(self, req_id: str, *actions: Action, num_prompt: int = 4, most: int = 64) -> None:
        program = compile_actions(*actions, num_prompt=num_prompt)
        asked = resolved(*actions)
        logged = LogRange(self.logged, most + OVERSHOOT, asked.num_states)
        self.logged += logged.size
        key = pack((asked.reads, asked.probes, asked.edits))[0].digest
        some = held(program, most, key)
        self.planner.add_request(req_id, zlib.crc32(req_id.encode()), program, some, logged)

    def step(self, optimistic: bool = False, **at: tuple[int, int]):
        """Plan a batch of name=(first position, count)."""
        counts = [count for _, count in at.values()]
        first = np.array([position for position, _ in at.values()])
        batch = StepBatch(list(at), np.cumsum([0, *counts]), first, optimistic)
        return self.planner.begin_step(batch)


def asked_rows(plan) -> dict[int, tuple[int, ...]]:
    """Row -> boundaries at which it is read."""
    labels = plan.labels
    return {
        row: tuple(boundary_of_point(point) for point in labels.layouts[at].points)
        for row, at in zip(labels.rows.tolist(), labels.layout_of, strict=True)
    }
