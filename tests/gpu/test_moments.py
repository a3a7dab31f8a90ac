"""Sums that a GPU makes are those of the rows, and the host never waits for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vllm_scope
from tests.checkpoints import reference
from tests.conftest import local_engine
from tests.engine.test_moments import PROMPTS, asked_of, expected, same
from tests.gpu.test_rows import OPTIONS
from vllm_scope import Moments
from vllm_scope.batch.sums import Sums, bytes_of
from vllm_scope.worker.device_sums import DeviceSums

pytestmark = pytest.mark.gpu
WIDTH = 1536


@pytest.mark.parametrize("at_once", [700, 5000], ids=["several-parts", "one-part"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_equal_float64_and_the_host_does_not_wait(dtype, at_once):
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(5000, WIDTH, generator=generator) + 3).to(device="cuda", dtype=dtype)
    targets = np.random.default_rng(1).standard_normal(len(rows))
    every = torch.arange(5000, device="cuda")
    parts = [(some, some.cpu().numpy()) for some in every.split(at_once)]
    size = bytes_of(WIDTH, dtype.itemsize, True, True)
    sums, warm = (
        DeviceSums(torch.empty(size, dtype=torch.uint8, device="cuda"), WIDTH, dtype, True, True)
        for _ in range(2)
    )
    for one in (warm, sums):  # the first time loads the kernels
        torch.cuda.set_sync_debug_mode("error" if one is sums else "default")
        try:
            for some, at in parts:
                one.add(lambda _, some=some: rows.index_select(0, some), at, targets[at])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found, x = Sums.of_packed(sums.read()), rows.cpu().double().numpy()
    assert found.count == 5000
    np.testing.assert_allclose(found.x, x.sum(0), rtol=1e-9)
    np.testing.assert_allclose(found.xy, targets @ x, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(found.xx, x.T @ x, rtol=1e-5, atol=1e-5 * 5000)


@pytest.mark.parametrize("eager", [True, False])
def test_sums_under_cuda_graphs(llama, eager):
    reference(llama, torch.bfloat16)
    options = OPTIONS | {"additional_config": {"scope": {"moments_mib": 64}}}
    with local_engine(llama, **options | {"enforce_eager": eager}) as llm:
        asked = []
        for _ in range(2):
            some = [[Moments(by=by, target=i)] for i, by in enumerate("abab")]
            asked += asked_of(llm, PROMPTS, some, max_tokens=40)
        same(vllm_scope.moments(llm), expected(asked))
