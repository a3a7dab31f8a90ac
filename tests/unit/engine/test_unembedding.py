"""The lens of a model is the model's own norm and LogitsProcessor, or there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_scope.engine.worker.unembedding import check_lens, lens_of
from vllm_scope.errors import CompatError
from vllm_scope.request.sites import Sites

WIDTH, VOCAB, PADDED = 16, 50, 64


class Norm(nn.LayerNorm):
    def forward(self, rows, residual=None):
        return super().forward(rows), residual


class Head(nn.Module):
    """As vLLM's on a CPU: its product has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(PADDED, WIDTH), requires_grad=False)
        self.tp_size, self.quant_method, self.num_calls = 1, self, 0

        def product(rows, weight, bias):
            self.num_calls += 1
            return nn.functional.linear(rows, weight, bias)

        self.cpu_linear = product

    def apply(self, layer, rows, bias=None):
        return layer.cpu_linear(rows, layer.weight, bias)


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
    lens = lens_of(model, model.norm, ROW, hidden)
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
        lens_of(made, made.norm, ROW, hidden)
    with pytest.raises(CompatError, match="does more after its layers than its final norm"):
        lens_of(Model(), made.norm, ROW, hidden / 8)
    with pytest.raises(CompatError, match="does not call exactly one norm after its layers"):
        lens_of(Model(), None, ROW, hidden)


def test_what_an_engine_lacks_is_named():
    sites = Sites(3, WIDTH, "float32", (0, 2, 4, 6))

    def reason(ranks=1, runner="generate", is_last=True, here=sites.boundaries):
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
            model_config=SimpleNamespace(runner_type=runner),
        )
        with pytest.raises(CompatError) as caught:
            check_lens(config, is_last, sites, here)
        return str(caught.value)

    assert "tensor_parallel_size is 2" in reason(ranks=2)
    assert "only the last pipeline stage" in reason(is_last=False)
    assert "does not generate" in reason(runner="pooling")
    assert "resid_post of the last layer, 2, has no tap" in reason(here=(0, 2, 4))
