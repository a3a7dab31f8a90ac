"""The maps that a sweep is measured beside are causal maps: values of Hugging Face's model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.causal_maps import A, B, HuggingFace, TransformerLens, by_hooks
from benchmarks.shapes import make_tokenizer
from tests.checkpoints import NUM_LAYERS, Reference, make_checkpoint

ASKED = torch.tensor([[30, 31, 32, 33, 34], [7, 8, 9, 10, 11]])
OTHER = torch.tensor([[60, 61, 62, 63, 64], [90, 80, 70, 60, 50]])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_checkpoint("llama", tmp_path_factory.mktemp("models"))
    return Reference(path, torch.float32)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def wanted(model):
    """The value of each cell, from a forward of its own in which one row is replaced:
    [num_prompts, num_layers, num_positions]."""
    found = []
    for asked, other in zip(ASKED.tolist(), OTHER.tolist(), strict=True):
        rows, _ = model.edited(other, [])
        for layer in range(NUM_LAYERS):
            for position in range(len(asked)):

                def patch(x, layer=layer, position=position, rows=rows):
                    x[position] = rows["resid_pre", layer][position]
                    return x

                _, logits = model.edited(asked, [("resid_pre", layer, patch)])
                found.append(float(logits[-1, A] - logits[-1, B]))
    return torch.tensor(found).double().view(len(ASKED), NUM_LAYERS, -1)


@pytest.mark.parametrize("at_once", [1, 4, 1000])
def test_a_map_by_hooks_has_every_cell_whatever_shares_a_forward(model, at_once):
    values = wanted(model)
    assert values.std() > 0.05  # the cells differ
    found = by_hooks(HuggingFace(model.model), at_once, ASKED, OTHER)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, values, rtol=0, atol=1e-5)


def test_maps_by_transformer_lens_have_these_values(model):
    pytest.importorskip("transformer_lens", reason="it is in .venv/training")
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM

    make_tokenizer(model.path)
    hf = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    bridge = TransformerBridge.boot_transformers(
        str(model.path), hf_model=hf, device="cpu", dtype=torch.float32
    )
    lens = TransformerLens(bridge)
    values = wanted(model)
    for found in (lens.map(ASKED, OTHER), by_hooks(lens, 4, ASKED, OTHER)):
        torch.testing.assert_close(found, values, rtol=0, atol=1e-5)
