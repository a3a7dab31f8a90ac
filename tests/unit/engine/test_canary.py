"""A tap that writes nothing is found out before the engine serves."""

from __future__ import annotations

import pytest
import torch

from vllm_scope.engine.worker.canary import rows_at, silent_taps
from vllm_scope.engine.worker.loading import last_rows
from vllm_scope.errors import CompatError
from vllm_scope.graph.tap.definition import tap_rows
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import Widths
from vllm_scope.request.sites import Sites
from vllm_scope.worker.arena import Arena

CPU = torch.device("cpu")
BOUNDARIES = (0, 2, 3)
HIDDEN_SIZE = 5


class Model:
    """Taps that may be missing from its graph.

    Attributes:
        deaf: the boundaries without a tap.
    """

    def __init__(self, dtype: torch.dtype, deaf: set[int]) -> None:
        self.dtype, self.deaf = dtype, deaf
        self.arena = Arena(20, dtype, CPU)
        self.widths = Widths((HIDDEN_SIZE * dtype.itemsize,))
        self.tables = Tables(BOUNDARIES, 8, HIDDEN_SIZE, self.widths, CPU)

    def silent(self, run=lambda plan: plan()) -> list[int]:
        def forward(plan) -> None:
            run(plan)
            tables = self.tables
            for tap, boundary in enumerate(BOUNDARIES):
                if boundary not in self.deaf:
                    # A dummy forward's rows are often zeros.
                    tap_rows(
                        torch.zeros(3, HIDDEN_SIZE, dtype=self.dtype), None, self.arena.slots,
                        tables.tokens, tables.programs, tables.ops, tables.vectors,
                        tables.taps[tap], tables.host, 0, 0,
                    )  # fmt: skip

        region = self.arena.acquire(len(BOUNDARIES) * self.widths.row_slots[0])
        slots = self.arena.view(region)
        found = rows_at(BOUNDARIES, self.tables, slots, region.start, False, forward)
        return silent_taps(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("deaf", [set(), {2}, {0, 3}, {0, 2, 3}], ids=str)
def test_the_taps_that_wrote_nothing_are_named(deaf, dtype):
    model = Model(dtype, deaf)
    model.arena.acquire(4)  # the region does not begin at the arena's start
    assert model.silent() == sorted(deaf)


def test_a_forward_that_was_never_planned_has_only_silent_taps():
    assert Model(torch.float32, set()).silent(run=lambda plan: None) == list(BOUNDARIES)


@pytest.mark.parametrize("fails", [False, True], ids=["it-ran", "it-failed"])
def test_afterwards_no_token_has_a_program(fails):
    model = Model(torch.float32, set())

    def run(plan) -> None:
        plan()
        if fails:
            raise RuntimeError("the forward failed")

    if fails:
        with pytest.raises(RuntimeError):
            model.silent(run)
    else:
        model.silent(run)
    assert (model.tables.tokens[:, 0] == -1).all()


@pytest.mark.parametrize("num_rows", [1, HIDDEN_SIZE])
def test_a_model_that_returns_rows_of_another_width_is_told_so(num_rows):
    model = Model(torch.float32, set())
    sites = Sites(1, HIDDEN_SIZE, "float32", BOUNDARIES)

    def forward(plan) -> torch.Tensor:
        plan()
        return torch.zeros(num_rows, 3)

    with pytest.raises(CompatError, match="returns rows of 3 numbers, and the stream has 5"):
        last_rows(sites, model.tables, model.arena, forward)
