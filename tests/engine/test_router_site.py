"""router_logits is what the gate of Hugging Face's experts gives."""

from __future__ import annotations

import pytest
import torch

from tests.asking import run
from tests.checkpoints import NUM_LAYERS, check_inside, reference, row_error
from tests.conftest import local_engine
from tests.engine.test_attention_sites import PROMPTS, params
from vllm_scope import Add, ConfigError, Probe, Read

SITE = "router_logits"
CONFIG = {"sites": ["embed", "resid_post", SITE]}
NUM_EXPERTS = 4


@pytest.fixture(scope="module")
def path(checkpoints):
    return checkpoints("qwen3_moe")


@pytest.fixture(scope="module")
def llm(path):
    """Compiled, in chunks of 32 tokens. vLLM runs the router inside of an op of its own."""
    with local_engine(
        path, dtype="float32", additional_config={"scope": CONFIG}, max_num_batched_tokens=32,
        enforce_eager=False,
    ) as llm:  # fmt: skip
        yield llm


def test_rows_edits_and_probes_equal_hugging_face(llm, path):
    ref = reference(path, torch.float32)
    bias = torch.tensor([0.0, 0.0, 5.0, -5.0])
    weight = torch.tensor([1.0, -1.0, 0.5, 0.25])
    reads = Read(SITE), Read("resid_post")
    asked = [
        *(params(*reads) for _ in PROMPTS),
        params(*reads, Add(bias, site=SITE, layer=1), Probe(weight, site=SITE, layer=1, name="p")),
    ]
    outputs = run(llm, [*PROMPTS, PROMPTS[0]], asked)
    for i, output in enumerate(outputs):
        prompt, edits = (*PROMPTS, PROMPTS[0])[i], []
        if i == len(PROMPTS):
            edits = [(SITE, 1, lambda rows: rows + bias)]
        token_ids = [*prompt, *output.outputs[0].token_ids][:-1]
        streams, _ = ref.edited(token_ids, edits)
        expected = [{s: streams[s, k] for s in (SITE, "resid_post")} for k in range(NUM_LAYERS)]
        assert expected[0][SITE].shape == (len(token_ids), NUM_EXPERTS)
        check_inside(output.scope, token_ids, expected, [SITE, "resid_post"], range(NUM_LAYERS),
                     torch.float32)  # fmt: skip
    plain, edited = outputs[0].scope, outputs[-1].scope
    scores = edited[SITE, 1].double() @ weight.double()
    torch.testing.assert_close(edited.scores["p"].double(), scores, rtol=1e-4, atol=1e-4)
    # The router's layers differ, and another choice of experts is another stream.
    assert row_error(plain[SITE, 0], plain[SITE, 1]) > 0.01
    count = len(PROMPTS[0])
    moved = row_error(edited["resid_post", 1][:count], plain["resid_post", 1][:count])
    assert moved > 0.01


def test_a_model_without_experts_has_no_router(llama):
    words = "sites has 'router_logits', and vLLM's configuration of this model has no experts"
    with (
        pytest.raises(ConfigError, match=words),
        local_engine(llama, dtype="float32", additional_config={"scope": CONFIG}),
    ):
        pass
