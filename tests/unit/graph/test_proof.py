"""The numbers of one forward bear out a model's anatomy, or refuse it with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.graph.test_tapped import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    DeadLayer,
    Norm,
    Part,
    SumLayer,
    TensorLayer,
)
from vllm_scope import CompatError
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.proof import Findings, find_faults
from vllm_scope.graph.anatomy.watched import Watch

SUM, TENSOR, DEAD = Convention.SUM, Convention.TENSOR, Convention.DEAD_RESIDUAL


class InPlaceNorm(Norm):
    """As vLLM's kernel: writes the sum to `residual` and the result to `x`."""

    def forward(self, x: Tensor, residual: Tensor | None = None):
        if residual is None:
            return x * 0.5
        residual += x
        x.copy_(residual * 0.5)
        return x, residual


class LeavingNorm(Norm):
    """As Cohere's: returns the residual as it came."""

    def forward(self, x: Tensor, residual: Tensor | None = None):
        return x * 0.5, residual


class ScaledBranchLayer(SumLayer):
    """Scales the residual between attention and MLP."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_norm(hidden_states)
        else:
            hidden_states, residual = self.input_norm(hidden_states, residual)
        hidden_states = self.attn(hidden_states)
        hidden_states, residual = self.post_norm(hidden_states, residual * 3)
        return self.mlp(hidden_states), residual


class Tiny(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1e-9


class LateLayer(SumLayer):
    """Adds to its MLP's output, so that resid_mid + mlp_out is not what a tap calls so."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        return hidden_states, residual * 2


class PostNormLayer(TensorLayer):
    """As OLMo 2's: no norm is before the attention."""

    def forward(self, positions: Tensor, hidden_states: Tensor):
        hidden_states = hidden_states + self.post_norm(self.attn(hidden_states))
        return hidden_states + self.input_norm(self.mlp(hidden_states))


class LayerOfX(TensorLayer):
    def forward(self, positions: Tensor, x: Tensor):
        return x + self.mlp(self.input_norm(x))


class Model(nn.Module):
    """Runs layers from zeros, as a forward with dummy tokens may.

    Args:
        numbers: the layers that this stage holds.
        change: (number, hidden) -> hidden before that layer.
    """

    def __init__(self, layer_class, norm_class=Norm, numbers=range(NUM_LAYERS), change=None):
        super().__init__()
        self.layers = nn.ModuleDict({str(n): layer_class(n) for n in numbers})
        self.norm, self.change = norm_class(), change
        for layer in self.layers.values():
            layer.input_norm, layer.post_norm = norm_class(), norm_class()
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(generator=torch.Generator().manual_seed(len(p)))

    def forward(self, times: int = 1) -> None:
        positions, hidden = torch.arange(2), torch.zeros(2, HIDDEN_SIZE)
        residual: Tensor | None = None
        for number, layer in self.layers.items():
            if self.change is not None:
                hidden = self.change(int(number), hidden)
            for _ in range(times):
                if isinstance(layer, TensorLayer):
                    hidden = layer(positions, hidden)
                else:
                    hidden, residual = layer(positions, hidden, residual)
        dead = isinstance(layer, DeadLayer)
        if residual is None or (dead and not isinstance(self.norm, LeavingNorm)):
            self.norm(hidden)
        else:
            self.norm(hidden, residual)


def watched(model: Model, **parts: Any) -> tuple[Anatomy, Watch]:
    """A forward of a model of SumLayers, some of whose parts are named."""
    layers = {int(number): layer for number, layer in model.layers.items()}
    anatomy = Anatomy(layers, NUM_LAYERS, SUM, "layers", **parts)
    with torch.inference_mode(), Watch(anatomy) as watch:
        model()
    return anatomy, watch


def findings(model: Model, convention: Convention, middles=True, norm=True, times=1) -> Findings:
    layers = {int(number): layer for number, layer in model.layers.items()}
    ends = model.norm if norm else None
    anatomy = Anatomy(layers, NUM_LAYERS, convention, "layers", norm="norm", norm_here=ends)
    watch = Watch(anatomy)
    with torch.inference_mode(), watch:
        model(times)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    inner = {n: layer.post_norm for n, layer in layers.items()} if middles else {}
    return find_faults(anatomy, inner, watch, torch.float32)


