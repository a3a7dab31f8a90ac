"""`vllm_scope.analysis.patching` returns what TransformerLens's functions of these names return.

TransformerLens is not among the packages of the other tests: `make test-training` runs this.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import TOYWORLD, local_engine
from vllm_scope import LogitDifference
from vllm_scope.analysis import patching

ASKED, OTHER = (f"Q: What is the capital of {name}? A:" for name in ("Ritova", "Kimar"))
METRIC = LogitDifference(" Sotburg", " Rindos")
SITES = ["embed", "resid_mid", "resid_post", "z", "q", "k", "v", "attn_out", "mlp_out"]


@pytest.fixture(scope="module")
def theirs():
    lens = pytest.importorskip("transformer_lens.patching")
    bridge = pytest.importorskip("transformer_lens.model_bridge")
    # A model that it loads itself needs accelerate.
    model = bridge.TransformerBridge.boot_transformers(
        str(TOYWORLD),
        hf_model=AutoModelForCausalLM.from_pretrained(TOYWORLD, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(TOYWORLD),
        device="cpu",
        dtype=torch.float32,
    )
    encode = model.tokenizer.encode
    asked, other = (torch.tensor([encode(text)]) for text in (ASKED, OTHER))
    a, b = (encode(text, add_special_tokens=False)[0] for text in (METRIC.a, METRIC.b))

    def get(name):
        function = getattr(lens, f"get_act_patch_{name}")
        return function(model, asked, cache, lambda logits: logits[0, -1, a] - logits[0, -1, b])

    with torch.no_grad():
        _, cache = model.run_with_cache(other)
        yield get


@pytest.fixture(scope="module")
def llm(theirs):
    with local_engine(
        TOYWORLD, skip_tokenizer_init=None, max_model_len=256, dtype="float32",
        additional_config={"scope": {"sites": SITES}},
    ) as llm:  # fmt: skip
        yield llm


@pytest.mark.parametrize(
    "name",
    [
        "resid_pre",
        "resid_mid",
        "attn_out",
        "mlp_out",
        "attn_head_out_all_pos",
        "attn_head_q_all_pos",
        "attn_head_v_all_pos",
        pytest.param("attn_head_out_by_pos", marks=pytest.mark.long),
    ],
)
def test_the_values_are_theirs(name, theirs, llm):
    wanted = theirs(name).double()
    found = getattr(patching, f"get_act_patch_{name}")(llm, ASKED, OTHER, METRIC, progress=False)
    assert found.shape == wanted.shape
    assert wanted.max() - wanted.min() > 0.05  # logits; the values differ by place
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)
