"""A lens's file holds its maps, and tells what they are of; another file is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.lenses import random_lens
from vllm_scope.errors import ConfigError, SpecError
from vllm_scope.lenses.linear import (
    Affine,
    LensFile,
    LinearLens,
    load_lens,
    load_lenses,
    sha256_of,
)
from vllm_scope.request.sites import Place

SIZE = 6
ROWS = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "resid_post"])
def test_a_lens_comes_back_from_its_file(site, residual, tmp_path):
    lens = random_lens("made", [0, 3, 10], SIZE, residual, site)
    digest = lens.save(tmp_path / "lens.safetensors")
    found = load_lens(tmp_path / "lens.safetensors", sha256=digest.upper())
    assert found.sha256 == digest == sha256_of(tmp_path / "lens.safetensors")
    assert (found.d_model, found.residual) == (SIZE, residual)
    assert list(found.maps) == [(site, 0), (site, 3), (site, 10)]
    for place, (weight, bias) in lens.maps.items():
        exact = ROWS.double() @ weight.double().T
        exact = exact if bias is None else exact + bias.double()
        exact = exact + ROWS.double() if residual else exact
        torch.testing.assert_close(found.map(ROWS, tuple(place)), exact, rtol=1e-12, atol=1e-12)


def test_a_map_of_several_layers_is_in_the_file_for_each_of_them(tmp_path):
    same, stack = torch.eye(SIZE), torch.randn(2, SIZE, SIZE)
    maps = {0: (same, None), 1: (same, ROWS[0]), 2: (stack[0], ROWS[0]), 3: (stack[1].T, None)}
    places = {Place("resid_post", layer): Affine(*one) for layer, one in maps.items()}
    LinearLens("made", places, False).save(tmp_path / "lens.safetensors")
    found = load_lens(tmp_path / "lens.safetensors")
    for layer, (weight, bias) in maps.items():
        for given, read in zip((weight, bias), found.maps["resid_post", layer], strict=True):
            assert given is None if read is None else torch.equal(given, read)


def tuned(path, **changed):
    """As tuned-lens saves it, and its layers as torch computes them."""
    layers = torch.nn.ModuleList(torch.nn.Linear(SIZE, SIZE) for _ in range(3))
    path.mkdir()
    save_file(layers.state_dict(), path / "params.safetensors")
    body = {"base_model_name_or_path": "m", "d_model": SIZE, "num_hidden_layers": 3, "bias": True,
            "lens_type": "linear_tuned_lens", "unembed_hash": "0"}  # fmt: skip
    (path / "config.json").write_text(json.dumps(body | changed))
    return layers.double()


def test_a_folder_of_tuned_lens_is_what_enters_each_layer_and_is_residual(tmp_path):
    layers = tuned(tmp_path / "tuned")
    found = load_lens(tmp_path / "tuned")
    for i, layer in enumerate(layers):
        with torch.no_grad():  # TunedLens.transform_hidden
            exact = ROWS.double() + layer(ROWS.double())
        # Saved in float32.
        torch.testing.assert_close(found.map(ROWS, ("resid_pre", i)), exact, rtol=1e-6, atol=1e-6)


def test_a_jacobian_is_applied_from_the_left(tmp_path):
    """As jlens publishes it: {"J": {layer: J}}, with `J @ h` of what leaves the layer."""
    jacobians = {layer: torch.randn(SIZE, SIZE).half() for layer in (0, 1)}
    tensors = {f"{layer}.weight": j for layer, j in jacobians.items()}
    save_file(tensors, tmp_path / "j.safetensors")
    found = load_lens(tmp_path / "j.safetensors")
    for layer, j in jacobians.items():
        exact = torch.stack([j.double() @ row for row in ROWS.double()])
        torch.testing.assert_close(found.map(ROWS, ("resid_post", layer)), exact)


def refused(call) -> str:
    with pytest.raises(SpecError) as caught:
        call()
    return str(caught.value)


def test_another_file_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "lens.safetensors"
    digest = random_lens("a", [1], SIZE).save(path)
    other = "0" * 64
    assert refused(lambda: load_lens(path, sha256=other)).startswith(
        f"{path} is another file: its SHA-256 is {digest}, not {other}."
    )
    (tmp_path / "params.pt").write_bytes(b"\x80\x04")
    assert "has no params.safetensors; save the tensors of its params.pt" in refused(
        lambda: load_lens(tmp_path)
    )
    tuned(tmp_path / "t", lens_type="mystery")
    assert "has the lens_type 'mystery'" in refused(lambda: load_lens(tmp_path / "t"))
    (tmp_path / "t" / "config.json").write_text("[]")
    assert "is not the configuration of a lens" in refused(lambda: load_lens(tmp_path / "t"))
    with pytest.raises(FileNotFoundError, match=r"no\.safetensors is not there"):
        load_lens(tmp_path / "no.safetensors")
    weight = torch.eye(SIZE)
    for tensors, said, words in (
        ({"J": weight}, {}, "has 'J'; a lens has LAYER.weight, and maybe LAYER.bias"),
        ({"1.bias": weight[0]}, {}, "has 1.bias and no 1.weight"),
        ({"1.weight": weight, "01.weight": weight + 1}, {}, "is a second weight of layer 1"),
        ({"1.weight": weight[:2]}, {}, r"has torch.float32 [2, 6]; it must be of floats, [6, 6]"),
        ({"1.weight": weight[0, 0]}, {}, "resid_post 1 has a weight of shape []; it must be a mat"),
        ({"1.weight": weight[:0, :0]}, {}, "has a weight of shape [0, 0]; it must be a matrix"),
        ({"1.weight": weight.int()}, {}, "has torch.int32 [6, 6]; it must be of floats"),
        ({"1.weight": weight, "1.bias": weight + 1}, {}, "it must be of floats, [6]"),
        ({"1.weight": weight, "2.weight": torch.eye(3)}, {}, "it must be of floats, [6, 6]"),
        ({"1.weight": weight}, {"site": "z"}, "a map is of 'z'; sites are resid_pre, resid_mid"),
        (
            {"1.weight": weight},
            {"residual": "yes"},
            "residual is 'yes'; it must be 'true' or 'false'",
        ),
    ):
        save_file(tensors, path, said)
        assert words in refused(lambda: load_lens(path))
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    assert "is not safetensors that can be read" in refused(lambda: load_lens(path))


def test_a_number_that_is_not_finite_is_refused_when_the_map_is_used():
    weight = torch.eye(SIZE)
    weight[2, 3] = torch.inf
    lens = LinearLens("bad", {Place("resid_post", 4): Affine(weight, None)})
    assert "the map of resid_post 4 has a number that is not finite" in refused(
        lambda: lens.checked(Place("resid_post", 4))
    )
    assert "it has no maps" in refused(lambda: LinearLens("none", {}))
    assert "has no map of ('resid_post', 1); it has resid_post 4" in refused(
        lambda: lens.map(ROWS, ("resid_post", 1))
    )
    assert f"it maps rows of {SIZE}, not of shape [2, 3]" in refused(
        lambda: lens.map(torch.ones(2, 3), ("resid_post", 4))
    )
    both = {Place(site, 1): Affine(weight, None) for site in ("resid_pre", "resid_post")}
    assert "it has maps of resid_post, resid_pre; a file has one" in refused(
        lambda: LinearLens("both", both).save("nowhere")
    )


def test_an_operators_entry_is_a_path_or_an_object_with_a_digest(tmp_path):
    path = tmp_path / "lens.safetensors"
    digest = random_lens("a", [1], SIZE).save(path)
    given = {"a": str(path), "b": {"path": str(path), "sha256": digest}}
    assert [one.name for one in load_lenses(given).values()] == ["a", "b"]
    assert LensFile.parse("p", "") == LensFile("p")
    for bad in (3, {}, {"path": 3}, {"path": "p", "sha": "x"}, {"path": "p", "sha256": "abc"}):
        with pytest.raises(
            ConfigError,
            match=r"lenses\.c is .*; it must be a path, or an object with",
        ):
            load_lenses({"c": bad})
