"""Cross-layer transcoders compute what circuit-tracer says; their encoders are SAEs of their
layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.clts import write_clt
from tests.unit.saes.published import save
from vllm_scope import Features, SetFeature, SpecError
from vllm_scope.request.sites import Place
from vllm_scope.saes.cross_layer import load_clt
from vllm_scope.saes.load import load_sae, load_saes
from vllm_scope.worker.held_saes import hold_saes, num_bytes

LAYERS, WIDTH, D_SAE = 3, 6, 11
ROWS = [np.random.default_rng(i).normal(size=(20, WIDTH)) * 2 for i in range(LAYERS)]


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("hooks", [True, False])
def test_features_and_rows_of_every_layer_are_circuit_tracers(hooks, jumps, skips, tmp_path):
    options = {} if hooks else {"config": None}
    written = write_clt(tmp_path / "clt", LAYERS, WIDTH, D_SAE, jumps, skips, **options)
    found = load_clt(written.path, name="clt")
    x = [torch.tensor(rows) for rows in ROWS]
    features = [encoder.encode(rows) for encoder, rows in zip(found.encoders, x, strict=True)]
    for i, encoder in enumerate(found.encoders):
        assert (encoder.name, encoder.place, encoder.output) == (
            f"clt.{i}", Place("resid_mid", i), Place("mlp_out", i),
        )  # fmt: skip
        exact = written.encode(i, ROWS[i])
        assert 0.1 < (exact > 0).mean() < 0.9
        np.testing.assert_allclose(features[i].numpy(), exact, rtol=1e-5, atol=2e-5)
        skipped = (x[i],) if skips else ()
        rows = found.decode(features[: i + 1], i, *skipped)
        np.testing.assert_allclose(rows.numpy(), written.decode(i, ROWS), rtol=1e-4, atol=1e-4)
        added = found.decoder_of(i, 4)
        np.testing.assert_array_equal(added.numpy(), written.weights[i]["W_dec"][4])
        with pytest.raises(SpecError, match="decode needs x, the rows that were encoded, if"):
            found.decode(features[: i + 1], i, *(() if skips else (x[i],)))


def test_an_operators_folder_stands_for_the_encoders_of_all_layers(tmp_path):
    written = write_clt(tmp_path / "clt", LAYERS, WIDTH, D_SAE)
    found = load_saes({"c": written.path, "one": written.path / "W_enc_1.safetensors"})
    assert list(found) == ["c.0", "c.1", "c.2", "one"]
    assert found["one"].place == found["c.1"].place == Place("resid_mid", 1)
    assert Features(found["c.2"], indices=[1]).layer == 2
    with pytest.raises(SpecError, match="it is a transcoder from"):
        SetFeature(found["c.2"], 1, 2.0)
    with pytest.raises(SpecError, match=r"'c.2': it is one layer of a cross-layer transcoder"):
        found["c.2"].decode(torch.ones(D_SAE))
    with pytest.raises(SpecError, match=r"two SAEs are called 'c\.1'"):
        load_saes({"c": written.path, "c.1": written.path / "W_enc_1.safetensors"})
    with pytest.raises(SpecError, match=r"belongs to a cross-layer transcoder; give the file of a"):
        load_sae(written.path)
    place = ("resid_post", 0)
    assert load_sae(written.path / "W_enc_1.safetensors", place=place).place == place


def refused(path) -> str:
    with pytest.raises(SpecError) as caught:
        load_clt(path, name="clt")
    return str(caught.value)


def test_another_folder_is_refused_in_one_sentence(tmp_path):
    written = write_clt(tmp_path / "a", LAYERS, WIDTH, D_SAE)
    (written.path / "W_enc_1.safetensors").rename(tmp_path / "kept")
    assert "has the encoders of layers 0, 2; a cross-layer transcoder has W_enc_0" in refused(
        written.path
    )
    (tmp_path / "kept").rename(written.path / "W_enc_1.safetensors")
    for config, words in (
        (
            "feature_input_hook: ln2.hook_normalized",
            "the row inside a norm, before the norm's weight",
        ),
        ("feature_input_hook: hook_in", "feature_input_hook is 'blocks.0.hook_in', which names no"),
        ("- a", "config.yaml has a list; it must have fields"),
        ("a: [", "is not YAML that can be read"),
        ("a: 2024-13-45", "is not YAML that can be read"),
        ("a: !!timestamp b", "is not YAML that can be read"),
        ("a: !!int ''", "is not YAML that can be read"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML that can be read"),
    ):
        (written.path / "config.yaml").write_text(config)
        assert words in refused(written.path)
    (written.path / "config.yaml").write_text("feature_input_hook: mlp.hook_in")
    assert load_clt(written.path, name="clt").encoders[1].place == ("mlp_in", 1)
    (written.path / "config.yaml").unlink()
    decoder = written.path / "W_dec_1.safetensors"
    for tensors, words in (
        ({"W_dec_1": np.ones((D_SAE, WIDTH))}, "W_dec_1 is [11, 6]; it must be [d_sae, number of"),
        ({"W_dec": np.ones((D_SAE, 2, WIDTH))}, "W_dec_1 is no such tensor"),
        (
            {"W_dec_1": np.ones((D_SAE, 1, WIDTH))},
            "W_dec_1 is torch.float64 [11, 1, 6]; it must have",
        ),
    ):
        save(decoder, tensors)
        assert words in refused(written.path)
    bad = written.weights[1]["W_dec"].astype(np.float32)
    bad[4, 1, 2] = np.inf
    save(decoder, {"W_dec_1": bad})
    found = load_clt(written.path, name="clt")
    with pytest.raises(SpecError, match="'clt': W_dec_1 has a number that is not finite"):
        found.decoder_of(1, 4)
    for call, words in (
        (lambda: found.decoder_of(3, 0), "layer is 3; layers are 0 to 2"),
        (lambda: found.decoder_of(0, 11), "layer 0 has features 0 to 10"),
        (
            lambda: found.decode([torch.ones(D_SAE)], 1),
            "features are of 1 layers; the output of layer 1 needs",
        ),
        (lambda: found.decode([torch.ones(3)], 0), r"features of layer 0 are \[3\]; they must be"),
    ):
        with pytest.raises(SpecError, match=words):
            call()


def test_a_worker_holds_the_encoder_of_each_layer_and_no_decoder(tmp_path):
    written = write_clt(tmp_path / "clt", LAYERS, 64, 256, jumps=True)
    saes = load_saes({"clt": written.path})
    assert {num_bytes(sae, torch.bfloat16) for sae in saes.values()} == {256 * (2 * 64 + 8)}
    held = hold_saes(saes.values(), 1, torch.float32, torch.device("cpu"))
    rows = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    for i in range(LAYERS):
        values = held[f"clt.{i}"].pack(rows, 9).view(torch.float32)[:, 9:18]
        best = torch.from_numpy(written.encode(i, rows.double().numpy())).topk(9).values
        torch.testing.assert_close(values.double(), best, rtol=1e-4, atol=1e-4)


def test_rows_that_a_skip_matrix_cannot_take_are_refused(tmp_path):
    written = write_clt(tmp_path / "clt", LAYERS, WIDTH, D_SAE, skips=True)
    features = [torch.ones(2, D_SAE)]
    with pytest.raises(
        SpecError, match=r"x is torch.float32 \[2, 9\]; it must be floats, \[\.\.\."
    ):
        load_clt(written.path).decode(features, 0, torch.ones(2, 9))
    file = written.path / "W_enc_0.safetensors"
    tensors = load_file(file)
    tensors["W_skip_0"][1, 2] = np.nan
    save(file, tensors)
    with pytest.raises(SpecError, match="the skip has a number that is not finite"):
        load_clt(written.path).decode(features, 0, torch.ones(2, WIDTH))
