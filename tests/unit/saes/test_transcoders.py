"""Transcoders of SAELens's form: what they read, what they write, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.saes.published import D_IN, D_SAE, V6, jump, random_weights, relu, write_saelens
from vllm_scope import Features, SetFeature, SpecError
from vllm_scope.request.sites import Place
from vllm_scope.saes.load import load_sae

D_OUT = 9
HOOKS = {"hook_name": "blocks.3.hook_mlp_in", "hook_name_out": "blocks.3.hook_mlp_out"}
KINDS = [
    "transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder",
]  # fmt: skip


def write(path, kind, old=False, **changed):
    """The folder and its weights."""
    w = random_weights("b_enc", *(["threshold"] if "jumprelu" in kind else []))
    rng = np.random.default_rng(8)
    shapes = {"W_dec": (D_SAE, D_OUT), "b_dec": (D_OUT,)}
    shapes |= {"W_skip": (D_OUT, D_IN)} if "skip" in kind else {}
    w |= {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    body = V6 | {"architecture": kind, "d_out": D_OUT, "apply_b_dec_to_input": True}
    body["metadata"] = {} if old else V6["metadata"] | HOOKS | changed
    body |= HOOKS | changed if old else {}
    return write_saelens(path, body, w), {k: v.astype(np.float64) for k, v in w.items()}


@pytest.mark.parametrize("old", [False, True], ids=["metadata", "old"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_transcoder_computes_what_saelens_says(kind, old, tmp_path):
    path, w = write(tmp_path / "t", kind, old)
    found = load_sae(path)
    assert (found.place, found.output) == (Place("resid_mid", 3), Place("mlp_out", 3))
    assert (found.d_model, found.d_sae, found.decoder.shape[1]) == (D_IN, D_SAE, D_OUT)
    x = np.random.default_rng(1).normal(size=(20, D_IN)) * 2
    pre = x @ w["W_enc"] + w["b_enc"]
    features = jump(pre, w["threshold"]) if "threshold" in w else relu(pre)
    assert 0.1 < (features > 0).mean() < 0.9
    rows = features @ w["W_dec"] + w["b_dec"]
    rows += x @ w["W_skip"].T if "W_skip" in w else 0
    given = torch.tensor(x)
    np.testing.assert_allclose(found.encode(given).numpy(), features, rtol=1e-5, atol=2e-5)
    skipped = (given,) if "W_skip" in w else ()
    decoded = found.decode(torch.tensor(features), *skipped)
    np.testing.assert_allclose(decoded.numpy(), rows, rtol=1e-5, atol=5e-5)
    wrong = () if skipped else (given,)
    with pytest.raises(SpecError, match="decode needs x, the rows that were encoded, if"):
        found.decode(torch.tensor(features), *wrong)
    parts = [one for part in found.folded() for one in [part.encoder, part.bias]]
    np.testing.assert_allclose(parts[0].numpy(), w["W_enc"].T)
    np.testing.assert_allclose(parts[1].numpy(), w["b_enc"])


def test_its_features_can_be_asked_for_and_not_be_edited(tmp_path):
    found = load_sae(write(tmp_path / "t", "skip_transcoder")[0], name="t")
    assert Features(found, indices=[1, 2]).site == "resid_mid"
    with pytest.raises(SpecError, match=r"it is a transcoder from \('resid_mid', 3\) to"):
        SetFeature(found, 1, 2.0)


@pytest.mark.parametrize(
    "hook",
    [
        "blocks.3.mlp.hook_in", "model.layers.3.mlp.input",
        "model.layers.3.pre_feedforward_layernorm.output",
    ],
)  # fmt: skip
def test_its_input_may_be_what_the_mlp_gets(hook, tmp_path):
    path, _ = write(tmp_path / "t", "transcoder", hook_name=hook)
    assert load_sae(path).place == Place("mlp_in", 3)
    assert Features(load_sae(path, name="t"), indices=[1, 2]).site == "mlp_in"


def test_an_input_that_no_tap_reads_is_said(tmp_path):
    path, _ = write(tmp_path / "t", "transcoder", hook_name="blocks.3.ln2.hook_normalized")
    with pytest.raises(SpecError, match=r"hook_name is 'blocks.*, the row inside a norm, before"):
        load_sae(path)
    assert load_sae(path, place=("resid_mid", 3)).place == Place("resid_mid", 3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"apply_b_dec_to_input": True}, "b_dec is added to its output"),
        (
            {"skip": torch.ones(2, 2)},
            rf"the skip is \[2, 2\]; it must be \[d_out, d_model\], \[{D_OUT}",
        ),
        (
            {"decoder": torch.ones(3, D_OUT)},
            f"encoder has {D_SAE} features, and the decoder has 3; both",
        ),
        ({"output": None, "skip": torch.ones(D_OUT, D_IN)}, "only a transcoder has a skip matrix"),
        ({"output": None}, "the encoder is .* and the decoder"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, sentence, tmp_path):
    found = load_sae(write(tmp_path / "t", "transcoder")[0])
    with pytest.raises(SpecError, match=sentence):
        replace(found, **change)


def test_a_file_without_its_output_is_refused(tmp_path):
    path, _ = write(tmp_path / "t", "transcoder", hook_name_out=None)
    with pytest.raises(SpecError, match="has no hook_name_out, which a transcoder has"):
        load_sae(path)
    path, _ = write(tmp_path / "u", "transcoder")
    (path / "sae_weights.safetensors").unlink()
    write_saelens(path, {**V6, "architecture": "clt"}, random_weights("b_enc"))
    with pytest.raises(SpecError, match=r"architecture 'clt'; .*, transcoder, skip_transcoder"):
        load_sae(path)
