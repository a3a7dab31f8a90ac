"""Codecs on a GPU: the same parts as on a CPU, and the host waits for nothing."""

from __future__ import annotations

import pytest
import torch

from vllm_scope.codecs import CODECS, make_codec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [name for name in CODECS if CODECS[name].rowwise])
def test_encoding_on_a_gpu_waits_for_nothing_and_decodes_anywhere(name):
    rows = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[3], rows[4], rows[5, 7] = 0.0, 2.5, torch.nan
    codec = make_codec(name, 1024, torch.bfloat16)
    on_gpu = rows.cuda()
    codec.encode(on_gpu)  # the first makes rp8's projection
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = codec.encode(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(part.is_cuda for part in parts.values())
    expected = codec.decode(codec.encode(rows), 64)
    there = codec.decode(parts, 64).cpu()
    here = codec.decode({k: v.cpu() for k, v in parts.items()}, 64)
    for found in (there, here):
        # One step of 8 bits where rounding falls to the other side.
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05, equal_nan=True)
