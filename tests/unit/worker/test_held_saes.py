"""The strongest features that a worker makes equal the publisher's, of every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.saes.published import D_IN, D_SAE, FORMATS, Published
from vllm_scope.errors import ConfigError
from vllm_scope.program.layout import SLOT_BYTES, slots_of_row
from vllm_scope.saes.load import load_sae
from vllm_scope.worker import held_saes
from vllm_scope.worker.held_saes import DeviceSae, hold_saes, num_bytes, strongest

CPU = torch.device("cpu")


@pytest.fixture(params=FORMATS, ids=lambda each: each.__name__)
def case(request: pytest.FixtureRequest, tmp_path) -> Published:
    return request.param(tmp_path / "sae")


@pytest.mark.parametrize("count", [1, 3, 4, D_SAE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_strongest_features_are_the_publishers(case, count, dtype, monkeypatch):
    monkeypatch.setattr(held_saes, "MOST_BYTES", 4 * D_SAE * 3)  # three rows at once
    rows = torch.from_numpy(np.random.default_rng(2).normal(size=(20, D_IN)) * 2).to(dtype)
    sae = load_sae(case.path, **case.options)
    packed = DeviceSae(sae, dtype, CPU).pack(rows, count)
    assert packed.shape == (20, slots_of_row(8 * count) * SLOT_BYTES)
    assert len(DeviceSae(sae, dtype, CPU).pack(rows[:0], count)) == 0
    words = packed.view(torch.int32)[:, : 2 * count]
    indices, values = words[:, :count], words[:, count:].view(torch.float32)
    exact = torch.from_numpy(case.features(rows.double().numpy()))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert (values >= 0).all()
    assert (values.diff() <= 0).all()
    wanted = exact.topk(count)
    if dtype == torch.float32:
        torch.testing.assert_close(values.double(), wanted.values, rtol=1e-5, atol=2e-5)
        sure = (wanted.values > 0) & (values > 0)
        assert torch.equal(indices[sure].long(), wanted.indices[sure])
        return
    found = exact.gather(1, indices.long())
    near = (values.double() - found).abs() <= tolerance * (1 + found)
    # Beside a threshold, or the choice of a TopK SAE, rounding decides.
    assert near.double().mean() > 0.95


@given(
    st.integers(0, 9), st.sampled_from([64, 128, 640, 1000, 4096]), st.integers(1, 40),
    st.integers(0, 99), st.booleans(),
)  # fmt: skip
def test_the_strongest_are_those_of_topk(num_rows, width, count, seed, ties):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_rows, width, generator=generator)
    if ties:
        features = features.round()
    values, indices = strongest(features, count)
    assert torch.equal(values, features.topk(count).values)
    assert torch.equal(features.gather(1, indices), values)
    assert all(len(set(row)) == count for row in indices.tolist())


def test_a_row_that_is_not_finite_stays_so_and_leaves_others(tmp_path):
    sae = load_sae(FORMATS[0](tmp_path / "sae").path)
    rows = torch.ones(3, D_IN)
    rows[1, 2] = torch.nan
    values = DeviceSae(sae, torch.float32, CPU).pack(rows, 2).view(torch.float32)[:, 2:]
    assert values[1].isnan().all()
    assert values[[0, 2]].isfinite().all()


def test_the_bound_names_what_is_needed(tmp_path):
    saes = [load_sae(FORMATS[0](tmp_path / name).path, name=name) for name in "ab"]
    assert num_bytes(saes[0], torch.bfloat16) == D_SAE * (2 * D_IN + 4)
    assert hold_saes(saes, 0, torch.float32, CPU) == {}
    assert set(hold_saes(saes, 1, torch.float32, CPU)) == {"a", "b"}
    with pytest.raises(ConfigError, match=r"saes_mib is 0\.0001; .* 'a', 'b' take 0\.0 MiB"):
        hold_saes(saes, 1e-4, torch.float32, CPU)
