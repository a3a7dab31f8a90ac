"""Steering modules in files: ours, other tools', and malicious ones."""

from __future__ import annotations

import base64
import json
import pickle
import struct
import sys
import zipfile
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save as save_numpy
from safetensors.torch import save as save_torch

from vllm_scope.errors import SpecError
from vllm_scope.vectors import (
    Provenance,
    SteeringModule,
    containers,
    from_bytes,
    load_vectors,
    save_vectors,
    to_bytes,
)
from vllm_scope.vectors.hooks import parse_module

VECTOR = np.array([0.5, -2.0, 3.0], np.float32)
PROVENANCE = Provenance(
    model="org/model", revision="abc", method="mean_difference", dataset="sha256:1",
    scale=1 / 3, normalised=True, created_by="vllm-scope 0",
)  # fmt: skip


def header_of(data: bytes) -> dict:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


# --- Ours --------------------------------------------------------------------

streams = st.one_of(
    st.just(("embed", 0)),
    st.tuples(st.sampled_from(["resid_pre", "resid_mid", "resid_post"]), st.integers(0, 9999)),
)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.data(), st.integers(1, 9), st.sets(streams, min_size=1, max_size=4))
def test_a_module_survives_its_bytes_bit_by_bit(data, hidden_size, keys):
    vector = hnp.arrays(np.float32, hidden_size, elements=finite)
    module = SteeringModule({key: data.draw(vector) for key in keys}, PROVENANCE)
    again = from_bytes(to_bytes(module))
    assert again.digest == module.digest
    assert again.provenance == PROVENANCE


def test_a_module_survives_its_file(tmp_path):
    module = SteeringModule({("resid_pre", 3): VECTOR, ("embed", 0): VECTOR})
    save_vectors(tmp_path / "v.safetensors", module)
    again = load_vectors(str(tmp_path / "v.safetensors"))
    assert again == module
    assert again.provenance == Provenance()


@given(st.data(), st.sets(streams, max_size=3), st.sets(streams, max_size=3))
def test_a_module_of_tiers_survives_its_bytes(data, keys, generated):
    assume(keys or generated)
    vector = hnp.arrays(np.float32, 3, elements=finite)
    base = {key: data.draw(vector) for key in keys}
    tiers = {"generated": {key: data.draw(vector) for key in generated}, "prompt": {}}
    module = SteeringModule(base, PROVENANCE, tiers)
    again = from_bytes(to_bytes(module))
    assert (again, again.provenance) == (module, PROVENANCE)
    assert [place for place, _ in again.placed()] == [place for place, _ in module.placed()]
    assert pickle.loads(pickle.dumps(module)) == module
    if base and generated:
        assert module != SteeringModule(base)


JSON = {
    "vectors": {"post_block": {"1": [1, 2, 3], "2": {"vector": [1, 0, 2], "scale": 2.0}}},
    "prefill_vectors": None,
    "decode_vectors": {
        "pre_attn": {
            "dtype": "float16", "shape": [2, 3], "layer_indices": [0, 3], "scales": [1.0, 0.5],
            "data": base64.b64encode(np.array([[1, 1, 0], [2, 4, 6]], "<f2")).decode(),
        },
        "post_block": {"1": [0.0, 0.0, 0.0]},
    },
}  # fmt: skip


