"""What a layer's output means is read off its source, and refused where it is not sure.

The layers and models here are never run: their source is what is looked at.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import nn

from vllm_scope import CompatError
from vllm_scope.graph.anatomy.convention import (
    Convention,
    convention_of,
    final_norm_of,
    treats_half_apart,
)
from vllm_scope.graph.anatomy.layers import find_anatomy

# Layers


class Sums(nn.Module):
    """As most of vLLM's: the residual add is left to the next norm."""

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm_1(hidden_states)
        else:
            hidden_states, residual = self.norm_1(hidden_states, residual)
        hidden_states = self.attn(positions, hidden_states)
        hidden_states, residual = self.norm_2(hidden_states, residual)
        return self.mlp(hidden_states), residual


class SumsEarlier(Sums):
    """A second class of layer in the same model, with two returns that are alike."""

    def forward(self, positions, hidden_states, *, residual=None):
        if self.skipped:
            return hidden_states, residual
        hidden_states, residual = self.norm_1(hidden_states, residual)
        return self.attn(positions, hidden_states), residual


class Inherits(Sums):
    pass


class Returns(nn.Module):
    def forward(self, positions, hidden_states):
        residual = hidden_states
        hidden_states = self.attn(positions, self.norm(hidden_states))
        hidden_states = residual + hidden_states
        return hidden_states  # noqa: RET504


class Dead(nn.Module):
    """The signature of `Sums`, but the residual is in the hidden states already."""

    def forward(self, positions, hidden_states, residual):
        residual = hidden_states
        hidden_states = self.attn(positions, self.norm(hidden_states))
        hidden_states = residual + hidden_states
        return hidden_states, residual


class NoResidualComesIn(nn.Module):
    def forward(self, positions, hidden_states):
        return self.attn(hidden_states), self.norm(hidden_states)


class ReturnsNone(nn.Module):
    """As vLLM's Gemma 4: the signature of `Sums`, and never a residual."""

    def forward(self, positions, hidden_states, residual):
        residual = hidden_states
        hidden_states = self.attn(positions, self.norm(hidden_states)) + residual
        return hidden_states, None


class ThreeValues(Sums):
    def forward(self, positions, hidden_states, residual):
        return hidden_states, residual, self.router_logits


class OneOrTwo(Sums):
    def forward(self, positions, hidden_states, residual):
        if self.last:
            return hidden_states + residual
        return hidden_states, residual


class NamedPair(Sums):
    """Returns one name, which holds two values."""

    def forward(self, positions, hidden_states, residual):
        outputs = (self.mlp(hidden_states), residual)
        return outputs  # noqa: RET504 (the name is the case)


class Stream(NamedTuple):
    hidden_states: torch.Tensor
    branch: torch.Tensor


class ReturnsAnObject(nn.Module):
    """As vLLM's Muse Spark: one value, which is no tensor."""

    def forward(self, positions, hidden_states):
        return Stream(hidden_states, self.mlp(hidden_states))


class Overwrites(nn.Module):
    """As vLLM's Cohere 2 MoE: a flag of the layer decides whether the residual is dead."""

    def __init__(self, rms: bool = True) -> None:
        super().__init__()
        self.uses_rms_norm = rms

    def forward(self, positions, hidden_states, residual):
        if not self.uses_rms_norm:
            residual = hidden_states
            hidden_states, residual = self.norm(hidden_states, residual)
        elif residual is None:
            residual = hidden_states
            hidden_states = self.norm(hidden_states)
        else:
            hidden_states, residual = self.norm(hidden_states, residual)
        branch = self.attn(positions, hidden_states)
        if self.uses_rms_norm:
            return branch, residual
        return residual + branch, residual


class OverwritesAtTimes(nn.Module):
    def forward(self, positions, hidden_states, residual):
        if len(positions) > 1:
            residual = hidden_states
        hidden_states, residual = self.norm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Nothing(nn.Module):
    def forward(self, positions, hidden_states):
        self.out.copy_(hidden_states)


class NoForward(nn.Module):
    pass


class Lambda(nn.Module):
    forward = lambda self, positions, hidden_states: hidden_states  # noqa: E731


class Coroutine(nn.Module):
    async def forward(self, positions, hidden_states):
        return hidden_states


_namespace: dict = {"nn": nn}
exec(
    "class FromNowhere(nn.Module):\n"
    "    def forward(self, positions, hidden_states, residual):\n"
    "        return hidden_states, residual\n",
    _namespace,
)
FromNowhere = _namespace["FromNowhere"]


def _logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(Sums):
    @_logged
    def forward(self, positions, hidden_states, residual):
        return self.mlp(hidden_states), residual


# Models


class NormJoins(nn.Module):
    def forward(self, input_ids, positions):
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class PlusJoins(nn.Module):
    def forward(self, input_ids, positions):
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states = hidden_states + residual
        return self.final_norm(hidden_states)


