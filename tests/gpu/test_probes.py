"""Scores of probes on rows that several steps have together equal a dot product with the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.asking import run
from tests.engine.test_edits import params
from tests.gpu.test_edits import llm  # noqa: F401
from vllm_scope import Probe, Read

pytestmark = pytest.mark.gpu
#: More than taps compute themselves.
NUM_PROBES = 24


@pytest.mark.parametrize("kinds", [1, 2], ids=["one-layout", "two-layouts"])
@pytest.mark.parametrize("layers", [[1], [0, 2]], ids=["one-layer", "two-layers"])
@pytest.mark.parametrize("seed", range(3))  # on which the order of two banks depends
def test_scores_of_many_steps_are_those_of_the_rows(seed, layers, kinds, llm):  # noqa: F811
    size = llm.llm_engine.vllm_config.model_config.get_hidden_size()
    shape = 3, NUM_PROBES, size
    weights = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    probes = [
        Probe(weight, layer=layer, name=f"{layer}-{i}")
        for layer in layers for i, weight in enumerate(weights[layer])
    ]  # fmt: skip
    asked = [[*probes, Read("resid_post", layers=layers)], [*probes, Read("resid_post")]][:kinds]
    prompts = [[(7 * i + j) % 500 for j in range(3 + 5 * i)] for i in range(12)]
    specs = [
        params(*asked[i % kinds], logprobs=None, max_tokens=40 + 3 * i) for i in range(12)
    ]  # fmt: skip
    for output in run(llm, prompts, specs):
        result = output.scope
        assert result.status == "complete"
        for layer in layers:
            rows = result["resid_post", layer].double()
            wanted = rows @ torch.from_numpy(weights[layer]).double().T
            found = torch.stack([result.scores[f"{layer}-{i}"] for i in range(NUM_PROBES)], 1)
            # Float32 sums of exact products, and where the device takes TF32, rounded weights.
            torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3)
