"""The likeliest tokens that a GPU makes are those of log-softmax of the same logits in float64."""

from __future__ import annotations

import pytest
import torch

from vllm_scope.worker import lens
from vllm_scope.worker.lens import DeviceLens

pytestmark = pytest.mark.gpu
WIDTH, COUNT = 512, 10


@pytest.mark.parametrize("vocab_size", [8192, 8001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_equal_float64_and_the_host_does_not_wait(vocab_size, dtype, monkeypatch):
    monkeypatch.setattr(lens, "MOST_BYTES", 4 * vocab_size * 100)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(vocab_size, WIDTH, generator=generator) / WIDTH**0.5
    weight = weight.to(device="cuda", dtype=dtype)
    rows = torch.randn(333, WIDTH, generator=generator).to(device="cuda", dtype=dtype)
    held = DeviceLens(lambda some: some @ weight.T, vocab_size)
    held.pack(rows, COUNT)  # loads the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = held.pack(rows, COUNT)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    words = packed.view(torch.int32).cpu()
    ids, values = words[:, :COUNT].long(), words[:, COUNT : 2 * COUNT].view(torch.float32).double()
    # In parts of as many rows, as a product may round differently in others.
    logits = torch.cat([some @ weight.T for some in rows.split(100)])
    exact = logits.cpu().double().log_softmax(1)
    torch.testing.assert_close(values, exact.topk(COUNT).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(exact.gather(1, ids), values, rtol=0, atol=1e-5)