GOOD = [
    pytest.param(SumLayer, Norm, SUM, 3 * NUM_LAYERS, id="sum"),
    pytest.param(SumLayer, InPlaceNorm, SUM, 3 * NUM_LAYERS, id="sum-in-place"),
    pytest.param(TensorLayer, Norm, TENSOR, 0, id="tensor"),
    pytest.param(DeadLayer, Norm, DEAD, 0, id="dead-residual"),
    pytest.param(DeadLayer, LeavingNorm, DEAD, 0, id="norm-that-leaves-the-residual"),
    pytest.param(LayerOfX, Norm, TENSOR, 0, id="hidden-by-another-name"),
]


@pytest.mark.parametrize(("layer", "norm", "convention", "inner"), GOOD)
def test_right_anatomies_pass_every_equality(layer, norm, convention, inner):
    if norm is LeavingNorm:  # its layers call it with one tensor
        layer = type("Layer", (layer,), {"forward": _leaving})
    found = findings(Model(layer, norm), convention)
    assert (found.wrong_sites, found.moved, found.untold) == ({}, (), {})
    # Each layer's first norm, what layers hand on, the last norm; three inside of each layer.
    assert found.num_equal == NUM_LAYERS + (NUM_LAYERS - 1) + 1 + inner


def _leaving(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
    normed, residual = self.input_norm(hidden_states, hidden_states)
    return residual + self.mlp(self.attn(normed)), residual


@pytest.mark.parametrize(
    ("layer", "forced", "words"),
    [
        pytest.param(
            SumLayer, DEAD, r"the input of layer 1 is not the input of its first norm: a row "
            r"differs by \d.* of its length", id="sum-as-dead",
        ),
        pytest.param(
            DeadLayer, SUM, "by its source, the layer returns .hidden, residual.; the stream is "
            "their sum, but by numbers the input of layer 1 is not", id="dead-as-sum",
        ),
        pytest.param(SumLayer, TENSOR, r"layer 0 returned \(Tensor, Tensor\)", id="sum-as-tensor"),
        pytest.param(TensorLayer, SUM, r"layer 0 returned \(Tensor\)", id="tensor-as-sum"),
        pytest.param(TensorLayer, DEAD, r"layer 0 returned \(Tensor\)", id="tensor-as-dead"),
    ],
)  # fmt: skip
def test_a_wrong_convention_is_refused_with_what_failed(layer, forced, words):
    with pytest.raises(CompatError, match=words):
        findings(Model(layer), forced)


@pytest.mark.parametrize(("layer", "forced"), [(SumLayer, DEAD), (DeadLayer, SUM)])
def test_the_norm_behind_the_layers_alone_refuses_a_wrong_convention(layer, forced):
    class Normless(layer):
        """Its first module is no norm, so that only the model's end shows the stream."""

        def forward(self, positions, hidden_states, residual):
            self.mlp(hidden_states)
            return super().forward(positions, hidden_states, residual)

    with pytest.raises(
        CompatError, match="the output of layer 2 is not the input of the norm after it"
    ):
        findings(Model(Normless), forced)


def test_weights_of_a_dummy_load_do_not_hide_a_dead_residual():
    # The stream and the residual are alike, and a norm's output does not show a factor of two.
    model = Model(DeadLayer)
    for layer in model.layers.values():
        layer.attn = layer.mlp = Tiny()
    assert findings(model, DEAD).wrong_sites == {}
    with pytest.raises(CompatError, match=r"differs by 0\.5 of its length"):
        findings(model, SUM)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_refuse_nothing(value):
    model = Model(SumLayer)
    with torch.no_grad():
        model.layers["0"].mlp.add.fill_(value)
    found = findings(model, SUM)
    assert (found.wrong_sites, found.moved) == ({}, ())
    assert found.untold["the input of layers"] == (1, 2)
    assert found.num_equal > 0  # layer 0 up to its MLP


def test_a_stage_compares_what_it_holds_and_says_what_it_does_not():
    found = findings(Model(SumLayer, numbers=[0, 1]), SUM, norm=False)
    assert found.untold == {"the input of the next pipeline stage, after layers": (1,)}
    with pytest.raises(CompatError, match="the output of layer 2 is not"):
        findings(Model(_Second, numbers=[2]), DEAD)


class _Second(SumLayer):
    """Gets a residual although it is the first of its stage."""

    def forward(self, positions, hidden_states, residual):
        self.mlp(hidden_states)
        return super().forward(positions, hidden_states, hidden_states * 0.5)


def test_a_layer_without_a_norm_before_its_attention_is_compared_at_the_end():
    found = findings(Model(PostNormLayer), TENSOR)
    assert found.untold == {"the input of the first module of layers": (0, 1, 2)}
    assert found.num_equal == NUM_LAYERS


def test_what_is_added_beside_the_attention_is_not_attn_out():
    found = findings(Model(ScaledBranchLayer), SUM)
    assert found.wrong_sites.keys() == {"resid_mid", "attn_out"}
    words = "by numbers, resid_mid of layer 0 is not resid_pre + attn_out: a row differs by "
    assert all(text.startswith(words) for text in found.wrong_sites.values())
    assert findings(Model(ScaledBranchLayer), SUM, middles=False).wrong_sites == {}


def test_what_a_layer_adds_beside_its_mlp_is_not_mlp_out():
    found = findings(Model(LateLayer), SUM)
    assert found.wrong_sites.keys() == {"resid_mid", "mlp_out"}
    assert "resid_mid of layer 0 + mlp_out is not resid_post" in found.wrong_sites["mlp_out"]


def test_layers_before_which_the_model_changes_the_stream_are_named():
    found = findings(Model(SumLayer, change=lambda n, x: x * 2 if n == 2 else x), SUM)
    assert (found.moved, found.wrong_sites) == ((2,), {})


def test_a_layer_that_runs_twice_is_refused():
    with pytest.raises(CompatError, match="layer 0 runs 2 times in a forward"):
        findings(Model(SumLayer), SUM, times=2)


def test_a_forward_that_runs_no_layer_shows_nothing():
    found = findings(Model(SumLayer), SUM, times=0)
    assert found.untold == {"any row, because the forward did not run layers": (0, 1, 2)}
    assert found.num_equal == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("layer", "convention"), [(SumLayer, SUM), (TensorLayer, TENSOR)])
