"""The norm between attention and MLP is read off the layer's source, or the layer is refused.

The layers here are never run: their source is what is looked at.
"""

from __future__ import annotations

import pytest
from torch import nn

from vllm_scope import CompatError
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.middle import norm_before_mlp


class Llama(nn.Module):
    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


class Gemma(nn.Module):
    """Norms the attention's output alone, and then what the MLP gets."""

    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        return hidden_states, residual


class Experts(nn.Module):
    """Nothing is called MLP, and the next norm belongs to the layer's end."""

    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = self.ln_1(hidden_states, residual)
        hidden_states = self.attention(positions, hidden_states)
        hidden_states, residual = self.ln_2(hidden_states, residual)
        hidden_states = self.block_sparse_moe(hidden_states)
        hidden_states, residual = self.ln_3(hidden_states, residual)
        return hidden_states, residual


class Gpt(nn.Module):
    def forward(self, positions, hidden_states):
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        attn_output = self.attn(hidden_states)
        hidden_states = attn_output + residual
        residual = hidden_states
        hidden_states = self.ln_2(hidden_states)
        feed_forward_hidden_states = self.mlp(hidden_states)
        return residual + feed_forward_hidden_states


@pytest.mark.parametrize(
    ("layer", "convention", "norm"),
    [
        pytest.param(Llama, Convention.SUM, "post_attention_layernorm", id="llama"),
        pytest.param(Gemma, Convention.SUM, "pre_feedforward_layernorm", id="gemma"),
        pytest.param(Experts, Convention.SUM, "ln_2", id="experts"),
        pytest.param(Gpt, Convention.TENSOR, "ln_2", id="gpt"),
        pytest.param(Gpt, Convention.DEAD_RESIDUAL, "ln_2", id="a-dead-residual"),
    ],
)
def test_the_norm_whose_input_is_the_whole_stream_is_found(layer, convention, norm):
    assert norm_before_mlp(layer(), convention) == norm


class Opt(nn.Module):
    """As vLLM's OPT: the checkpoint of 350m norms behind its attention and its MLP."""

    def __init__(self, before: bool = True) -> None:
        super().__init__()
        self.do_layer_norm_before = before

    def forward(self, hidden_states):
        residual = hidden_states
        if self.do_layer_norm_before:
            hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = self.self_attn(hidden_states=hidden_states)
        hidden_states = residual + hidden_states
        if not self.do_layer_norm_before:
            hidden_states = self.self_attn_layer_norm(hidden_states)
        residual = hidden_states
        if self.do_layer_norm_before:
            hidden_states = self.final_layer_norm(hidden_states)
        hidden_states, _ = self.fc1(hidden_states)
        hidden_states, _ = self.fc2(hidden_states)
        hidden_states = residual + hidden_states
        if not self.do_layer_norm_before:
            hidden_states = self.final_layer_norm(hidden_states)
        return hidden_states


def test_a_norm_under_a_condition_counts_if_the_layer_runs_it():
    assert norm_before_mlp(Opt(before=True), Convention.TENSOR) == "final_layer_norm"
    with pytest.raises(CompatError, match=r"Opt\.forward has none where one norm"):
        norm_before_mlp(Opt(before=False), Convention.TENSOR)
    unknown = Opt()
    del unknown.do_layer_norm_before
    with pytest.raises(CompatError, match="may leave out the norm final_layer_norm"):
        norm_before_mlp(unknown, Convention.TENSOR)


class Either(nn.Module):
    """Each flag that a layer may ask itself."""

    def __init__(self, **flags: object) -> None:
        super().__init__()
        self.kind, self.index, self.other = "a", 0, None
        for name, value in flags.items():
            setattr(self, name, value)

    def forward(self, positions, hidden_states, residual):
        hidden_states = self.self_attn(positions, hidden_states)
        if self.kind == "a" and self.index != 3 and (self.other is None or self.unknown):
            hidden_states, residual = self.norm_a(hidden_states, residual)
        else:
            hidden_states, residual = self.norm_b(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


@pytest.mark.parametrize(
    ("flags", "norm"),
    [
        ({}, "norm_a"),
        ({"kind": "b"}, "norm_b"),
        ({"index": 3}, "norm_b"),
        ({"other": 1, "unknown": True}, "norm_a"),
        ({"other": 1, "unknown": False}, "norm_b"),
        ({"other": 1}, None),
    ],
    ids=str,
)
def test_flags_that_a_layer_asks_itself_are_answered(flags, norm):
    layer = Either(**flags)
    if norm is not None:
        assert norm_before_mlp(layer, Convention.SUM) == norm
        return
    with pytest.raises(CompatError, match="has norm_a, norm_b where one"):
        norm_before_mlp(layer, Convention.SUM)


class NoAttention(nn.Module):
    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = self.norm(hidden_states, residual)
        hidden_states = self.mixer(hidden_states)
        return hidden_states, residual


class Parallel(nn.Module):
    """One norm for both; between them lies no stream."""

    def forward(self, positions, hidden_states):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        attn_output = self.self_attn(positions, hidden_states)
        mlp_output = self.mlp(hidden_states)
        return residual + attn_output + mlp_output


class NormsTheOutput(nn.Module):
    """The attention's output alone is normed, and added inside the next line."""

    def forward(self, positions, hidden_states):
        residual = hidden_states
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        mlp_output = self.mlp(hidden_states)
        return mlp_output + residual


class Twice(nn.Module):
    def forward(self, positions, hidden_states, residual):
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.norm_a(hidden_states, residual)
        hidden_states, residual = self.norm_b(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


@pytest.mark.parametrize(
    ("layer", "convention", "reason"),
    [
        pytest.param(NoAttention, Convention.SUM, "calls nothing that is attention", id="mixer"),
        pytest.param(Parallel, Convention.TENSOR, "has none where one norm", id="parallel"),
        pytest.param(NormsTheOutput, Convention.TENSOR, "has none where", id="normed-output"),
        pytest.param(Twice, Convention.SUM, "has norm_a, norm_b where one", id="two-norms"),
        pytest.param(Gpt, Convention.SUM, "has none where one norm", id="the-wrong-convention"),
        pytest.param(Llama, Convention.TENSOR, "has none where one norm", id="the-other-one"),
    ],
)
def test_a_layer_without_one_clear_middle_is_refused(layer, convention, reason):
    with pytest.raises(CompatError, match=reason) as caught:
        norm_before_mlp(layer(), convention)
    assert layer.__name__ in str(caught.value)