def test_the_steering_forks_json_is_read(tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(JSON))
    module = load_vectors(tmp_path / "m.json")
    assert {place: vector.tolist() for place, vector in module.placed()} == {
        ("resid_post", 1): [1, 2, 3],
        ("resid_post", 2): [2, 0, 4],
        ("resid_pre", 0, "generated"): [1, 1, 0],
        ("resid_pre", 3, "generated"): [1, 2, 3],
    }
    (tmp_path / "m.json").write_text(json.dumps(JSON["vectors"]))
    assert load_vectors(tmp_path / "m.json") == SteeringModule(module.vectors)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param("{", "is not JSON", id="not-json"),
        pytest.param("[]", "it must be an object", id="no-object"),
        pytest.param({"mlp_out": {"1": [1]}}, "its fields are vectors", id="unknown-hook"),
        pytest.param({"vectors": {"mlp_in": {}}}, "hooks are pre_attn", id="hook-of-the-mlp"),
        pytest.param({"vectors": {}}, "no vector, or only zeros", id="nothing"),
        pytest.param(
            {"clamps": {"post_block": {}}}, "has clamps;.*into requests", id="clamps",
        ),
        pytest.param(
            {"post_block": {"1": [1e30], "2": {"vector": [1e30], "scale": 1e30}}},
            r"\['2'\]\.scale is 1e\+30; .* not finite", id="infinite",
        ),
        pytest.param(
            {"post_block": {"1": {"vector": [1.0], "scale": 10**400}}}, "finite in float32",
            id="a-huge-scale",
        ),
        pytest.param(
            {"post_block": JSON["decode_vectors"]["pre_attn"] | {"layer_indices": [1]}},
            "layer_indices is .* one item for each row", id="packed-layers",
        ),
        pytest.param(
            {"post_block": JSON["decode_vectors"]["pre_attn"] | {"layer_indices": [1, 1]}},
            "layer 1 twice", id="packed-twice",
        ),
        pytest.param(
            {"post_block": JSON["decode_vectors"]["pre_attn"] | {"bounds": []}},
            "has 'bounds'; its fields are data, dtype", id="packed-field",
        ),
    ],
)  # fmt: skip
def test_json_that_is_no_module_is_refused(body, words, tmp_path):
    path = tmp_path / "m.json"
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    with pytest.raises(SpecError, match=words):
        load_vectors(path)


def test_vectors_of_one_site_are_named_as_others_name_them():
    header = header_of(to_bytes(SteeringModule({("resid_pre", 3): VECTOR}, PROVENANCE)))
    assert set(header) == {"__metadata__", "direction.3"}
    metadata = header["__metadata__"]
    assert (metadata["site"], metadata["index_base"]) == ("resid_pre", "0")
    assert metadata["model"] == "org/model"


def test_vectors_of_several_sites_are_named_by_site():
    module = SteeringModule({("resid_pre", 3): VECTOR, ("resid_mid", 3): VECTOR})
    assert set(header_of(to_bytes(module))) == {"__metadata__", "resid_pre.3", "resid_mid.3"}


def test_modules_are_saved_as_safetensors_or_gguf_only(tmp_path):
    with pytest.raises(SpecError, match=r"ends in '\.npz'; .* as \.safetensors or \.gguf"):
        save_vectors(tmp_path / "v.npz", SteeringModule({("embed", 0): VECTOR}))


# --- Others' -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "metadata", "stream"),
    [
        pytest.param("direction.5", None, ("resid_post", 5), id="repeng"),
        pytest.param("direction.5", {"site": "post_attn"}, ("resid_mid", 5), id="alias"),
        pytest.param("direction.5", {"index_base": "1"}, ("resid_post", 4), id="counted-from-1"),
        pytest.param("resid_pre.5", {"index_base": "1"}, ("resid_pre", 5), id="site-is-from-0"),
        pytest.param("5", {"site": "resid_pre"}, ("resid_pre", 5), id="bare-number"),
        pytest.param("direction.0", {"site": "embed"}, ("embed", 0), id="embed"),
    ],
)
def test_a_name_and_the_metadata_say_where_a_vector_acts(name, metadata, stream):
    assert list(from_bytes(save_numpy({name: VECTOR}, metadata))) == [stream]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_dtype_is_read(dtype):
    data = save_torch({"direction.5": torch.tensor(VECTOR).to(dtype)})
    assert from_bytes(data)["resid_post", 5].tolist() == VECTOR.tolist()


@pytest.mark.parametrize("name", ["5", "resid_post.5", "direction.5"])
def test_an_npz_is_read_packed_or_not(tmp_path, name):
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "v.npz", **{name: VECTOR.astype(np.float64)})
        module = load_vectors(tmp_path / "v.npz")
        assert module == SteeringModule({("resid_post", 5): VECTOR})


