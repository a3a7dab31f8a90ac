"""The strongest features that a GPU makes are those of float64 on the same rounded weights."""

from __future__ import annotations

import pytest
import torch

from vllm_scope.request.sites import Place
from vllm_scope.saes.sae import Sae
from vllm_scope.worker import held_saes
from vllm_scope.worker.held_saes import DeviceSae

pytestmark = pytest.mark.gpu
WIDTH, COUNT = 512, 32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("architecture", ["standard", "jumprelu", "topk"])
def test_features_equal_float64_and_the_host_does_not_wait(architecture, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    d_sae = 8192
    encoder = torch.randn(d_sae, WIDTH, generator=generator) / WIDTH**0.5
    more = {"jumprelu": {"threshold": torch.full((d_sae,), 0.5)}, "topk": {"k": 20}}
    sae = Sae(
        "s", architecture, Place("resid_post", 0), encoder, encoder,
        torch.randn(d_sae, generator=generator) / 4, torch.randn(WIDTH, generator=generator),
        **more.get(architecture, {}),
    )  # fmt: skip
    monkeypatch.setattr(held_saes, "MOST_BYTES", 4 * d_sae * 100)
    held = DeviceSae(sae, dtype, torch.device("cuda"))
    rows = torch.randn(333, WIDTH, generator=generator).to(device="cuda", dtype=dtype)
    held.pack(rows, COUNT)  # loads the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = held.pack(rows, COUNT)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    words = packed.view(torch.int32).cpu()
    indices, values = words[:, :COUNT].long(), words[:, COUNT : 2 * COUNT].view(torch.float32)
    x = rows.cpu().double() - sae.decoder_bias.double()
    pre = x @ encoder.to(dtype).double().T + sae.encoder_bias.double()
    exact = torch.where(pre > (0.5 if architecture == "jumprelu" else 0), pre, 0)
    count = 20 if architecture == "topk" else COUNT
    best = exact.topk(count).values
    near = TOLERANCE[dtype] * best[:, :1]
    active = values[:, :count] > 0
    found = exact.gather(1, indices[:, :count])
    assert ((values[:, :count] - found).abs() <= near)[active].all()
    assert ((values[:, :count] - best).abs() <= near).all()
    assert not words[:, COUNT + count :].any()


@pytest.mark.parametrize(("num_groups", "count"), [(40, 32), (1024, 32), (70, 64), (5, 3)])
def test_kernels_find_the_features_that_torch_finds(num_groups, count):
    from vllm_scope.worker.maxima import maxima
    from vllm_scope.worker.topk import put_pairs

    generator = torch.Generator("cuda").manual_seed(1)
    width = num_groups * held_saes.GROUP
    products = torch.randn(50, width, generator=generator, device="cuda")
    products[1], products[2, 7], products[3] = products[1].round(), torch.nan, products[3] - 10
    bias = torch.randn(width, generator=generator, device="cuda") / 4
    packed = torch.zeros(50, 2 * count, dtype=torch.int32, device="cuda")
    values = packed[:, count:].view(torch.float32)
    largest = maxima(products, bias, None, held_saes.GROUP)
    put_pairs(largest, products, bias, None, count, packed, count)
    features = products + bias
    expected = features.topk(count).values.relu()
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    found = features.gather(1, packed[:, :count].long()).relu()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
