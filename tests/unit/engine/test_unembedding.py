"""The lens of a model is the model's own norm and LogitsProcessor, or there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_scope.engine.worker.unembedding import check_lens, lens_of, logits_call
from vllm_scope.engine.worker.vocabulary import (
    check_part,
    gather_parts,
    part_alone,
    tensors_of,
)
from vllm_scope.errors import CompatError, ConfigError
from vllm_scope.request.sites import Sites

WIDTH, VOCAB, PADDED = 16, 50, 64


class Norm(nn.LayerNorm):
    def forward(self, rows, residual=None):
        return super().forward(rows), residual


def product_of(layer, rows, bias=None):
    return layer.cpu_linear(rows, layer.weight, bias)


class Head(nn.Module):
    """As vLLM's on a CPU: its product has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(PADDED, WIDTH), requires_grad=False)
        self.tp_size, self.num_calls = 1, 0
        self.quant_method = SimpleNamespace(apply=product_of)

        def product(rows, weight, bias):
            self.num_calls += 1
            return nn.functional.linear(rows, weight, bias)

        self.cpu_linear = product


class Model(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        super().__init__()
        self.norm, self.head, self.factor = Norm(WIDTH), Head(), factor
        self.processor = LogitsProcessor(PADDED, VOCAB, scale=0.5, soft_cap=3.0)

    def compute_logits(self, hidden):
        return self.processor(self.head, hidden)


class Scaled(Model):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden * 2)


class Shifted(Model):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden) + 1


class Masking(Model):
    """As Gemma 4 and Moondream 3."""

    def compute_logits(self, hidden):
        logits = super().compute_logits(hidden)
        return logits.index_fill_(-1, torch.tensor([2]), -torch.inf)


class ScaledInPlace(Model):
    def compute_logits(self, hidden):
        return super().compute_logits(hidden.mul_(2))


class Bare(Model):
    def compute_logits(self, hidden):
        return hidden @ self.head.weight.T


@pytest.fixture(autouse=True)
def default_config(monkeypatch):
    from vllm.model_executor.layers import logits_processor

    config = SimpleNamespace(model_config=None)
    monkeypatch.setattr(logits_processor, "get_current_vllm_config", lambda: config)


ROW = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))


def test_a_lens_is_norm_head_cap_and_scale_without_padding():
    model = Model()
    hidden = model.norm(ROW[None])[0][0]
    lens = lens_of(logits_call(model, hidden[None]), model.norm, ROW)
    assert lens.vocab_size == VOCAB
    num_calls = model.head.num_calls
    rows = torch.randn(7, WIDTH)
    found = lens.logits(rows)
    exact = nn.functional.layer_norm(rows, (WIDTH,)) @ model.head.weight[:VOCAB].T
    torch.testing.assert_close(found, (exact / 3).tanh() * 3 * 0.5)
    # vLLM's own product may not run on two threads at once.
    assert model.head.num_calls == num_calls


@pytest.mark.parametrize(
    ("model", "words"),
    [(Scaled, "changes its rows or its logits"), (Shifted, "changes its rows or its logits"),
     (Masking, "changes its rows or its logits"),
     (ScaledInPlace, "changes its rows or its logits"),
     (Bare, "does not make its logits with one LogitsProcessor")],
)  # fmt: skip
def test_a_model_that_does_more_has_no_lens(model, words):
    made = model()
    hidden = made.norm(ROW[None])[0][0]
    with pytest.raises(CompatError, match=words):
        logits_call(made, hidden[None])
    with pytest.raises(
        CompatError,
        match="computes more between its last layer and its unembedding than its final norm",
    ):
        lens_of(logits_call(Model(), hidden[None] / 8), made.norm, ROW)
    with pytest.raises(CompatError, match="does not call exactly one norm after its layers"):
        lens_of(logits_call(Model(), hidden[None]), None, ROW)


NUM_RANKS = 4


class Biased(Model):
    """As Phi: the bias of the head is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias = nn.Parameter(torch.randn(PADDED), requires_grad=False)

    def compute_logits(self, hidden):
        return self.processor(self.head, hidden, self.head.bias)


class Elsewhere(Model):
    """Its bias is no part of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.zeros(PADDED)

    def compute_logits(self, hidden):
        return self.processor(self.head, hidden, embedding_bias=self.bias)