class PassesOn(NormJoins):
    def forward(self, input_ids, positions):
        return super().forward(input_ids, positions)


class InheritsForward(NormJoins):
    pass


class TakesOne(nn.Module):
    def forward(self, input_ids, positions):
        hidden_states = self.embed(input_ids)
        for layer in self.layers:
            hidden_states = layer(positions, hidden_states)
        return self.norm(hidden_states)


class TakesOneFromBlocks(nn.Module):
    def forward(self, input_ids, positions):
        x = self.embed(input_ids)
        for i in range(len(self.blocks)):
            x = self.run_block(i, x)
        return self.norm(x)


class LeavesTheSecond(nn.Module):
    def forward(self, input_ids, positions):
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm(hidden_states)


class JoinsWhatThereIs(nn.Module):
    """As vLLM's Gemma 4."""

    def forward(self, input_ids, positions):
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        if residual is None:
            hidden_states = self.norm(hidden_states)
        else:
            hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class PassesBy(nn.Module):
    """A norm that hands its second argument on, as vLLM's Cohere has."""

    def forward(self, hidden_states, residuals=None):
        return self.scale * hidden_states, residuals


class AddsThere(nn.Module):
    """A norm that looks like it, and adds."""

    def forward(self, hidden_states, residuals=None):
        hidden_states = hidden_states + residuals
        return self.scale * hidden_states, residuals


class JoinsWith(NormJoins):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm


class JoinsWithLn(NormJoins):
    """As vLLM's Exaone 3."""

    def forward(self, input_ids, positions):
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.ln_f(hidden_states, residual)[0]


class TakesTheFirst(nn.Module):
    def forward(self, input_ids, positions):
        hidden_states = self.embed(input_ids)
        for layer in self.layers:
            layer_outputs = layer(positions, hidden_states)
            hidden_states = layer_outputs[0]
        return self.norm(hidden_states)


class LoopsTwice(nn.Module):
    """As vLLM's iquest_loopcoder: layer 0 sees the embedding in the first turn only."""

    def forward(self, input_ids, positions):
        hidden_states = self.embed(input_ids)
        for _turn in range(self.loop_num):
            for layer in self.layers:
                hidden_states = layer(positions, hidden_states)
        return self.norm(hidden_states)


class JoinsByFlag(nn.Module):
    def __init__(self, rms: bool = True) -> None:
        super().__init__()
        self.uses_rms_norm = rms

    def forward(self, input_ids, positions):
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        if self.uses_rms_norm:
            return self.norm(hidden_states, residual)[0]
        return self.norm(hidden_states)


class NoLoop(nn.Module):
    def forward(self, input_ids, positions):
        hidden_states, residual = self.run_layers(input_ids, positions)
        return self.norm(hidden_states, residual)


@pytest.mark.parametrize(
    ("layer", "model", "convention"),
    [
        pytest.param(Sums, NormJoins, Convention.SUM, id="norm-joins"),
        pytest.param(Sums, PlusJoins, Convention.SUM, id="plus-joins"),
        pytest.param(Sums, PassesOn, Convention.SUM, id="model-passes-on-to-super"),
        pytest.param(Sums, InheritsForward, Convention.SUM, id="model-inherits-forward"),
        pytest.param(Inherits, NormJoins, Convention.SUM, id="layer-inherits-forward"),
        pytest.param(SumsEarlier, NormJoins, Convention.SUM, id="two-returns-alike"),
        pytest.param(Decorated, NormJoins, Convention.SUM, id="decorated-forward"),
        pytest.param(Returns, TakesOne, Convention.TENSOR, id="one-tensor"),
        pytest.param(Returns, TakesOneFromBlocks, Convention.TENSOR, id="one-tensor-of-a-block"),
        pytest.param(Dead, LeavesTheSecond, Convention.DEAD_RESIDUAL, id="dead-residual"),
        pytest.param(
            Dead,
            lambda: JoinsWith(PassesBy()),
            Convention.DEAD_RESIDUAL,
            id="a-norm-that-leaves-the-residual",
        ),
        pytest.param(Sums, lambda: JoinsWith(AddsThere()), Convention.SUM, id="a-norm-that-adds"),
        pytest.param(Sums, JoinsWithLn, Convention.SUM, id="a-norm-called-ln"),
        pytest.param(
            ReturnsNone, JoinsWhatThereIs, Convention.DEAD_RESIDUAL, id="never-a-residual"
        ),
        pytest.param(Sums, JoinsWhatThereIs, Convention.SUM, id="a-residual-that-is-joined"),
    ],
)
def test_the_convention_is_read_off_layer_and_model(layer, model, convention):
    assert convention_of(layer(), model()) is convention


