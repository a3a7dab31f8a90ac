"""Layers with taps: the model computes what it did, and the arena has the streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vllm_scope import CompatError
from vllm_scope.anatomy.convention import Convention
from vllm_scope.anatomy.layers import Anatomy
from vllm_scope.anatomy.tapped import install_taps
from vllm_scope.arena import Arena
from vllm_scope.program import Program
from vllm_scope.tap import op
from vllm_scope.tap.tables import Tables

HIDDEN_SIZE = 4
NUM_LAYERS = 3


class SumLayer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.add = nn.Parameter(torch.full((HIDDEN_SIZE,), float(number + 1)))

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        residual = hidden_states if residual is None else hidden_states + residual
        return residual * 0.5 + self.add, residual

    @staticmethod
    def stream(out) -> Tensor:
        return out[0] + out[1]


class TensorLayer(SumLayer):
    def forward(self, positions: Tensor, hidden_states: Tensor):
        return hidden_states * 1.5 + self.add

    @staticmethod
    def stream(out) -> Tensor:
        return out


class DeadLayer(SumLayer):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        residual = hidden_states
        return residual * 1.5 + self.add, residual

    @staticmethod
    def stream(out) -> Tensor:
        return out[0]


class NamelessLayer(TensorLayer):
    def forward(self, positions: Tensor, x: Tensor):
        return x * 1.5 + self.add


CONVENTIONS = {
    "sum": (SumLayer, Convention.SUM),
    "tensor": (TensorLayer, Convention.TENSOR),
    "dead-residual": (DeadLayer, Convention.DEAD_RESIDUAL),
    "another-name": (NamelessLayer, Convention.TENSOR),
}


def _run(layers: list[nn.Module], embedding: Tensor, by_name: bool) -> list[Tensor]:
    """The stream at every boundary, read off the layers' outputs by hand."""
    arguments = {"positions": torch.arange(len(embedding)), "hidden_states": embedding}
    if not isinstance(layers[0], TensorLayer):
        arguments["residual"] = None
    streams = [embedding.clone()]
    for layer in layers:
        out = layer(**arguments) if by_name else layer(*arguments.values())
        streams.append(layer.stream(out).clone())
        if isinstance(out, tuple):
            arguments["hidden_states"], arguments["residual"] = out
        else:
            arguments["hidden_states"] = out
    return streams


@pytest.fixture
def tapped():
    """Builds layers with taps at some boundaries; all rows read all of them."""
    op.register()

    def build(layer_class: type, convention: Convention, boundaries: tuple[int, ...]):
        layers = {i: layer_class(i) for i in range(NUM_LAYERS)}
        arena = Arena(40, HIDDEN_SIZE, torch.float32, torch.device("cpu"))
        arena.rows.fill_(torch.nan)
        tables = Tables(boundaries, 8, torch.device("cpu"))
        tap_of = {boundary: tap for tap, boundary in enumerate(boundaries)}
        here = install_taps(
            Anatomy(layers, NUM_LAYERS, convention, "layers"), tap_of, arena.rows, tables
        )
        return list(layers.values()), arena, tables, here

    return build


@pytest.mark.parametrize(
    "boundaries",
    [
        pytest.param((0, 1, 2, 3), id="everywhere"),
        pytest.param((0,), id="the-embedding"),
        pytest.param((3,), id="the-last-exit"),
        pytest.param((1, 3), id="two-exits"),
    ],
)
@pytest.mark.parametrize("by_name", [True, False], ids=["by-name", "by-place"])
@pytest.mark.parametrize("kind", ["sum", "tensor", "dead-residual"])
def test_taps_read_the_stream_and_leave_the_model_as_it_was(kind, by_name, boundaries, tapped):
    layer_class, convention = CONVENTIONS[kind]
    embedding = torch.randn(5, HIDDEN_SIZE)
    streams = _run([layer_class(i) for i in range(NUM_LAYERS)], embedding, by_name)

    layers, arena, tables, here = tapped(layer_class, convention, boundaries)
    assert here == boundaries
    rows = np.array([1, 3])  # of five: the others are not asked for
    found = tables.program_id(Program(boundaries))
    slots = np.array([20, 2])
    tables.load_step(rows, np.full(2, found, np.int32), slots)
    again = _run(layers, embedding, by_name)
    assert all(torch.equal(a, b) for a, b in zip(streams, again, strict=True))

    touched = set()
    for row, slot in zip(rows, slots, strict=True):
        for j, boundary in enumerate(boundaries):
            assert torch.equal(arena.rows[slot + j], streams[boundary][row])
            touched.add(int(slot) + j)
    untouched = sorted(set(range(40)) - touched)
    assert arena.rows[untouched].isnan().all()


def test_a_layer_that_nobody_taps_keeps_its_class(tapped):
    layers, *_ = tapped(SumLayer, Convention.SUM, (2,))
    assert [type(layer) is SumLayer for layer in layers] == [True, False, True]
    assert isinstance(layers[1], SumLayer)


def test_taps_add_nothing_to_the_weights(tapped):
    layers, *_ = tapped(SumLayer, Convention.SUM, (0, 1, 2, 3))
    assert all(set(layer.state_dict()) == {"add"} for layer in layers)
    assert all([name for name, _ in layer.named_parameters()] == ["add"] for layer in layers)


def test_without_hidden_states_the_embedding_cannot_be_tapped(tapped):
    layer_class, convention = CONVENTIONS["another-name"]
    with pytest.raises(CompatError, match=r"NamelessLayer\.forward has no hidden_states"):
        tapped(layer_class, convention, (0, 1))
    layers, *_, here = tapped(layer_class, convention, (1, 2))
    assert here == (1, 2)
    assert len(layers) == NUM_LAYERS