def split_call(model, hidden):
    """(the call as the first of several ranks sees it, the heads of all): the last rank's part ends
    in the padding, whose logits would be the largest."""
    model.head.weight[VOCAB:] = 100 * hidden
    call = logits_call(model, hidden[None])
    chunks = {name: one.chunk(NUM_RANKS) for name, one in tensors_of(model.head).items()}
    heads = [
        part_alone(model.head, {name: some[rank] for name, some in chunks.items()})
        for rank in range(NUM_RANKS)
    ]
    model.head.tp_size = NUM_RANKS
    return call, heads


@pytest.mark.parametrize("model", [Model, Biased])
def test_the_heads_of_all_ranks_make_the_logits_of_one(model):
    made = model()
    hidden = made.norm(ROW[None])[0][0]
    whole = lens_of(logits_call(made, hidden[None]), made.norm, ROW)
    call, heads = split_call(made, hidden)
    lens = lens_of(call, made.norm, ROW, heads)
    assert lens.vocab_size == VOCAB
    rows = torch.randn(7, WIDTH)
    torch.testing.assert_close(lens.logits(rows), whole.logits(rows))
    assert (lens.pack(rows, VOCAB)[:, : 4 * VOCAB].view(torch.int32) < VOCAB).all()
    assert heads[0].weight.data_ptr() == made.head.weight.data_ptr()


def test_heads_of_other_parts_make_no_lens():
    model = Model()
    hidden = model.norm(ROW[None])[0][0]
    call, heads = split_call(model, hidden)
    for some in (heads[::-1], heads[:3], [*heads[:3], heads[0]]):
        with pytest.raises(CompatError, match="parts of Model's unembedding make other logits"):
            lens_of(call, model.norm, ROW, some)
    call, heads = split_call(Elsewhere(), hidden)
    with pytest.raises(CompatError, match="adds a tensor to its logits that is not its unemb"):
        lens_of(call, model.norm, ROW, heads)


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_that_take_more_than_is_allowed_end_the_start_on_every_rank(rank):
    group = SimpleNamespace(ranks=[4, 5, 6], rank_in_group=rank, world_size=3)
    head = Head()
    head.tp_size = 3
    check_part(head, group)
    with pytest.raises(
        ConfigError, match=r"unembedding_mib is 0\.001; .* take 0\.0 MiB of the first"
    ):
        gather_parts(head, group, 0.001)


def test_a_head_that_every_rank_holds_whole_is_not_gathered():
    group = SimpleNamespace(ranks=[0, 1], rank_in_group=0, world_size=2)
    (head,) = gather_parts(Head(), group, 0)
    assert head.tp_size == 1
    group.rank_in_group = 1
    assert gather_parts(Head(), group, 0) == ()


def test_a_head_of_another_group_or_another_kind_is_refused():
    head = Head()
    head.tp_size, head.parallel_group = 2, object()
    with pytest.raises(CompatError, match="shared by another group"):
        check_part(head, object())
    with pytest.raises(CompatError, match="no single module"):
        check_part(nn.Sequential(Head()), object())


def test_what_an_engine_lacks_is_named():
    sites = Sites(3, WIDTH, "float32", (0, 2, 4, 6))

    def config_of(ranks=1, runner="generate"):
        return SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
            model_config=SimpleNamespace(
                runner_type=runner, dtype=torch.bfloat16, get_vocab_size=lambda: 2**21
            ),
        )

    def reason(is_last=True, here=sites.boundaries, **options):
        with pytest.raises(CompatError) as caught:
            check_lens(config_of(**options), is_last, sites, here, 0)
        return str(caught.value)

    # 2^21 rows of 16 numbers, of which another rank has half.
    assert "tensor_parallel_size is 2, and no rank" in reason(ranks=2)
    assert "'unembedding_mib': 33}" in reason(ranks=2)
    check_lens(config_of(ranks=2), True, sites, sites.boundaries, 33)
    assert "only the last pipeline stage" in reason(is_last=False)
    assert "does not generate" in reason(runner="pooling")
    assert "resid_post of the last layer, 2, has no tap" in reason(here=(0, 2, 4))
