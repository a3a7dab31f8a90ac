"""Taps on what attention and MLP get: read in place, and edited for this module alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.graph.test_tapped import CPU, HIDDEN_SIZE, Part, _plan
from vllm_scope.engine.worker.blocks import blocks_of
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.parts import input_of, install_part_taps
from vllm_scope.graph.tap import op
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import Widths
from vllm_scope.program.operations import OP_ADD, Op, build_program
from vllm_scope.request.arrays import Array
from vllm_scope.request.sites import BLOCK_SITES, Place, Sites, point_of
from vllm_scope.worker.arena import Arena


class Attention(Part):
    def forward(self, positions: Tensor, hidden_states: Tensor):
        return super().forward(hidden_states)


class Layer(nn.Module):
    """Attention and MLP get the same rows, which are the stream itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(1.0), Part(-0.5)

    def forward(self, stream: Tensor, by_name: bool) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(len(stream))
        if by_name:
            attended = self.attn(hidden_states=stream, positions=positions)
        else:
            attended = self.attn(positions, stream)
        return attended, self.mlp(stream), stream


@pytest.mark.parametrize("by_name", [True, False], ids=["by-name", "by-place"])
@pytest.mark.parametrize("edited", BLOCK_SITES)
def test_an_edit_reaches_its_module_alone(edited, by_name):
    op.register()
    layer, stream, vector = Layer(), torch.randn(5, HIDDEN_SIZE), torch.randn(HIDDEN_SIZE)
    places = {site: Place(site, 0) for site in BLOCK_SITES}
    boundaries = tuple(sorted(place.boundary for place in places.values()))
    sites = Sites(1, HIDDEN_SIZE, "float32", boundaries)
    arena = Arena(40, torch.float32, CPU)
    tables = Tables(
        boundaries, 8, HIDDEN_SIZE, Widths(tuple(4 * size for size in sites.row_sizes)), CPU
    )
    blocks = {places["attn_in"]: layer.attn, places["mlp_in"]: layer.mlp}
    anatomy = Anatomy({0: layer}, 1, Convention.TENSOR, "layers", blocks=blocks)
    plain = layer(stream.clone(), by_name)
    assert install_part_taps(anatomy, arena.slots, tables, sites) == boundaries
    assert all(map(torch.equal, layer(stream.clone(), by_name), plain))

    where = places[edited].boundary
    edits = {(where, 0): [Op(OP_ADD, 0, Array.parse(vector, ""), 1.0)]}
    _plan(tables, build_program(tuple(point_of(b, 1) for b in boundaries), edits), [3], [4])
    attended, made, after = layer(stream.clone(), by_name)
    assert torch.equal(after, stream)
    changed = {"attn_in": attended, "mlp_in": made}
    for j, (site, before) in enumerate(zip(BLOCK_SITES, plain, strict=False)):
        row = stream[3] + vector if site == edited else stream[3]
        torch.testing.assert_close(arena.slots[4 + j], row)
        new = before.clone()
        if site == edited:
            new[3] += 0.75 * vector
        torch.testing.assert_close(changed[site], new)


def test_a_forward_must_name_its_input():
    assert (input_of(Attention), input_of(Part)) == ("hidden_states", "x")
    assert input_of(Layer) is None


class Kernel(nn.Module):
    """In place of vLLM's Attention."""

    attn_type = "decoder"


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.q_norm = Kernel(), nn.Identity()

    def forward(self, position_ids: Tensor, hidden_states: Tensor) -> Tensor:
        query = self.q_norm(hidden_states + 1)
        return self.kernel(query)


class NormsAndAttention(nn.Module):
    """As DBRX: the norms before and after the attention are with it in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm_1, self.norm_2 = Inner(), nn.Identity(), nn.Identity()

    def forward(self, position_ids: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        residual = hidden_states
        hidden_states = self.norm_1(hidden_states)
        residual = residual + self.attn(position_ids, hidden_states)
        return self.norm_2(residual), residual


def test_the_input_of_attention_is_behind_the_norm_also_if_one_module_has_both(monkeypatch):
    monkeypatch.setattr("vllm.model_executor.layers.attention.Attention", Kernel)
    fused, plain = nn.Module(), nn.Module()
    fused.norm_attn_norm, plain.self_attn = NormsAndAttention(), Inner()
    places = [Place("attn_in", number) for number in (0, 1)]
    sites = Sites(2, HIDDEN_SIZE, "float32", tuple(place.boundary for place in places))
    anatomy = Anatomy({0: fused, 1: plain}, 2, Convention.TENSOR, "layers")
    found = blocks_of(anatomy, sites)
    assert found == {places[0]: fused.norm_attn_norm.attn, places[1]: plain.self_attn}