# --- What is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        pytest.param({"foo": VECTOR}, None, "'foo' is no name", id="another-name"),
        pytest.param({"direction.-1": VECTOR}, None, "is no name", id="negative"),
        pytest.param({"direction.99999": VECTOR}, None, "has layer 99999", id="too-high"),
        pytest.param({"direction.1234567": VECTOR}, None, "is no name", id="absurd"),
        pytest.param({"mlp_out.5": VECTOR}, None, "has site 'mlp_out'", id="no-stream-site"),
        pytest.param({"direction.0": VECTOR}, {"index_base": "1"}, "has layer -1", id="below-base"),
        pytest.param({"direction.0": VECTOR}, {"index_base": "2"}, "index_base is '2'", id="base"),
        pytest.param({"direction.0": VECTOR}, {"site": "x"}, "has site 'x'", id="metadata-site"),
        pytest.param({"direction.0": VECTOR}, {"scale": "much"}, "scale is 'much'", id="scale"),
        pytest.param({"direction.0": VECTOR}, {"scale": "inf"}, "scale is 'inf'", id="scale-inf"),
        pytest.param(
            {"direction.0": VECTOR}, {"normalised": "yes"}, "normalised is 'yes'", id="flag"
        ),
        pytest.param({"direction.0": VECTOR[None]}, None, r"'direction\.0' has shape", id="matrix"),
        pytest.param({"direction.0": np.int32([1])}, None, "has dtype I32", id="integers"),
        pytest.param(
            {"direction.1": VECTOR, "resid_post.1": VECTOR}, None, "second vector", id="twice"
        ),
        pytest.param(
            {"direction.1": VECTOR, "direction.2": VECTOR[:2]}, None, "one hidden size", id="sizes"
        ),
        pytest.param(
            {"direction.7": np.float32([1, np.nan])}, None, r"resid_post\.7 has nan", id="nan"
        ),
        pytest.param({}, None, "no vectors", id="nothing"),
    ],
)
def test_a_file_that_cannot_steer_is_refused_by_name(tmp_path, tensors, metadata, message):
    path = tmp_path / "v.safetensors"
    path.write_bytes(save_numpy(tensors, metadata))
    with pytest.raises(SpecError, match=message) as caught:
        load_vectors(path)
    assert str(path) in str(caught.value)


def raw_safetensors(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not a file of tensors", id="text"),
        pytest.param(struct.pack("<Q", 1 << 60) + b"{}", id="header-past-the-end"),
        pytest.param(
            raw_safetensors({"1": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}),
            id="shape-past-the-end",
        ),
        pytest.param(
            raw_safetensors({"1": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12"),
            id="data-cut-short",
        ),
        pytest.param(raw_safetensors([]), id="header-a-list"),
        pytest.param(to_bytes(SteeringModule({("embed", 0): VECTOR}))[:-1], id="last-byte-lost"),
    ],
)
def test_malformed_bytes_are_refused(data):
    with pytest.raises(SpecError, match="is not safetensors"):
        from_bytes(data)


@given(st.binary(max_size=200), st.integers(0, 60))
def test_damaged_bytes_are_refused_or_a_module(noise, at):
    data = bytearray(to_bytes(SteeringModule({("resid_post", 1): VECTOR}, PROVENANCE)))
    data[at : at + len(noise)] = noise
    try:
        from_bytes(bytes(data))
    except SpecError:
        return


def test_too_many_bytes_are_refused_before_they_are_read(monkeypatch, tmp_path):
    monkeypatch.setattr(containers, "MAX_BYTES", 100)
    data = to_bytes(SteeringModule({("embed", 0): np.zeros(100)}))
    with pytest.raises(SpecError, match="at most 100"):
        from_bytes(data)
    for suffix in (".safetensors", ".npz"):
        (tmp_path / f"v{suffix}").write_bytes(data)
        with pytest.raises(SpecError, match=r"has [0-9]+ bytes; at most 100"):
            load_vectors(tmp_path / f"v{suffix}")


def test_an_npz_that_unpacks_to_too_much_is_refused_before_it_does(tmp_path):
    path = tmp_path / "bomb.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("5.npy", "w", force_zip64=True) as member,
    ):
        for _ in range(65):
            member.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(SpecError, match=r"the unpacked \.npz has"):
        load_vectors(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("damaged", [False, True])
def test_an_npz_is_unpacked_only_if_its_members_are_stored_or_deflated(method, damaged):
    # Read by zipfile, this member would be unpacked whole, although the archive claims 140 bytes.
    data = npz_of(npy_of(VECTOR), method=method)
    if damaged:
        data = data[:45] + bytes(20) + data[65:]
    with pytest.raises(SpecError, match=f"'5.npy' is compressed with method {method} of zip; save"):
        containers.read_npz(data)


def test_an_npz_with_two_arrays_of_one_name_is_refused():
    file = BytesIO(npz_of(npy_of(VECTOR), "5.npy"))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("5", npy_of(VECTOR + 1))
    with pytest.raises(SpecError, match=r"the \.npz has two arrays with the name '5'; keep one"):
        containers.read_npz(file.getvalue())


def npz_of(member: bytes, name: str = "5.npy", method: int = zipfile.ZIP_STORED) -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(name, member)
    return file.getvalue()


def npy_of(array: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"not a zip", "is not an .npz", id="text"),
        pytest.param(npz_of(b"not an array"), "'5' is not an .npy", id="text-inside"),
        pytest.param(npz_of(npy_of(np.array([{}], object))), "'5' has dtype object", id="a-pickle"),
        pytest.param(npz_of(npy_of(np.arange(3))), "'5' has dtype int64", id="integers"),
        pytest.param(npz_of(npy_of(VECTOR[None])), r"'5' has shape \[1, 3\]", id="matrix"),
        pytest.param(
            npz_of(npy_of(VECTOR).replace(b"(3,)", b"9**9")), "not an .npy", id="an-expression"
        ),
        pytest.param(
            npz_of(npy_of(VECTOR).replace(b"(3,)", b"(3((")), "not an .npy", id="open-brackets"
        ),
        pytest.param(
            npz_of(npy_of(VECTOR).replace(b"(3,), }     ", b"(3000000,), }")[:140]),
            "claims 3,000,000 values",
            id="a-claim",
        ),
        pytest.param(npz_of(npy_of(VECTOR), "x/y.npy"), "is no name", id="another-name"),
    ],
)
def test_a_malformed_npz_is_refused(tmp_path, data, message):
    (tmp_path / "v.npz").write_bytes(data)
    with pytest.raises(SpecError, match=message):
        load_vectors(tmp_path / "v.npz")


