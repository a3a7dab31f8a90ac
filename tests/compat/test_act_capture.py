"""Global capture: the files decode to the rows that the native API reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import local_engine
from vllm_scope import ConfigError, FileError, Read, SpecError, scope
from vllm_scope.codecs import make_codec
from vllm_scope.compat.act_capture import Settings, load_manifest, load_npz

WORKER = "vllm_scope.compat.act_capture.WorkerCapture"
PROMPTS = [list(range(30, 50 + i)) for i in range(3)]
READ = scope(Read("resid_post"))
#: mode -> variables, and the codec that they mean.
MODES = {
    "rp8": (
        {"VLLM_ACT_RP_K": "48", "VLLM_ACT_RP_SEED": "7"},
        make_codec("rp8", 128, torch.float32, k=48, seed=7),
    ),
    "full8": ({}, make_codec("full8", 128, torch.float32)),
    "topk8": ({"VLLM_ACT_TOPK_K": "16"}, make_codec("topk8", 128, torch.float32, k=16)),
}


@pytest.fixture(scope="module")
def llm(checkpoints):
    with local_engine(checkpoints("llama"), dtype="float32") as llm:
        yield llm


@pytest.fixture
def capture(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_ACT_CAPTURE", "1")
    monkeypatch.setenv("VLLM_ACT_OUTDIR", str(tmp_path / "acts"))
    return monkeypatch


def run(llm, extra=None, **options):
    from vllm import SamplingParams

    defaults = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(**(defaults | options), extra_args=extra)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("returned", ["sharded", "gathered"])
@pytest.mark.parametrize("mode", MODES)
def test_files_decode_to_what_the_codec_makes_of_the_native_rows(mode, returned, llm, capture):
    variables, codec = MODES[mode]
    native = run(llm, READ)
    for name, value in variables.items():
        capture.setenv(name, value)
    capture.setenv("VLLM_ACT_MODE", mode)
    capture.setenv("VLLM_ACT_RETURN", returned)
    for captured, plain in zip(run(llm), native, strict=True):
        found = captured.activation_manifest
        manifest = load_manifest(found["path"])
        assert manifest.body == {k: v for k, v in found.items() if k != "path"}
        assert manifest.body["status"] == "complete"
        assert manifest.body["return"] == returned
        assert manifest.body["token_ids"] == captured.scope.token_ids
        assert manifest.layers == [0, 1, 2]
        for layer in manifest.layers:
            rows = plain.scope["resid_post", layer]
            assert manifest.body["layers"][str(layer)]["shape"] == list(rows.shape)
            expected = codec.decode(codec.encode(rows), len(rows))
            assert torch.equal(manifest.load(layer), expected)
            error = (manifest.load(layer) - rows).norm() / rows.norm()
            assert float(error) < {"rp8": 1.0, "full8": 0.02, "topk8": 0.9}[mode]


def test_arrays_have_the_names_that_they_had(llm, capture):
    names = {
        "rp8": {"q", "scale", "zero"}, "full8": {"q", "scale", "zero"},
        "topk8": {"indices", "values", "scale", "zero"},
    }  # fmt: skip
    for mode, expected in names.items():
        capture.setenv("VLLM_ACT_MODE", mode)
        manifest = run(llm)[0].activation_manifest
        folder = Path(manifest["path"]).parent
        with np.load(folder / "sequence_0_layer_002.npz", allow_pickle=False) as arrays:
            assert set(arrays) == expected | {"positions", "codec"}
            assert arrays["positions"].tolist() == list(range(23))


def test_each_completion_and_each_run_has_its_own_folder(llm, capture):
    outputs = [*run(llm, n=2, temperature=1.0), *run(llm, n=2, temperature=1.0)]
    manifests = [c.activation_manifest for o in outputs for c in o.outputs]
    assert len({m["path"] for m in manifests}) == len(manifests) == 12
    for output in outputs:
        for completion in output.outputs:
            manifest = load_manifest(completion.activation_manifest["path"])
            assert manifest.body["sequence"] == completion.index
            assert manifest.body["token_ids"][-4:] == list(completion.token_ids)
            assert manifest.load(1).shape == completion.scope["resid_post", 1].shape


def test_nothing_is_captured_unless_it_is_turned_on(llm, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ACT_OUTDIR", str(tmp_path))
    monkeypatch.setenv("VLLM_ACT_CAPTURE", "0")
    assert run(llm)[0].scope is None
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_said_and_the_output_is_whole(llm, capture, tmp_path):
    (tmp_path / "file").write_text("in the way")
    capture.setenv("VLLM_ACT_OUTDIR", str(tmp_path / "file"))
    output = run(llm)[0]
    assert output.activation_manifest["status"] == "error"
    assert "cannot be written to" in output.activation_manifest["error"]
    assert output.scope.status == "complete"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        pytest.param("VLLM_ACT_MODE", "rp9", "one of rp8, full8, topk8", id="mode"),
        pytest.param("VLLM_ACT_RETURN", "all", "one of sharded, gathered", id="return"),
        pytest.param("VLLM_ACT_RP_K", "-3", "a whole number", id="k"),
    ],
)
def test_wrong_variables_are_refused(name, value, words, llm, capture):
    with pytest.raises(ConfigError, match=words):
        Settings.read({name: value})
    capture.setenv(name, value)
    with pytest.raises(SpecError, match=words):
        run(llm)


def test_damaged_files_are_refused(llm, capture, tmp_path):
    path = Path(run(llm)[0].activation_manifest["path"])
    npz = path.parent / "sequence_0_layer_000.npz"
    npz.write_bytes(npz.read_bytes()[:200])
    with pytest.raises(FileError, match="not a capture that can be read"):
        load_npz(npz)
    path.write_text(json.dumps([1]))
    with pytest.raises(FileError, match="not a manifest"):
        load_manifest(path)


def test_the_workers_class_turns_it_on(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ACT_OUTDIR", str(tmp_path))
    monkeypatch.setenv("VLLM_ACT_MODE", "full8")
    engine = {"dtype": "bfloat16", "worker_cls": WORKER, "disable_log_stats": False}
    with local_engine(checkpoints("llama"), **engine) as llm:
        output = run(llm)[0]
    manifest = output.activation_manifest
    assert output.metrics.extras["activation_manifest"] == manifest
    rows = load_manifest(manifest["path"]).load(2)
    assert rows.dtype == torch.bfloat16
    expected = output.scope["resid_post", 2].float()
    assert float((rows.float() - expected).norm() / expected.norm()) < 0.02