def test_rounding_is_not_a_fault(layer, convention, dtype):
    model = Model(layer).to(dtype)
    model.change = lambda number, x: x.to(dtype)
    found = findings(model, convention)
    assert (found.wrong_sites, found.moved, found.untold) == ({}, (), {})


@pytest.mark.parametrize(
    ("dtype", "times", "words"),
    [
        pytest.param(torch.float32, 1, None, id="once"),
        pytest.param(torch.float16, 1, "layer 1 returned rows of torch.float16, and the model's "
                     "rows are of torch.float32", id="another-dtype"),
        pytest.param(torch.float32, 2, "layer 1 ran 2 times in a forward", id="twice"),
        pytest.param(torch.float32, 0, "layer 1 ran 0 times in a forward", id="not-at-all"),
    ],
)  # fmt: skip
def test_a_router_runs_once_and_returns_rows_of_the_models_dtype(dtype, times, words):
    class Router(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return x.to(dtype), None

    class Experts(Part):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(times):
                router(x)
            return super().forward(x)

    router, model = Router(), Model(SumLayer)
    model.layers["1"].mlp = Experts(1.0)
    anatomy, watch = watched(model, routers={1: router})
    found = find_faults(anatomy, {}, watch, torch.float32).wrong_sites
    expected = {} if words is None else {"router_logits": f"the router of {words}"}
    assert found == expected


@pytest.mark.parametrize("keys", [4, 8], ids=["as-configured", "repeated"])
def test_rows_inside_the_attention_are_as_wide_as_configured(keys):
    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return torch.zeros_like(query)

    class Calling(Part):
        def forward(self, x: Tensor) -> Tensor:
            # As vLLM's Transformers backend calls it: hooks do not run.
            attention.forward(torch.zeros(2, 2, 4), torch.zeros(2, keys), value=torch.zeros(2, 4))
            return super().forward(x)

    attention, model = Attention(), Model(SumLayer)
    model.layers["1"].mlp = Calling(1.0)
    anatomy, watch = watched(model, attention={1: attention})
    assert "forward" not in vars(attention)
    sizes = {"q": 8, "k": 4, "v": 4, "z": 8}
    found = find_faults(anatomy, {}, watch, torch.float32, sizes).wrong_sites
    words = "its rows at layer 1 have 8 numbers, and 4 by the model's configuration"
    assert found == ({} if keys == 4 else {"k": words})
