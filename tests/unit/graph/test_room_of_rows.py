"""A request takes no more of the tables than EngineCore counts, also if rows of a replacement are
equal, and however its programs are made: one by one, or as rows of the tables."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope import Add, Replace
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.held import Held
from vllm_scope.program.layout import Widths
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec

HIDDEN_SIZE = 8
BOUNDARIES = tuple(range(5))
SITES = Sites(2, HIDDEN_SIZE, "float32", BOUNDARIES)


def _held(numbers: list[int], num_adds: int) -> Held:
    """What a request holds that replaces the rows of the first positions, one for each number, and
    adds vectors at every token."""
    rows = np.repeat(np.array(numbers, np.float32)[:, None], HIDDEN_SIZE, axis=1)
    edits = [Replace(rows, positions=list(range(len(numbers))), layer=0)]
    adds = [Add([float(i + 100)] * HIDDEN_SIZE, layer=1) for i in range(num_adds)]
    asked = Spec(edits=(*edits, *adds)).resolve(SITES)
    program = RequestProgram.compile(asked, SITES, frozenset(BOUNDARIES), 24, range(24))
    return program.held(program.columns(28), repr((numbers, num_adds)).encode())


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=18), st.integers(0, 2)),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_the_tables_take_what_engine_core_counts(requests):
    every = [_held(*one) for one in requests]
    vectors = {key for held in every for key in held.vectors}
    most = Tables(
        BOUNDARIES, 1, HIDDEN_SIZE, Widths((4 * HIDDEN_SIZE,)), torch.device("cpu"),
        len(vectors) * HIDDEN_SIZE * 4 / 2**20, sum(held.num_programs for held in every),
        sum(held.num_ops for held in every),
    )  # fmt: skip
    for _ in range(2):  # the second time, in what was released
        most.begin_step()
        for held in every:
            most.hold(held)  # raises CapacityError if there is no room
        for held in every:
            most.release_set(held)