@pytest.mark.parametrize(
    ("layer", "model", "reason"),
    [
        pytest.param(ThreeValues, NormJoins, "returns 3 values, not 1 or 2", id="three-values"),
        pytest.param(OneOrTwo, NormJoins, "has 2 forms of return", id="one-or-two-values"),
        pytest.param(Nothing, TakesOne, "has 0 forms of return", id="no-return"),
        pytest.param(NoForward, TakesOne, "has 0 forms of return", id="no-forward"),
        pytest.param(FromNowhere, NormJoins, "source of FromNowhere.forward", id="made-by-exec"),
        pytest.param(Lambda, TakesOne, "not a plain function", id="lambda"),
        pytest.param(Coroutine, TakesOne, "not a plain function", id="coroutine"),
        pytest.param(Sums, LeavesTheSecond, "does not add", id="a-pair-that-nobody-joins"),
        pytest.param(Sums, TakesOne, "does not add", id="a-pair-for-a-model-of-one"),
        pytest.param(Dead, NormJoins, "adds the second", id="a-dead-residual-that-is-joined"),
        pytest.param(
            Dead, lambda: JoinsWith(AddsThere()), "adds the second", id="a-norm-that-adds-it-again"
        ),
        pytest.param(
            Sums, lambda: JoinsWith(PassesBy()), "does not add", id="a-sum-that-no-norm-makes"
        ),
        pytest.param(Dead, JoinsWhatThereIs, "adds the second", id="joined-where-there-is-one"),
        pytest.param(NoResidualComesIn, NormJoins, "adds", id="a-pair-without-residual"),
        pytest.param(Returns, NormJoins, "does not use", id="one-value-for-a-model-of-pairs"),
        pytest.param(ReturnsAnObject, TakesOne, "returns a Stream, not", id="an-object"),
        pytest.param(
            OverwritesAtTimes, NormJoins, "where `len(positions) > 1`", id="dead-at-times"
        ),
        pytest.param(NamedPair, TakesTheFirst, "NamedPair", id="a-pair-under-one-name"),
        pytest.param(Returns, LoopsTwice, "LoopsTwice", id="layers-that-run-twice"),
        pytest.param(Sums, NoLoop, "has no loop over layers", id="a-model-without-a-loop"),
        pytest.param(Returns, NoForward, "has no loop over layers", id="a-model-without-forward"),
    ],
)
def test_signs_that_disagree_or_are_not_understood_are_refused(layer, model, reason):
    with pytest.raises(CompatError) as caught:
        convention_of(layer(), model())
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("rms", "convention"), [(True, Convention.SUM), (False, Convention.DEAD_RESIDUAL)]
)
def test_a_flag_of_the_layer_decides_its_branch(rms, convention):
    assert convention_of(Overwrites(rms), JoinsByFlag(rms)) is convention


def test_a_flag_that_layer_and_model_do_not_share_is_refused():
    with pytest.raises(CompatError, match="does not add the second"):
        convention_of(Overwrites(True), JoinsByFlag(False))


def test_an_unknown_flag_keeps_both_branches():
    layer = Overwrites()
    del layer.uses_rms_norm
    with pytest.raises(
        CompatError, match=r"overwrites the residual where `not self\.uses_rms_norm`"
    ):
        convention_of(layer, JoinsByFlag())


class NormsTheEmbedding(nn.Module):
    """As vLLM's Bloom."""

    def forward(self, input_ids, positions):
        hidden_states = self.embed_layernorm(self.embed(input_ids))
        for layer in self.h:
            hidden_states = layer(positions, hidden_states)
        return self.ln_f(hidden_states)


class NormsTwice(nn.Module):
    def forward(self, input_ids, positions):
        hidden_states = self.embed(input_ids)
        for layer in self.layers:
            hidden_states = layer(positions, hidden_states)
        return self.norm_2(self.norm_1(hidden_states))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(NormJoins, "norm", id="joins"),
        pytest.param(PlusJoins, "final_norm", id="plus"),
        pytest.param(JoinsWhatThereIs, "norm", id="two-calls-of-one"),
        pytest.param(NormsTheEmbedding, "ln_f", id="another-before-the-layers"),
        pytest.param(InheritsForward, "norm", id="inherited"),
        pytest.param(NormsTwice, None, id="two-behind-the-layers"),
    ],
)
def test_the_final_norm_is_the_one_behind_the_layers(model, name):
    assert final_norm_of(model()) == name


class ScalesInHalf(nn.Module):
    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = self.norm(hidden_states, residual)
        if hidden_states.dtype == torch.float16:
            hidden_states *= 1.0 / self.scale
        return hidden_states, residual


def test_a_layer_that_scales_in_half_precision_is_known():
    assert treats_half_apart(ScalesInHalf())
    assert not treats_half_apart(Sums())


# The search


class Missing(nn.Module):
    """The placeholder of a layer that another stage holds."""


