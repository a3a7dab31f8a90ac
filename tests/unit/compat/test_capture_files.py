"""The Activation Capture System's files, of a request that ends in this process."""

from __future__ import annotations

import json
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_scope.compat.act_capture import WorkerCapture, load_manifest, load_npz, translate
from vllm_scope.errors import FileError, SpecError
from vllm_scope.request.sites import Sites

SITES = Sites(2, 8, "float32", (0, 2, 4))
ROWS = {("resid_post", 0): torch.randn(3, 8), ("resid_post", 1): torch.randn(3, 8)}


class Result(dict):
    status, num_prompt, token_ids = "complete", 2, [5, 6, 7, 8]

    def positions(self, site, layer):
        return torch.arange(3)


def ended(finish_reason="stop"):
    result = Result(ROWS | {("embed", 0): torch.zeros(3, 8)})
    completion = SimpleNamespace(index=0, finish_reason=finish_reason, scope=result)
    metrics = SimpleNamespace()
    return SimpleNamespace(request_id="0", outputs=[completion], metrics=metrics)


@pytest.fixture
def capture(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_ACT_OUTDIR", str(tmp_path))
    monkeypatch.setenv("VLLM_ACT_MODE", "full8")
    return monkeypatch


def written(output):
    translate({}, SITES).decorate(output, output.outputs[0])
    return output.activation_manifest


def test_a_manifest_is_read_as_it_was_given_to_the_caller(capture):
    output = ended()
    body = written(output)
    assert output.metrics.extras == {"activation_manifest": body}
    manifest = load_manifest(body.pop("path"))
    assert manifest.body == body
    assert (manifest.layers, body["mode"], body["return"]) == ([0, 1], "full8", "sharded")
    for layer in manifest.layers:
        torch.testing.assert_close(
            manifest.load(layer), ROWS["resid_post", layer], atol=0.05, rtol=0
        )
    with pytest.raises(KeyError, match="layer 5 was not captured"):
        manifest.load(5)


def test_a_running_request_has_no_manifest(capture, tmp_path):
    assert written(ended(finish_reason=None)) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("body", ["[1]", "{}", '{"layers": 3}', "\xff", ""])
def test_another_file_is_no_manifest(body, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_bytes(body.encode("latin-1"))
    with pytest.raises(FileError, match="is not a manifest of captured layers"):
        load_manifest(path)
    with pytest.raises(FileError, match="is not a capture that can be read"):
        load_npz(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_capture_with_another_compression_is_refused_before_it_is_unpacked(method, tmp_path):
    path = tmp_path / "layer.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("positions.npy", bytes(100))
    with pytest.raises(FileError, match=f"is not a capture .* compressed with method {method}"):
        load_npz(path)


def test_a_capture_whose_bytes_are_damaged_is_refused(capture):
    manifest = load_manifest(written(ended())["path"])
    (path, *_) = sorted(manifest.path.parent.glob("**/*.npz"))
    with np.load(path) as arrays:
        np.savez_compressed(path, **dict(arrays))
    data = bytearray(path.read_bytes())
    data[60:90] = bytes(30)
    path.write_bytes(data)
    with pytest.raises(FileError, match="is not a capture that can be read"):
        load_npz(path)


def test_a_manifest_of_a_wrong_type_is_refused(capture):
    body = written(ended())
    path = body.pop("path")
    with open(path, "w") as file:
        json.dump(body | {"layers": {"0": {"path": 3}}}, file)
    with pytest.raises(FileError, match="is not a manifest"):
        load_manifest(path)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        pytest.param("VLLM_ACT_MODE", "rp9", "one of rp8, full8, topk8", id="mode"),
        pytest.param("VLLM_ACT_RETURN", "all", "one of sharded, gathered", id="return"),
    ],
)
def test_a_wrong_variable_is_refused(name, value, words, capture):
    capture.setenv(name, value)
    with pytest.raises(SpecError, match=words):
        translate({}, SITES)


@pytest.mark.parametrize(("name", "value"), [("VLLM_ACT_TOPK_K", "-3"), ("VLLM_ACT_TOPK_K", "x")])
def test_an_option_of_the_mode_is_a_whole_number(name, value, capture):
    capture.setenv("VLLM_ACT_MODE", "topk8")
    capture.setenv(name, value)
    with pytest.raises(SpecError, match=f"{name} is '{value}'; it must be a whole number"):
        translate({}, SITES)
    capture.setenv("VLLM_ACT_MODE", "full8")
    assert translate({}, SITES).actions


def test_the_worker_class_is_the_platforms_own():
    assert WorkerCapture.__name__ in ("CPUWorker", "Worker")
