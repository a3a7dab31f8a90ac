"""What cannot be read is refused with a sentence that names the file and what is wrong."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.saes import published
from tests.unit.saes.published import D_IN, D_SAE, LLAMA, V5, V6, random_weights, save
from vllm_scope.errors import SpecError
from vllm_scope.saes.load import load_sae


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(SpecError) as caught:
        load_sae(path, **options)
    sentence = str(caught.value)
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence
    return sentence


# --- SAELens -----------------------------------------------------------------

Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def config(**fields: Any) -> Change:
    return lambda config, _: config.update(fields)


def without(name: str) -> Change:
    return lambda _, weights: weights.__delitem__(name)


def tensor(name: str, value: np.ndarray) -> Change:
    return lambda _, weights: weights.update({name: value})


def floats(*shape: int, value: float = 1.0) -> np.ndarray:
    return np.full(shape, value, np.float32)


NAN = floats(D_SAE)
NAN[2] = np.nan


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(config(architecture="temporal"), "architecture 'temporal'", id="unknown"),
        pytest.param(config(architecture="transcoder"), "has no hook_name_out", id="transcoder"),
        pytest.param(config(architecture=7), "Expected `str`, got `int`", id="no-name"),
        pytest.param(config(architecture="topk"), "k None", id="topk-without-k"),
        pytest.param(config(architecture="topk", k=2.5), "k 2.5", id="half-a-feature"),
        pytest.param(config(architecture="topk", k=D_SAE + 1), "k is 12", id="k-over-d_sae"),
        pytest.param(config(architecture="topk", k=0), "k is 0", id="k-of-zero"),
        pytest.param(config(architecture="jumprelu"), "no 'threshold'", id="no-threshold"),
        pytest.param(config(architecture="batchtopk"), "no 'threshold'", id="batch-needed"),
        pytest.param(config(architecture="gated"), "no 'b_mag'", id="gated-without-its-gate"),
        pytest.param(config(d_in=7), "has d_in 7", id="another-width"),
        pytest.param(config(d_sae=7), "has d_sae 7", id="another-number-of-features"),
        pytest.param(config(metadata={}), "hook_name is None", id="no-hook"),
        pytest.param(
            config(metadata={"hook_name": "blocks.3.mlp.hook_pre"}),
            "names no site; give place=",
            id="no-site-of-ours",
        ),
        pytest.param(
            config(metadata={"hook_name": "blocks.3.attn.hook_z", "hook_head_index": 2}),
            "a single head",
            id="one-head",
        ),
        pytest.param(config(normalize_activations="layer_norm"), "not a constant", id="layer-norm"),
        pytest.param(
            config(normalize_activations="constant_norm_rescale"), "not a constant", id="row-norm"
        ),
        pytest.param(
            config(normalize_activations="expected_average_only_in"),
            "give norm_scaling_factor=",
            id="factor-not-in-the-file",
        ),
        pytest.param(without("W_enc"), "has no 'W_enc'", id="no-W_enc"),
        pytest.param(without("b_dec"), "has no 'b_dec'", id="no-b_dec"),
        pytest.param(tensor("threshold", floats(D_SAE)), "has 'threshold'", id="one-too-many"),
        pytest.param(tensor("W_dec", floats(D_IN, D_SAE)), "decoder [6, 11]", id="transposed"),
        pytest.param(tensor("W_enc", floats(D_IN)), "it must be a matrix", id="no-matrix"),
        pytest.param(tensor("W_enc", floats(D_IN, 0)), "has d_sae 11", id="empty"),
        pytest.param(
            tensor("W_dec", np.ones((D_SAE, D_IN), np.int32)), "matrix of floats", id="integers"
        ),
        pytest.param(tensor("b_enc", floats(D_SAE + 1)), "encoder_bias", id="long-bias"),
        pytest.param(tensor("b_enc", NAN), "encoder_bias has a number that is not", id="nan"),
        pytest.param(
            tensor("b_dec", np.full(D_IN, 1e39)), "decoder_bias has a number", id="over-float32"
        ),
        pytest.param(
            tensor("scaling_factor", floats(D_SAE, value=1.5)), "scaling_factor", id="finetuned"
        ),
    ],
)  # fmt: skip
def test_a_wrong_saelens_folder_is_refused(change, sentence, tmp_path):
    fields, weights = V6 | {"architecture": "standard"}, random_weights("b_enc")
    change(fields, weights)
    published.write_saelens(tmp_path, fields, weights)
    assert sentence in refused(tmp_path)


def test_an_activation_of_before_version_6_is_refused(tmp_path):
    published.write_saelens(tmp_path, V5 | {"activation_fn_str": "tanh-relu"}, random_weights())
    assert "activation 'tanh-relu'" in refused(tmp_path)


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_a_scaling_factor_is_a_finite_number_above_zero(factor, tmp_path):
    fields = V6 | {"normalize_activations": "expected_average_only_in"}
    published.write_saelens(tmp_path, fields, random_weights("b_enc"))
    assert "a finite number above 0" in refused(tmp_path, norm_scaling_factor=factor)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "[" * 100_000, "\xff"])
def test_a_config_that_is_no_json_object_is_refused(text, tmp_path):
    published.standard(tmp_path / "sae")
    (tmp_path / "sae" / "cfg.json").write_bytes(text.encode("latin-1"))
    assert "is not the configuration of an SAE" in refused(tmp_path / "sae")


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_safetensors_file_that_is_cut_short_is_refused(size, tmp_path):
    path = published.standard(tmp_path / "sae").path
    data = (path / "sae_weights.safetensors").read_bytes()
    (path / "sae_weights.safetensors").write_bytes(data[:size])
    assert "is not safetensors that can be read" in refused(path)


def test_options_that_an_sae_does_not_need_are_refused(tmp_path):
    path = published.topk(tmp_path / "1").path
    assert "leave k out" in refused(path, k=7)
    assert "leave norm_scaling_factor out" in refused(path, norm_scaling_factor=2.0)
    path = published.sparsify(tmp_path / "2").path
    assert "leave norm_scaling_factor out" in refused(path, norm_scaling_factor=2.0)


@pytest.mark.parametrize(
    "place", [("resid_post", -1), ("resid_post", "1"), ("nowhere", 1), "blocks.1.nowhere", 3, ()]
)
def test_a_place_is_a_site_and_a_layer(place, tmp_path):
    assert refused(published.topk(tmp_path / "sae").path, place=place).startswith("place")


# --- Others ------------------------------------------------------------------


def test_a_path_without_an_sae_is_refused(tmp_path):
    assert "is not a folder with an SAE" in refused(tmp_path)
    (tmp_path / "x.bin").touch()
    assert "is not a folder with an SAE" in refused(tmp_path / "x.bin")
    with pytest.raises(FileNotFoundError, match="is not there"):
        load_sae(tmp_path / "missing")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"transcode": True}, "transcoder"),
        ({"skip_connection": True}, "transcoder"),
        ({"activation": "groupmax"}, "'groupmax'"),
        ({"signed": True}, "only topk is read"),
        ({"d_in": 7}, "has d_in 7"),
        ({"k": "3"}, "Expected `int`"),
    ],
)
def test_a_wrong_sparsify_folder_is_refused(fields, sentence, tmp_path):
    path = published.sparsify(tmp_path).path
    body = json.loads((path / "cfg.json").read_text()) | fields
    (path / "cfg.json").write_text(json.dumps(body))
    assert sentence in refused(path)


def test_a_sparsify_folder_of_another_module_is_refused(tmp_path):
    path = published.sparsify(tmp_path).path
    path = path.rename(path.with_name("layers.5.mlp"))
    assert "'layers.5.mlp', which names no site" in refused(path)
    assert load_sae(path, place=("mlp_out", 5)).place == ("mlp_out", 5)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"hook_point_out": "blocks.12.hook_mlp_out"}, "transcoder"),
        ({"act_fn": "topk"}, "only jumprelu is read"),
        ({"norm_activation": "token-wise"}, "'token-wise'"),
        ({"dataset_average_activation_norm": None}, "norms None"),
        (
            {"dataset_average_activation_norm": {"in": 1.0, "out": 2.0}},
            "equal norms of input and output",
        ),
        ({"dataset_average_activation_norm": {"in": 0.0, "out": 0.0}}, "above 0"),
    ],
)
def test_a_wrong_llama_scope_folder_is_refused(fields, sentence, tmp_path):
    path = published.llama_scope(tmp_path / "sae").path
    (path / "hyperparams.json").write_text(json.dumps(LLAMA | fields))
    assert sentence in refused(path)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"architecture": "relu"}, "'relu'"),
        ({"hf_hook_point_out": "model.layers.9.mlp.output"}, "transcoder"),
        ({"hf_hook_point_in": "model.layers.9.post_attention_layernorm.output"}, "no site"),
    ],
)
def test_a_wrong_gemma_scope_config_is_refused(fields, sentence, tmp_path):
    path = published.gemma_scope_2(tmp_path / "sae").path
    body = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(body))
    assert sentence in refused(path)


@pytest.mark.parametrize(
    ("folders", "sentence"),
    [
        ("gemma-scope-2b-pt-res/average_l0_71", "do not name one site and layer"),
        ("layer_20/width_16k", "do not name one site and layer"),
        ("gemma-scope-2b-pt-transcoders/layer_20", "transcoder"),
        ("gemma-scope-2-4b-pt/transcoder_all/layer_20_width_16k", "transcoder"),
    ],
)
def test_gemma_scope_folders_that_say_too_little_are_refused(folders, sentence, tmp_path):
    path = tmp_path / folders
    path.mkdir(parents=True)
    np.savez(path / "params.npz", **random_weights("b_enc", "threshold"))
    assert sentence in refused(path)


def test_an_affine_connection_is_refused(tmp_path):
    path = published.gemma_scope_2(tmp_path / "sae").path
    weights = random_weights("b_enc", "threshold", "affine_skip_connection")
    save(path / "params.safetensors", weights)
    assert "'affine_skip_connection', which an SAE of this format does not" in refused(path)


def _npz(path: Path, name: str, header: str, body: bytes) -> None:
    text = header.encode() + b" " * (64 - len(header)) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.npy", data)


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1<<40,)}", "not an .npz"),
        (
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999,)}",
            "another number of bytes",
        ),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (5,)}", "has 16 bytes; its shape [5]"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", "has 16 bytes; its shape [3]"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4)}", "another number of bytes"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}", "not an .npz"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "not have floats"),
        ("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 1)}", "in C order"),
    ],
)
def test_a_hostile_npz_is_refused(header, sentence, tmp_path):
    _npz(tmp_path / "params.npz", "W_enc", header, b"\0" * 16)
    assert sentence in refused(tmp_path, place=("resid_post", 1))


def test_a_compressed_npz_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "params.npz", **random_weights("b_enc", "threshold"))
    assert "is compressed; use numpy.savez" in refused(tmp_path, place=("resid_post", 1))
    (tmp_path / "params.npz").write_bytes(b"PK")
    assert "is not an .npz" in refused(tmp_path, place=("resid_post", 1))


def test_an_npz_with_two_arrays_of_one_name_is_refused(tmp_path):
    path = tmp_path / "params.npz"
    np.savez(path, **random_weights("b_enc", "threshold"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("b_enc", archive.read("b_enc.npy"))
    assert "has two arrays with the name 'b_enc'" in refused(tmp_path, place=("resid_post", 1))


class Ran:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("ran").touch, ())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(lambda: {"W_enc": Ran()}, "of tensors alone", id="code"),
        pytest.param(lambda: [torch.ones(2)], "has a list", id="list"),
        pytest.param(lambda: {1: torch.ones(2)}, "1 is not a plain tensor", id="no-name"),
        pytest.param(lambda: {"W_enc": 1.0}, "not a plain tensor", id="number"),
        pytest.param(lambda: {"W_enc": torch.ones(2).to_sparse()}, "not a plain", id="sparse"),
        pytest.param(lambda: {"W_enc": torch.ones(1).expand(1 << 40)}, "not a plain", id="huge"),
        pytest.param(
            lambda: {"W_enc": torch.nn.Parameter(torch.ones(2))}, "not a plain", id="parameter"
        ),
    ],
)
def test_a_pt_file_of_anything_but_plain_tensors_is_refused(
    content, sentence, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    torch.save(content(), tmp_path / "layer1.sae.pt")
    assert sentence in refused(tmp_path / "layer1.sae.pt", k=1)
    assert not (tmp_path / "ran").exists()


def test_a_bare_pickle_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layer1.sae.pt").write_bytes(pickle.dumps({"W_enc": Ran()}))
    assert "is not a .pt file of tensors alone" in refused(tmp_path / "layer1.sae.pt", k=1)
    old = io.BytesIO()
    torch.save({"W_enc": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    (tmp_path / "layer1.sae.pt").write_bytes(old.getvalue())
    assert "is not a .pt file of tensors alone" in refused(tmp_path / "layer1.sae.pt", k=1)
    assert not (tmp_path / "ran").exists()


def test_a_qwen_scope_file_says_its_layer_and_k(tmp_path):
    path = published.qwen_scope(tmp_path / "sae").path
    other = tmp_path / "x.sae.pt"
    other.write_bytes(path.read_bytes())
    assert "give place=" in refused(other, k=3)
    other = other.rename(tmp_path / "layer3.sae.pt")
    assert "give k=" in refused(other)


# --- Calls -------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, D_SAE, 1.0, True, "0", None])
def test_an_index_out_of_range_is_refused(index, tmp_path):
    sae = load_sae(published.topk(tmp_path / "sae").path)
    for ask in (lambda: sae.feature(index), lambda: sae.encode(torch.ones(D_IN), [index])):
        with pytest.raises(SpecError, match="this SAE has features 0 to 10"):
            ask()


@pytest.mark.parametrize(
    "rows", [torch.ones(D_IN + 1), torch.ones(()), torch.ones(D_IN, dtype=torch.int64)]
)
def test_rows_of_another_shape_are_refused(rows, tmp_path):
    sae = load_sae(published.topk(tmp_path / "sae").path)
    with pytest.raises(SpecError, match=r"x is .*; it must be floats, \[..., 6\]"):
        sae.encode(rows)
    with pytest.raises(SpecError, match=r"features is .*; it must be floats, \[..., 11\]"):
        sae.decode(rows)