def test_an_unknown_ending_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"ends in '\.pt'; only \.safetensors, .*\.json are read"):
        load_vectors(tmp_path / "v.pt")


# --- GGUF --------------------------------------------------------------------


def write_gguf(path, tensors, architecture="controlvector", **texts):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in texts.items():
        writer.add_string(f"{architecture}.{key}", value)
    writer.add_uint32(f"{architecture}.layer_count", len(tensors))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_control_vector_of_repeng_acts_at_the_exit_of_its_layers(tmp_path):
    path = write_gguf(
        tmp_path / "v.gguf",
        {"direction.5": VECTOR, "direction.1": VECTOR.astype(np.float16)},
        model_hint="llama",
        method="pca_center",
    )
    module = load_vectors(path)
    assert module == SteeringModule({("resid_post", 1): VECTOR, ("resid_post", 5): VECTOR})
    assert (module.provenance.model, module.provenance.method) == ("llama", "pca_center")


@pytest.mark.parametrize("provenance", [PROVENANCE, Provenance()], ids=["known", "unknown"])
def test_a_module_survives_a_gguf_file_that_is_as_repeng_writes_it(provenance, tmp_path):
    gguf = pytest.importorskip("gguf")
    module = SteeringModule(
        {("resid_post", 3): VECTOR, ("resid_post", 11): -2 * VECTOR}, provenance
    )
    save_vectors(tmp_path / "v.gguf", module)
    again = load_vectors(tmp_path / "v.gguf")
    assert (again, again.provenance) == (module, provenance)
    # What repeng and llama.cpp look at.
    reader = gguf.GGUFReader(tmp_path / "v.gguf")
    text = {name: reader.get_field(name).contents() for name in (
        "general.architecture", "controlvector.model_hint", "controlvector.layer_count"
    )}  # fmt: skip
    assert list(text.values()) == ["controlvector", provenance.model or "unknown", 2]
    assert {t.name: (t.tensor_type.name, t.data.tolist()) for t in reader.tensors} == {
        "direction.3": ("F32", VECTOR.tolist()), "direction.11": ("F32", (-2 * VECTOR).tolist())
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (SteeringModule({("resid_post", 3): VECTOR, ("resid_pre", 3): VECTOR}), "resid_pre.3"),
        (SteeringModule({("embed", 0): VECTOR}), "embed.0"),
        (SteeringModule({}, tiers={"prompt": {("resid_post", 3): VECTOR}}), "prompt:resid_post.3"),
    ],
)
def test_a_gguf_file_holds_only_what_a_control_vector_can_say(module, name, tmp_path):
    with pytest.raises(SpecError, match=f"has {name}; .* save the module as .safetensors"):
        save_vectors(tmp_path / "v.gguf", module)
    assert not (tmp_path / "v.gguf").exists()