def _is_missing(layer: nn.Module) -> bool:
    return isinstance(layer, Missing)


class Cache(nn.Module):
    """What keeps keys and values."""


def _has_cache(module: nn.Module) -> bool:
    return isinstance(module, Cache)


def _model(model_class: type[nn.Module], *layers: nn.Module, name: str = "layers") -> nn.Module:
    """A causal model with `model_class` inside, as vLLM nests them."""
    top, inner = nn.Module(), model_class()
    inner.register_module(name, nn.ModuleList(layers))
    top.model = inner
    return top


def test_the_decoder_is_the_list_of_the_right_length():
    layers = [Sums() for _ in range(3)]
    model = _model(NormJoins, *layers)
    model.model.others = nn.ModuleList([nn.Linear(1, 1) for _ in range(4)])
    anatomy = find_anatomy(model, 3, _is_missing, _has_cache)
    assert anatomy.layers == dict(enumerate(layers))
    assert anatomy.num_layers == 3
    assert anatomy.convention is Convention.SUM
    assert anatomy.path == "model.layers"


def test_the_list_may_be_the_models_own():
    model = TakesOne()
    model.layers = nn.ModuleList([Returns(), Returns()])
    anatomy = find_anatomy(model, 2, _is_missing, _has_cache)
    assert (anatomy.path, anatomy.convention) == ("layers", Convention.TENSOR)


def test_a_stage_keeps_the_numbers_of_the_whole_model():
    first, second = Dead(), Dead()
    model = _model(LeavesTheSecond, Missing(), Missing(), first, second, Missing())
    anatomy = find_anatomy(model, 5, _is_missing, _has_cache)
    assert anatomy.layers == {2: first, 3: second}
    assert anatomy.num_layers == 5
    assert anatomy.convention is Convention.DEAD_RESIDUAL


def test_layers_of_several_classes_may_share_a_convention():
    anatomy = find_anatomy(
        _model(NormJoins, Sums(), SumsEarlier(), Inherits()), 3, _is_missing, _has_cache
    )
    assert anatomy.convention is Convention.SUM


def test_a_list_with_two_names_is_one_list():
    model = _model(NormJoins, Sums(), Sums())
    model.alias = model.model.layers
    assert len(find_anatomy(model, 2, _is_missing, _has_cache).layers) == 2


def test_two_lists_of_the_same_layers_are_one():
    """As vLLM's Gemma 4: its halves are lists too, and one of them may hold every layer."""
    layers = [Sums(), Sums()]
    model = _model(NormJoins, *layers)
    model.half = nn.ModuleList(layers)
    assert find_anatomy(model, 2, _is_missing, _has_cache).path == "model.layers"


def _with_experts() -> nn.Module:
    model = _model(NormJoins, Sums(), Sums())
    model.model.layers[0].experts = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    return model


def _with_a_vision_tower() -> nn.Module:
    model = _model(NormJoins, Sums(), Sums())
    model.vision = _model(TakesOne, Returns(), Returns())
    return model


def _attending(layer: nn.Module) -> nn.Module:
    layer.self_attn = nn.Sequential(nn.Linear(1, 1), Cache())
    return layer


@pytest.mark.parametrize("other", [_with_experts, _with_a_vision_tower])
def test_of_several_lists_the_decoder_is_the_one_that_keeps_a_cache(other):
    model = other()
    for layer in model.model.layers:
        _attending(layer)
    assert find_anatomy(model, 2, _is_missing, _has_cache).path == "model.layers"


def _with_two_decoders() -> nn.Module:
    model = _model(NormJoins, _attending(Sums()), _attending(Sums()))
    model.draft = _model(NormJoins, _attending(Sums()), _attending(Sums()))
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param(
            _with_two_decoders(), ["model.layers", "draft.model.layers"], id="two-decoders"
        ),
        pytest.param(
            _model(NormJoins, Sums()), ["list of 2 decoder layers in Module", "found none"],
            id="none",
        ),
        pytest.param(
            _model(NormJoins, Missing(), Missing()), ["found none"], id="all-on-another-stage"
        ),
        pytest.param(
            _with_a_vision_tower(), ["model.layers", "vision.model.layers"], id="a-vision-tower"
        ),
        pytest.param(
            _with_experts(), ["model.layers, model.layers.0.experts"], id="as-many-experts"
        ),
        pytest.param(_model(NormJoins, Sums(), Dead()), ["Dead returns a pair"], id="two-kinds"),
        pytest.param(
            _model(NoLoop, Sums(), Sums()), ["NoLoop.forward has no loop"], id="unknown-model"
        ),
    ],
)  # fmt: skip
def test_a_model_without_one_clear_decoder_is_refused(model, words):
    with pytest.raises(CompatError) as caught:
        find_anatomy(model, 2, _is_missing, _has_cache)
    assert all(word in str(caught.value) for word in words)
