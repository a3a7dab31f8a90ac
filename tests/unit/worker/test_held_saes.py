"""The strongest features that a worker makes equal the publisher's, of every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import TOYWORLD
from tests.unit.saes.published import D_IN, D_SAE, FORMATS, Published
from vllm_scope.config import ScopeConfig
from vllm_scope.engine.worker.holding import held_saes as held_by_worker
from vllm_scope.errors import ConfigError
from vllm_scope.program.layout import SLOT_BYTES, slots_of_row
from vllm_scope.request.sites import Place
from vllm_scope.saes.load import load_sae
from vllm_scope.saes.sae import Sae
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


def features_of(packed: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 indices and float32 values, [n, count]."""
    words = packed.view(torch.int32)[:, : 2 * count]
    return words[:, :count].long(), words[:, count:].view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["standard", "jumprelu", "topk", "gated"])
def test_weights_that_float8_holds_exactly_make_the_same_features(architecture, dtype, monkeypatch):
    monkeypatch.setattr(held_saes, "MOST_BYTES", 4 * 200 * 3)  # three rows at once
    monkeypatch.setattr(held_saes, "UNPACKED_BYTES", 4 * 32 * 70)  # and 70 or 140 features
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # The largest weight of a feature is 448 times a power of two: that power is its scale.
    encoder = (random(200, 32) * 40).clamp(-448, 448)
    encoder[:, 0] = 448
    encoder = encoder.to(torch.float8_e4m3fn).float() * 2.0 ** -torch.arange(200)[:, None].fmod(9)
    more = {
        "standard": {}, "topk": {"k": 20}, "jumprelu": {"threshold": random(200).abs() * 9},
        "gated": {"gate_bias": random(200), "gain": torch.zeros(200)},
    }  # fmt: skip
    sae = Sae(
        "s", architecture, Place("resid_post", 0), encoder, encoder, random(200), random(32),
        **more[architecture],
    )  # fmt: skip
    rows = random(20, 32).to(dtype)
    held = DeviceSae(sae, dtype, CPU, fp8=True)
    assert held._weight.dtype == torch.float8_e4m3fn
    indices, values = features_of(held.pack(rows, 20), 20)
    exact = sae.encode(rows.float())
    tolerance = 1e-5 * float(exact.max())
    torch.testing.assert_close(values, exact.topk(20).values, rtol=0, atol=tolerance)
    torch.testing.assert_close(exact.gather(1, indices), values, rtol=0, atol=tolerance)
    assert len(held.pack(rows[:0], 20)) == 0


def test_an_engine_holds_float8_if_the_configuration_says_so():
    folder = str(TOYWORLD / "sae")
    sae = load_sae(folder)
    x = sae.decode(20 * torch.eye(sae.d_sae)[:40])  # one feature each
    here, found = (sae.place.boundary,), {}
    for dtype in ("auto", "fp8"):
        config = ScopeConfig.parse({"saes": {"toy": folder}, "saes_dtype": dtype})
        held = held_by_worker(config, here, torch.float32, CPU)["toy"]
        found[dtype] = features_of(held.pack(x, 8), 8)[1]
    exact = sae.encode(x).topk(8).values
    torch.testing.assert_close(found["auto"], exact, rtol=1e-4, atol=1e-4)
    largest = exact[:, 0]
    assert (largest > 5).all()
    error = ((found["fp8"][:, 0] - largest) / largest).abs().max()
    assert 1e-5 < float(error) < 0.05
    with pytest.raises(ConfigError, match="saes_dtype is 'int4'"):
        ScopeConfig.parse({"saes_dtype": "int4"})


def test_float8_takes_a_byte_for_each_weight(tmp_path):
    sae = load_sae(FORMATS[0](tmp_path / "a").path, name="a")
    assert num_bytes(sae, torch.float8_e4m3fn) == D_SAE * (D_IN + 8)
    needed = num_bytes(sae, torch.float8_e4m3fn) / 2**20
    assert set(hold_saes([sae], needed, torch.bfloat16, CPU, fp8=True)) == {"a"}
    with pytest.raises(
        ConfigError, match="Name fewer SAEs, set saes_dtype to fp8, or raise saes_mib"
    ):
        hold_saes([sae], needed, torch.bfloat16, CPU)
