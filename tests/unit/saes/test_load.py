"""Every format: what is loaded computes what its publisher says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.unit.saes import published
from tests.unit.saes.published import D_IN, D_SAE, FORMATS, Published
from vllm_scope.errors import SpecError
from vllm_scope.saes.load import load_sae, load_saes
from vllm_scope.saes.sae import Sae


@pytest.fixture(params=FORMATS, ids=lambda each: each.__name__)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Published:
    return request.param(tmp_path / "sae")


@pytest.fixture
def sae(case: Published) -> Sae:
    return load_sae(case.path, **case.options)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, 5, D_IN)).astype(np.float32) * 2


def close(found: torch.Tensor, wanted: np.ndarray) -> None:
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=2e-5)


def test_what_the_files_say_is_known(case, sae):
    assert (sae.architecture, sae.place) == (case.architecture, case.place)
    assert (sae.d_model, sae.d_sae) == (D_IN, D_SAE)


def test_a_notebook_shows_an_sae_in_one_line(tmp_path):
    sae = load_sae(published.gated(tmp_path / "sae").path, name="mine")
    place = f"{sae.place.site} {sae.place.layer}"
    assert repr(sae) == f"<Sae 'mine': {D_SAE} features of {place}, gated>"
    topk = replace(sae, architecture="topk", gate_bias=None, gain=None, k=3)
    assert repr(topk).endswith(", topk, k 3>")
    into = replace(topk, output=type(sae.place)("mlp_out", 2), apply_b_dec_to_input=False)
    assert f"of {place} to mlp_out 2, topk" in repr(into)


def test_folded_encoders_of_parameters_have_no_gradient(tmp_path):
    found = load_sae(published.gated(tmp_path / "sae").path)
    names = ("encoder", "encoder_bias", "gain")
    found = replace(found, **{name: torch.nn.Parameter(getattr(found, name)) for name in names})
    parts = [*found.folded(), found.fold([0])]
    assert len(parts) > 1
    for part in parts:
        assert not any(each.requires_grad for each in part if each is not None)
    assert torch.is_grad_enabled()


def test_features_of_rows_are_the_publishers(case, sae, x):
    wanted = case.features(x.astype(np.float64))
    # A reference with no active feature, or with no idle one, would show little.
    assert 0.1 < (wanted > 0).mean() < 0.9
    close(sae.encode(torch.tensor(x)), wanted)
    close(sae.encode(torch.tensor(x[0, 0])), wanted[0, 0])


def test_the_wanted_features_are_those_of_all(case, sae, x):
    wanted = case.features(x.astype(np.float64))[..., [7, 0, 7]]
    close(sae.encode(torch.tensor(x), [7, 0, 7]), wanted)
    close(sae.encode(torch.tensor(x), torch.tensor([7, 0, 7])), wanted)


def test_rows_of_features_are_the_publishers(case, sae, x):
    features = case.features(x.astype(np.float64))
    close(sae.decode(torch.tensor(features)), case.rows(features))


def test_a_feature_is_one_column_of_all(case, sae, x):
    wanted = case.features(x.astype(np.float64))
    empty = np.zeros(D_SAE)
    for index in range(D_SAE):
        feature = sae.feature(index)
        s = torch.tensor(x) @ feature.encoder + feature.encoder_bias
        if feature.kind == "topk":
            # Whether it is among the k largest, the other features tell.
            chosen = wanted[..., index] > 0
            np.testing.assert_allclose(s[chosen], wanted[..., index][chosen], rtol=1e-4, atol=2e-5)
        elif feature.kind == "relu":
            close(s.relu(), wanted[..., index])
        else:
            close(s * (s > feature.threshold), wanted[..., index])
        assert (feature.threshold is not None) == (feature.kind == "jumprelu")
        one = np.eye(D_SAE)[index]
        close(feature.decoder, case.rows(one) - case.rows(empty))


def test_large_matrices_are_read_in_parts(case, x, monkeypatch):
    monkeypatch.setattr("vllm_scope.saes.sae._NUMBERS_AT_ONCE", 3 * D_IN)
    sae = load_sae(case.path, **case.options)
    features = case.features(x.astype(np.float64))
    close(sae.encode(torch.tensor(x)), features)
    close(sae.encode(torch.tensor(x), [7, 0, 7, 1, 2]), features[..., [7, 0, 7, 1, 2]])
    close(sae.decode(torch.tensor(features)), case.rows(features))


def test_matrices_stay_in_the_file(sae, case):
    assert str(case.path) in Path("/proc/self/maps").read_text()


def test_only_the_rows_that_are_asked_for_are_looked_at(tmp_path):
    w = published.random_weights("b_enc")
    w["W_enc"][:, 3] = np.nan
    path = published.write_saelens(tmp_path / "sae", published.V6, w)
    sae = load_sae(path)
    x = torch.ones(2, D_IN)
    assert sae.encode(x, [2, 4]).isfinite().all()
    assert sae.feature(4).encoder.isfinite().all()
    for ask in (lambda: sae.encode(x), lambda: sae.encode(x, [3]), lambda: sae.feature(3)):
        with pytest.raises(ValueError, match="encoder has a number that is not finite"):
            ask()


def test_the_caller_may_say_where_an_sae_belongs(tmp_path):
    path = published.gemma_scope_1(tmp_path).path
    bare = tmp_path / "params.npz"
    bare.write_bytes(path.read_bytes())
    assert load_sae(bare, place=("resid_mid", 3)).place == ("resid_mid", 3)
    assert load_sae(bare, place="blocks.4.attn.hook_z").place == ("z", 4)
    assert load_sae(path, place=("resid_mid", 3)).place == ("resid_mid", 3)


def test_k_may_be_given_where_no_folder_says_it(tmp_path):
    path = published.qwen_scope(tmp_path / "sae").path
    bare = tmp_path / "layer7.sae.pt"
    bare.write_bytes(path.read_bytes())
    assert load_sae(bare, k=5).k == 5
    x = torch.randn(20, D_IN)
    assert ((load_sae(bare, k=5).encode(x) > 0).sum(1) <= 5).all()


def test_several_saes_get_their_names(tmp_path):
    paths = {"a": published.topk(tmp_path / "1").path, "b": published.sparsify(tmp_path / "2").path}
    saes = load_saes(paths)
    assert {name: sae.name for name, sae in saes.items()} == {"a": "a", "b": "b"}
    assert [sae.place for sae in saes.values()] == [("resid_post", 12), ("resid_post", 5)]


def test_weights_in_float8_are_read_as_the_numbers_that_they_are(tmp_path):
    config = published.V6 | {"architecture": "standard", "apply_b_dec_to_input": True}
    exact = published.random_weights("b_enc")
    path = published.write_saelens(tmp_path, config, exact)
    some = {name: torch.tensor(one).to(torch.float8_e4m3fn) for name, one in exact.items()}
    save_file(some, path / "sae_weights.safetensors")
    sae, w = load_sae(path), {name: one.float().numpy() for name, one in some.items()}
    assert sae.encoder.dtype == sae.decoder.dtype == torch.float8_e4m3fn
    x = np.random.default_rng(1).normal(size=(4, D_IN)).astype(np.float32) * 2
    features = published.relu((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"])
    close(sae.encode(torch.tensor(x)), features)
    close(sae.encode(torch.tensor(x), [7, 0]), features[:, [7, 0]])
    close(sae.decode(torch.tensor(features)), features @ w["W_dec"] + w["b_dec"])
    close(sae.feature(3).decoder, w["W_dec"][3])
    # A scale beside them would belong to a format that is not known.
    save_file(some | {"W_enc_scale": torch.ones(D_SAE)}, path / "sae_weights.safetensors")
    with pytest.raises(SpecError, match="has 'W_enc_scale', which an SAE of this format does not"):
        load_sae(path)
