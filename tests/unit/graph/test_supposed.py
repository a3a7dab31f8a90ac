"""A model whose source is not understood has the one convention that every equality bears out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.unit.graph.test_proof import GOOD, LeavingNorm, Model, PostNormLayer, _leaving
from tests.unit.graph.test_tapped import HIDDEN_SIZE, NUM_LAYERS, Norm, SumLayer, TensorLayer
from vllm_scope import CompatError
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.layers import Anatomy, supposed_anatomies
from vllm_scope.graph.anatomy.supposed import compare_compiled, prove_supposed, stream_rows
from vllm_scope.graph.anatomy.watched import Watch

WHY = "Layer.forward is written in another way"


def watched(model: nn.Module, noise: bool = True, **given) -> tuple[tuple[Anatomy, ...], Watch]:
    layers = {int(number): layer for number, layer in model.layers.items()}
    one = Anatomy(
        layers, NUM_LAYERS, Convention.SUM, "layers", norm="norm", norm_here=model.norm, unread=WHY
    )
    with torch.inference_mode(), Watch(one, noise) as watch:
        model(**given)
    return tuple(replace(one, convention=convention) for convention in Convention), watch


def proved(model: nn.Module, hidden_size: int = HIDDEN_SIZE, **given) -> Convention:
    return prove_supposed(*watched(model, **given), torch.float32, hidden_size).convention


@pytest.mark.parametrize(("layer", "norm", "convention", "inner"), GOOD)
def test_the_numbers_find_the_convention(layer, norm, convention, inner):
    if norm is LeavingNorm:
        layer = type("Layer", (layer,), {"forward": _leaving})
    assert proved(Model(layer, norm)) is convention


class Halving(SumLayer):
    """Returns twice what it adds; the next layer halves it."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        if residual is not None:
            hidden_states = hidden_states * 0.5
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        return hidden_states * 2, residual


class Three(TensorLayer):
    def forward(self, positions: Tensor, hidden_states: Tensor):
        return hidden_states, hidden_states, hidden_states


class Choosing(Model):
    """Between two layers it takes one of two tensors by their values: here, the layer's."""

    def forward(self, times: int = 1) -> None:
        hidden = torch.zeros(2, HIDDEN_SIZE)
        for layer in self.layers.values():
            new = layer(torch.arange(2), hidden)
            hidden = torch.where(new.isfinite(), new, hidden)
        self.norm(hidden)


class Wide(Model):
    """A stream of more numbers than the model's configuration says."""

    def forward(self, times: int = 1) -> None:
        hidden = torch.zeros(2, 2 * HIDDEN_SIZE)
        for layer in self.layers.values():
            hidden = layer(torch.arange(2), hidden)
        self.norm(hidden)


class Doubling(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.input_norm = Norm()

    def forward(self, positions: Tensor, hidden_states: Tensor):
        return hidden_states * 2 + self.input_norm(hidden_states)


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        pytest.param(
            Model(Halving), {}, r"the input of layer 1 is not the input of its first norm: a row "
            r"differs by \d.* of its length \(if the layer returns \(hidden, residual\); the "
            r"stream is their sum\); the input of layer 1 is not .* \(if the layer returns "
            r"\(stream, None or",
            id="neither-the-sum-nor-the-first",
        ),
        pytest.param(
            Model(PostNormLayer), {},
            "no rows show the input of the first module of layers 0, 1, 2",
            id="no-norm-shows-what-layers-get",
        ),
        pytest.param(
            Model(SumLayer, change=lambda n, x: x * 2 if n == 2 else x), {},
            "the output of layer 1 is not the input of layer 2", id="a-stream-that-moves",
        ),
        pytest.param(
            Choosing(TensorLayer), {}, "layer 1 gets other tensors than layer 0 returned, which "
            "may be chosen by values", id="a-choice-by-values",
        ),
        pytest.param(
            Wide(Doubling), {}, r"layer 0 leaves rows of \d+ numbers, not of ", id="another-width"
        ),
        pytest.param(
            Model(SumLayer), {"times": 2}, "layer 0 runs 2 times in a forward", id="two-passes"
        ),
        pytest.param(
            Model(SumLayer), {"times": 0}, "layer 0 runs 0 times in a forward", id="no-pass"
        ),
    ],
)  # fmt: skip
def test_what_numbers_do_not_prove_is_refused_with_what_failed(model, given, words):
    with pytest.raises(CompatError, match=f"{WHY}, and numbers do not show the stream .*{words}"):
        proved(model, **given)


def test_what_no_convention_returns_is_named():
    class Runs(Model):
        def forward(self) -> None:
            for layer in self.layers.values():
                layer(torch.arange(2), torch.ones(2, HIDDEN_SIZE))

    with pytest.raises(CompatError, match=r"returned \(Tensor, Tensor, Tensor\), which is of no"):
        proved(Runs(Three))


def test_layers_that_change_nothing_agree_with_two_conventions():
    class Nothing(SumLayer):
        def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
            self.input_norm(hidden_states)
            return hidden_states, torch.zeros_like(hidden_states)

    with pytest.raises(CompatError, match="they agree with two conventions"):
        proved(Model(Nothing))


def test_the_compiled_graph_must_give_the_rows_of_the_model():
    model = Model(SumLayer, change=lambda n, x: torch.ones_like(x) if n == 0 else x)
    anatomies, watch = watched(model, noise=False)
    expected = stream_rows(anatomies[0], watch, torch.float32)
    assert sorted(expected) == [0, 2, 4, 6]
    assert torch.equal(expected[0], torch.ones(HIDDEN_SIZE))
    compare_compiled(
        {b: row * (1 + 1e-4) for b, row in expected.items()}, expected, WHY, torch.float32
    )
    with pytest.raises(
        CompatError, match=rf"^{WHY}, .* the row after layer 1 differs by 0\.5 of its length"
    ):
        compare_compiled({4: expected[4] * 2}, expected, WHY, torch.float32)
    with pytest.raises(CompatError, match=f"^{WHY}, .* before layer 0 is 0, which shows nothing"):
        compare_compiled({0: torch.zeros(2)}, {0: torch.zeros(2)}, WHY, torch.float32)
    with pytest.raises(CompatError, match="after layer 0 is not finite"):
        compare_compiled({2: torch.full((2,), torch.nan)}, {2: torch.ones(2)}, WHY, torch.float32)


def no(layer: nn.Module) -> bool:
    return False


@pytest.mark.parametrize("norms", [0, 2])
def test_one_norm_beside_the_layers_is_needed(norms):
    model = nn.Module()
    model.layers = nn.ModuleList([TensorLayer(n) for n in range(NUM_LAYERS)])
    for number in range(norms):
        model.add_module(f"norm_{number}", Norm())
    sentence = f"^{WHY}; and Module does not have exactly one norm beside its layers"
    with pytest.raises(CompatError, match=sentence):
        supposed_anatomies(model, NUM_LAYERS, no, no, WHY)
    model = nn.Sequential(model)
    model[0].norm_0 = Norm()
    if not norms:
        found = supposed_anatomies(model, NUM_LAYERS, no, no, WHY)
        assert [one.convention for one in found] == list(Convention)
        assert {(one.unread, one.path, one.norm) for one in found} == {(WHY, "0.layers", "norm_0")}