def test_a_bfloat16_control_vector_is_read(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "controlvector")
    bits = torch.tensor(VECTOR).bfloat16().view(torch.uint8).numpy()
    writer.add_tensor("direction.5", bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert load_vectors(tmp_path / "v.gguf")["resid_post", 5].tolist() == VECTOR.tolist()


@pytest.mark.parametrize(
    ("tensors", "architecture", "message"),
    [
        pytest.param({"direction.5": VECTOR}, "llama", "architecture is 'llama'", id="a-model"),
        pytest.param({"foo": VECTOR}, "controlvector", "'foo' is no name", id="another-name"),
        pytest.param({"direction.5": VECTOR[None]}, "controlvector", "shape", id="matrix"),
        pytest.param(
            {"direction.5": np.int32([1, 2])}, "controlvector", "has type I32", id="integers"
        ),
    ],
)
def test_another_gguf_is_refused(tmp_path, tensors, architecture, message):
    path = write_gguf(tmp_path / "v.gguf", tensors, architecture)
    with pytest.raises(SpecError, match=message):
        load_vectors(path)


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_head(num_tensors: int, num_fields: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"GGUF", id="magic-only"),
        pytest.param(b"GGML" + bytes(60), id="another-magic"),
        pytest.param(gguf_head(0, 1 << 60), id="fields-past-the-end"),
        pytest.param(gguf_head(1 << 60, 0), id="tensors-past-the-end"),
        pytest.param(gguf_head(0, 1) + struct.pack("<Q", 1 << 62), id="a-name-past-the-end"),
        pytest.param(
            gguf_head(0, 1) + gguf_text(b"a") + struct.pack("<IIQ", 9, 0, 1 << 60) + bytes(99),
            id="an-array-past-the-end",
        ),
        pytest.param(
            gguf_head(0, 1) + gguf_text(b"a")
            + struct.pack("<IIQ", 9, 0, 1 << 20) + bytes(1 << 20),
            id="an-array-of-a-million",
        ),
        pytest.param(
            gguf_head(0, 1) + gguf_text(b"a") + struct.pack("<I", 9)
            + struct.pack("<IQ", 9, 1) * 5000,
            id="arrays-of-arrays",
        ),
        pytest.param(
            gguf_head(1, 0) + gguf_text(b"direction.1")
            + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0),
            id="a-tensor-past-the-end",
        ),
    ],
)  # fmt: skip
def test_a_malformed_gguf_is_refused_at_once(tmp_path, data):
    pytest.importorskip("gguf")
    (tmp_path / "v.gguf").write_bytes(data)
    with pytest.raises(SpecError):
        load_vectors(tmp_path / "v.gguf")


def test_without_the_gguf_library_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "v.gguf").write_bytes(gguf_head(0, 0))
    for act in (
        lambda: load_vectors(tmp_path / "v.gguf"),
        lambda: save_vectors(tmp_path / "v.gguf", SteeringModule({("resid_post", 1): VECTOR})),
    ):
        with pytest.raises(ImportError, match=r"pip install 'vllm-scope\[gguf\]'"):
            act()


def test_numpys_numbers_in_a_provenance_are_read_back():
    module = SteeringModule(
        {("resid_post", 1): [1.0, 2.0]}, Provenance(scale=np.float64(0.5), normalised=np.True_)
    )
    assert from_bytes(to_bytes(module)).provenance == Provenance(scale=0.5, normalised=True)


def test_a_damaged_deflated_npz_is_refused():
    stream = BytesIO()
    np.savez_compressed(stream, **{"direction.1": np.arange(4096, dtype=np.float32)})
    data = bytearray(stream.getvalue())
    data[200:400] = bytes(200)
    with pytest.raises(SpecError, match=r"is not an \.npz"):
        containers.read_npz(bytes(data))


def test_whatever_byte_of_an_npz_is_damaged_the_error_is_one_of_this_package():
    stream = BytesIO()
    np.savez_compressed(stream, **{"direction.1": np.arange(8, dtype=np.float32)})
    data, refused = stream.getvalue(), 0
    for at in range(len(data)):
        for value in (0, 0x7F, 0xFF):
            try:
                containers.read_npz(data[:at] + bytes([value]) + data[at + 1 :])
            except SpecError:
                refused += 1
    assert refused > len(data)


def test_one_tier_under_two_names_is_refused():
    hooks = {"post_block": {"1": [1.0, 2.0]}}
    with pytest.raises(SpecError, match="vectors and steering_vectors, which mean the same"):
        parse_module({"vectors": hooks, "steering_vectors": hooks}, "the file")
