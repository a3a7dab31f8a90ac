"""Attention with taps computes what it did, and the arena has what went in and came out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vllm_scope import CompatError
from vllm_scope.graph.anatomy.attention import install_attention_taps
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.tap import op
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.program.operations import Program
from vllm_scope.request.sites import ATTENTION_SITES, Heads, Place, Sites, kind_of, point_of

HEADS = Heads(num_heads=4, num_kv_heads=2, head_size=3, head_size_v=5)
NUM_ROWS = 6


class Attention(nn.Module):
    """As vLLM's is called: three tensors, and words."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, output_shape: object = None
    ) -> Tensor:
        value = value.reshape(-1, 2, 5).repeat_interleave(2, 1)
        return (value * query.reshape(-1, 4, 3).sum(-1, keepdim=True) + key.sum()).flatten(1)


def projected(in_heads: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as slices of one tensor, as a projection gives them."""
    torch.manual_seed(0)
    rows = torch.randint(-16, 17, (NUM_ROWS, 12 + 6 + 10)) / 4  # whose sums are exact
    q, k, v = rows.split([12, 6, 10], dim=1)
    return (q.view(-1, 4, 3), k.view(-1, 2, 3), v) if in_heads else (q, k, v)


class Tapped:
    def __init__(self, sites: tuple[str, ...], heads: Heads = HEADS) -> None:
        op.register()
        self.boundaries = tuple(sorted(Place(site, 1).boundary for site in sites))
        self.sites = Sites(2, 8, "float32", self.boundaries, heads)
        widths = Widths(tuple(4 * size for size in self.sites.row_sizes))
        self.tables = Tables(self.boundaries, 8, 8, widths, torch.device("cpu"), 1.0, 8, 64)
        self.module = Attention()
        anatomy = Anatomy({}, 2, Convention.SUM, "layers", {0: Attention(), 1: self.module})
        program = Program.reading(tuple(point_of(b, 0) for b in self.boundaries))
        number = self.tables.program_id(program, hold=True)
        self.num_slots = int(self.tables.num_slots[number])
        self.slots = program.layout.row_slots(widths)
        self.arena = torch.full((2 * self.num_slots, 4), torch.nan)
        self.here = install_attention_taps(anatomy, self.arena, self.tables, self.sites)
        # Rows 1 and 4 are read.
        self.tables.load_step(
            np.array([1, 4]), np.full(2, number, np.int32), np.zeros(2, np.int32),
            np.array([0, self.num_slots]),
        )  # fmt: skip

    def read(self, site: str) -> Tensor:
        """[2, numbers of a row]."""
        point = point_of(Place(site, 1).boundary, 0)
        size = self.sites.row_sizes[kind_of(Place(site, 1).boundary)]
        found = self.arena.view(2, -1)[:, self.slots[point] * SLOT_BYTES // 4 :]
        return found[:, :size]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("in_heads", [False, True])
@pytest.mark.parametrize("sites", [ATTENTION_SITES, ("q",), ("k", "z"), ("v",)], ids=str)
def test_inputs_and_output_of_the_attention_are_in_the_arena(sites, in_heads, compiled):
    tapped = Tapped(sites)
    assert tapped.here == tapped.boundaries
    given = projected(in_heads)
    before = [x.clone() for x in given]
    expected = Attention()(*given)
    call = torch.compile(tapped.module, backend="aot_eager", fullgraph=True)
    out = (call if compiled else tapped.module)(*given, output_shape=None)
    assert torch.equal(out, expected)
    rows = dict(zip(ATTENTION_SITES, (*before, expected), strict=True))
    for site in sites:
        assert torch.equal(tapped.read(site), rows[site].flatten(1)[[1, 4]])
    assert all(map(torch.equal, given, before))
    assert not tapped.module.state_dict()


@pytest.mark.parametrize("site", ATTENTION_SITES)
def test_rows_of_another_width_are_refused(site):
    tapped = Tapped((site,), Heads(4, 4, 5, 3))
    with pytest.raises(CompatError, match=r"is given rows of \(.*, not rows of .* torch\.float32"):
        tapped.module(*projected(False))
    assert tapped.arena.isnan().all()


def test_rows_of_another_dtype_are_refused():
    tapped = Tapped(ATTENTION_SITES)
    with pytest.raises(CompatError, match=r"rows of \(12,\) torch\.float64, not rows of 12"):
        tapped.module(*(x.double() for x in projected(False)))
    assert tapped.arena.isnan().all()


def test_missing_keys_are_refused():
    with pytest.raises(CompatError, match="is given nothing, not rows of 6"):
        Tapped(("k",)).module(projected(False)[0], None, None)
