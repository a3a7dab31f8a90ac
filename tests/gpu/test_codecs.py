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
    expected = _errors(codec.decode(codec.encode(rows), 64), rows)
    there = codec.decode(parts, 64).cpu()
    here = codec.decode({k: v.cpu() for k, v in parts.items()}, 64)
    for found in (there, here):
        # Not value by value: rounding may fall to the other side, and of equal values
        # top-k may keep others.
        torch.testing.assert_close(_errors(found, rows), expected, rtol=0.02, atol=1e-3)


def _errors(found: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What each row without NaN lost, relative to its length."""
    keep = rows.isfinite().all(1)
    lost = (found[keep].double() - rows[keep].double()).norm(dim=1)
    return lost / rows[keep].double().norm(dim=1).clamp(min=1e-9)
