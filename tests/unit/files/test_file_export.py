"""Other tools read what is exported, and remote roots hold what local ones do."""

from __future__ import annotations

import io
import json
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vllm_scope
from tests.unit.files.test_files import LAYOUTS, STREAMS, put, record_of, rows_of, writer_of
from vllm_scope.errors import ConfigError, FileError
from vllm_scope.files import export_dataset, export_saelens, export_speculators, publish
from vllm_scope.files.card import card_of
from vllm_scope.files.staged import make_staged


@pytest.fixture
def capture(tmp_path):
    with writer_of(tmp_path / "in", layout="sharded") as writer:
        for seed in range(4):
            put(writer, seed, uid=str(seed), num_prompt=3 + seed)
    return vllm_scope.open(tmp_path / "in")


def _table(folder):
    pa = pytest.importorskip("pyarrow")
    state = json.loads((folder / "state.json").read_text())
    (data,) = state["_data_files"]
    return pa.ipc.open_stream(str(folder / data["filename"])).read_all()


def test_a_dataset_has_a_row_per_token(capture, tmp_path):
    pytest.importorskip("pyarrow")
    streams = STREAMS[:2]
    count = export_dataset(capture, tmp_path / "out", streams)
    table = _table(tmp_path / "out")
    assert table.num_rows == count == sum(len(r["embed", 0]) for r in capture)
    assert table.column_names == ["request", "position", "token_id", "embed.0", "resid_post.2"]
    for site, layer in streams:
        rows = torch.tensor(table[f"{site}.{layer}"].to_pylist())
        assert torch.equal(rows, torch.cat([r[site, layer] for r in capture]).float())
    positions = torch.cat([r.positions("embed", 0) for r in capture])
    assert table["position"].to_pylist() == positions.tolist()
    tokens = torch.cat([r.token_ids[r.positions("embed", 0)] for r in capture])
    assert table["token_id"].to_pylist() == tokens.tolist()
    assert set(table["request"].to_pylist()) == {"0", "1", "2", "3"}


def test_saelens_contexts_follow_each_other_and_leave_gaps_out(tmp_path):
    pytest.importorskip("pyarrow")
    with writer_of(tmp_path / "in", layout="per_request") as writer:
        request = writer.begin()
        positions = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8])
        rows = rows_of(1, 8, dtype=torch.float32)
        request.write("resid_post", 5, positions.numpy(), rows)
        request.finish(record_of(9, 0, expected=8, delivered=8))
    capture = vllm_scope.open(tmp_path / "in")
    name = "blocks.5.hook_resid_post"
    count = export_saelens(capture, tmp_path / "out", "resid_post", 5, name, 2)
    assert (count, count.left_out, count + 1) == (3, 2, 4)  # positions 4 and 8
    assert (f"{count}", json.dumps(count)) == ("3", "3")
    table = _table(tmp_path / "out")
    contexts = torch.tensor([[list(r) for r in c] for c in table[name].to_pylist()])
    expected = torch.stack([rows[0:2], rows[2:4], rows[5:7]])
    assert torch.equal(contexts, expected)
    assert table["token_ids"].to_pylist() == [[100, 101], [102, 103], [106, 107]]
    features = json.loads((tmp_path / "out" / "dataset_info.json").read_text())["features"]
    assert features == {
        name: {"shape": [2, 12], "dtype": "float32", "_type": "Array2D"},
        "token_ids": {
            "feature": {"dtype": "int32", "_type": "Value"}, "length": 2, "_type": "List"
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("context_size", "count", "left_out"), [(1, 30, 0), (7, 3, 9), (8, 2, 14), (99, 0, 30)]
)
def test_rows_that_fill_no_context_are_left_out_and_counted(
    context_size, count, left_out, capture, tmp_path
):
    pytest.importorskip("pyarrow")
    assert [len(request["embed", 0]) for request in capture] == [6, 7, 8, 9]
    found = export_saelens(capture, tmp_path / "out", "embed", 0, "x", context_size)
    assert (found, found.left_out) == (count, left_out)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_datasets_itself_loads_both_exports(dtype, capture, tmp_path):
    pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    export_dataset(capture, tmp_path / "tokens", [("embed", 0)], dtype)
    tokens = datasets.load_from_disk(str(tmp_path / "tokens")).with_format("torch")
    real = getattr(torch, dtype)
    assert torch.equal(tokens[5]["embed.0"].to(real), capture[0]["embed", 0][5].to(real))
    name = "blocks.2.hook_resid_post"
    export_saelens(capture, tmp_path / "sae", "resid_post", 2, name, 3, dtype)
    contexts = datasets.load_from_disk(str(tmp_path / "sae"))
    assert contexts.features[name] == datasets.Array2D((3, 12), dtype)
    contexts = contexts.with_format("torch", columns=[name, "token_ids"])
    first = capture[0]
    assert torch.equal(contexts[:1][name][0].to(real), first["resid_post", 2][:3].to(real))
    assert contexts[0]["token_ids"].tolist() == first.token_ids[:3].tolist()


@pytest.fixture
def whole(tmp_path):
    """Requests with rows of all their tokens but the last, at three places, in bf16."""
    with writer_of(tmp_path / "in", layout="sharded") as writer:
        for seed in range(3):
            request, count = writer.begin(), 5 + seed
            for layer in (1, 2, 7):
                rows = rows_of(10 * seed + layer, count)
                request.write("resid_post", layer, torch.arange(count).numpy(), rows)
            request.finish(record_of(count + 1, 0, uid=str(seed), name=str(seed), num_layers=8))
    return vllm_scope.open(tmp_path / "in")


def test_draft_models_find_hidden_states_and_token_ids_of_each_sample(whole, tmp_path):
    pytest.importorskip("pyarrow")
    from safetensors.torch import load_file

    streams = [("resid_post", layer) for layer in (2, 1, 7)]
    out = tmp_path / "out"
    mask = [1, 1, 0, 0, 1, 1, 1]
    found = export_speculators(whole, out, streams, lambda r: mask[: len(r.token_ids) - 1])
    assert found == 3
    table = _table(out).to_pylist()
    for number, (request, row) in enumerate(zip(whole, table, strict=True)):
        sample = load_file(out / "hidden_states" / f"hs_{number}.safetensors")
        assert set(sample) == {"hidden_states", "token_ids"}
        expected = torch.stack([request[stream] for stream in streams], 1)
        assert sample["hidden_states"].dtype == expected.dtype
        assert torch.equal(sample["hidden_states"], expected)
        assert sample["token_ids"].dtype == torch.int64
        assert sample["token_ids"].tolist() == request.token_ids[:-1].tolist() == row["input_ids"]
        assert row["loss_mask"] == mask[: row["seq_len"]]
        assert row["seq_len"] == 5 + number


def test_datasets_itself_loads_samples_as_tensors(whole, tmp_path):
    pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    export_speculators(whole, tmp_path / "out", [("resid_post", 1), ("resid_post", 7)])
    found = datasets.load_from_disk(str(tmp_path / "out"))
    assert list(found.with_format(None)["seq_len"]) == [5, 6, 7]
    assert torch.equal(found[1]["input_ids"], whole[1].token_ids[:-1].long())
    assert found[1]["loss_mask"].tolist() == [1] * 6


def test_samples_with_gaps_or_wrong_masks_are_refused(capture, whole, tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(FileError, match="the loss mask has 2 numbers; it needs one for each of 5"):
        export_speculators(whole, tmp_path / "a", [("resid_post", 7)], lambda _: [1, 1])
    with pytest.raises(KeyError, match="was not captured"):
        export_speculators(whole, tmp_path / "b", [("resid_post", 3)])
    assert not (tmp_path / "b").exists()
    with writer_of(tmp_path / "gap", layout="per_request") as writer:
        request = writer.begin()
        request.write("resid_post", 5, torch.tensor([0, 2]).numpy(), rows_of(1, 2))
        request.finish(record_of(3, 0))
    with pytest.raises(FileError, match="has rows of some tokens only; read tokens='all'"):
        export_speculators(vllm_scope.open(tmp_path / "gap"), tmp_path / "c", [("resid_post", 5)])


def test_an_export_of_draft_samples_that_failed_is_repeated_into_the_same_folder(whole, tmp_path):
    pytest.importorskip("pyarrow")
    streams, out = [("resid_post", 7)], tmp_path / "out"

    def mask_of(request):
        if request.manifest.name == "2":
            raise RuntimeError("no mask")
        return [1] * (len(request.token_ids) - 1)

    with pytest.raises(RuntimeError, match="no mask"):
        export_speculators(whole, out, streams, mask_of)
    assert not list(out.iterdir())
    assert export_speculators(whole, out, streams) == 3


@pytest.mark.parametrize("streams", [[("resid_post", 7), ("resid_post", 2)], [("resid_post", 1)]])
def test_draft_samples_whose_last_place_is_not_the_last_layer_are_refused(streams, whole, tmp_path):
    pytest.importorskip("pyarrow")
    name = f"resid_post.{streams[-1][1]}"
    sentence = (
        f"the last place is {name}, and the model has 8 layers; .* learns from resid_post.7, so"
    )
    with pytest.raises(FileError, match=sentence):
        export_speculators(whole, tmp_path / "out", streams)
    assert not (tmp_path / "out").exists()


def test_draft_samples_of_two_dtypes_are_refused(tmp_path):
    pytest.importorskip("pyarrow")
    with writer_of(tmp_path / "in", layout="sharded") as writer:
        request = writer.begin()
        for layer, dtype in ((2, torch.bfloat16), (7, torch.float32)):
            request.write("resid_post", layer, torch.arange(5).numpy(), rows_of(layer, 5).to(dtype))
        request.finish(record_of(6, 0, uid="0", name="0", num_layers=8))
    streams = [("resid_post", 2), ("resid_post", 7)]
    with pytest.raises(
        FileError, match="its rows are in bfloat16 and float32; they must be in one"
    ):
        export_speculators(vllm_scope.open(tmp_path / "in"), tmp_path / "out", streams)


def five_rows_in(folder):
    """The file of a request with six tokens and the rows of five."""
    with writer_of(folder, layout="per_request") as writer:
        request = writer.begin()
        request.write("embed", 0, np.arange(5), rows_of(1, 5, dtype=torch.float32))
        request.finish(record_of(6, 0, expected=5, delivered=5, name="a"))
    return folder / "a.safetensors"


@pytest.mark.parametrize("position", [-1, 6, 1 << 40])
@pytest.mark.parametrize(
    "export",
    [
        pytest.param(lambda c, out: export_dataset(c, out, [("embed", 0)]), id="dataset"),
        pytest.param(lambda c, out: export_saelens(c, out, "embed", 0, "h", 1), id="saelens"),
    ],
)
def test_a_row_without_a_token_is_a_damaged_file(export, position, tmp_path):
    pytest.importorskip("pyarrow")
    path = five_rows_in(tmp_path / "in")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["embed.0.positions"][3] = position
    save_file(tensors, path, metadata)
    with pytest.raises(FileError, match=f"a row at position {position}, and it has 6 tokens"):
        export(vllm_scope.open(path), tmp_path / "out")


def test_draft_samples_with_more_rows_than_tokens_are_refused(tmp_path):
    pytest.importorskip("pyarrow")
    path = five_rows_in(tmp_path / "in")
    with safe_open(path, "pt") as file:
        index = file.metadata()["vllm_scope"].replace(
            '"num_prompt_tokens":6', '"num_prompt_tokens":4'
        )
    save_file(load_file(path), path, {"vllm_scope": index})
    with pytest.raises(FileError, match="a row at position 4, and it has 4 tokens"):
        export_speculators(vllm_scope.open(path), tmp_path / "out", [("embed", 0)])


@pytest.mark.parametrize("width", [1 << 70, 1 << 40, 13, -1])
def test_exports_refuse_an_index_with_a_wrong_width(width, tmp_path):
    pytest.importorskip("pyarrow")
    with writer_of(tmp_path / "in", layout="per_request") as writer:
        put(writer, 1, name="a")
    path = tmp_path / "in" / "a.safetensors"
    with safe_open(path, "pt") as file:
        index = file.metadata()["vllm_scope"].replace('"shape":[8,12]', f'"shape":[8,{width}]')
    save_file(load_file(path), path, {"vllm_scope": index})
    capture = vllm_scope.open(path)
    for number, export in enumerate(
        (
            lambda out: export_dataset(capture, out, [("embed", 0)]),
            lambda out: export_saelens(capture, out, "embed", 0, "h", 2),
            lambda out: export_speculators(capture, out, [("embed", 0)]),
        )
    ):
        with pytest.raises(FileError, match="contradicts itself"):
            export(tmp_path / str(number))


def test_exports_refuse_what_they_cannot_do(capture, tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match="float32 or float16"):
        export_dataset(capture, tmp_path / "a", [("embed", 0)], "bfloat16")
    with pytest.raises(KeyError, match="was not captured"):
        export_dataset(capture, tmp_path / "a", [("embed", 3)])
    for streams in ("embed", ("embed", 0), ["embed"], [], None):
        with pytest.raises(
            ConfigError, match=r"streams is .*; it must be a list of .* \[\('embed', 0\)\]"
        ):
            export_dataset(capture, tmp_path / "a", streams)
    for size in (0, -1, -2):
        with pytest.raises(ConfigError, match=f"context_size is {size}; it must be at least 1"):
            export_saelens(capture, tmp_path / "a", "embed", 0, "x", size)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="file cannot be read: Not a directory; export into"):
        export_dataset(capture, tmp_path / "file", [("embed", 0)])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(FileError, match="is not empty"):
        export_dataset(capture, tmp_path / "full", [("embed", 0)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_remote_root_has_the_same_files_as_a_local_one(kind, layout, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    where = f"/{uuid.uuid4().hex}" if kind == "memory" else str(tmp_path / "root")
    url = f"{kind}://{where}"
    with writer_of(url, layout=layout) as writer:
        _, rows = put(writer, 1, name="a", tag="../../t")
        put(writer, 2, name="b")
    capture = vllm_scope.open(url)
    assert len(capture) == 2
    for stream in STREAMS:
        assert torch.equal(capture["a"][stream], rows[stream])
    assert capture["a"].manifest.tag == "../../t"
    assert len(torch.cat(list(capture.iter_rows("embed", 0, 3, shuffle=True)))) == 16
    found = fsspec.filesystem(kind).find(where)
    assert not [name for name in found if name.endswith(".tmp")]
    one = next(name for name in found if name.endswith((".safetensors", ".npz")))
    assert len(vllm_scope.open(f"{kind}://{one}")) >= 1


@pytest.mark.parametrize("layout", ["per_request", "npz"])
def test_a_remote_file_that_was_replaced_after_it_was_listed_is_refused(layout):
    pytest.importorskip("fsspec")
    root = f"memory://{uuid.uuid4().hex}/captures"
    with writer_of(root, layout=layout) as writer:
        put(writer, 1, name="a", tag="t")
        before = vllm_scope.open(root)
        rows = put(writer, 2, name="a", tag="t")[1]
    with pytest.raises(FileError, match=r"t/a\..* was replaced after it was listed"):
        assert before["a"]["embed", 0] is None
    assert torch.equal(vllm_scope.open(root)["a"]["embed", 0], rows["embed", 0])


def test_a_missing_remote_root_is_an_error(tmp_path):
    pytest.importorskip("fsspec")
    with pytest.raises(FileError, match="does not exist"):
        vllm_scope.open(f"memory:///{uuid.uuid4().hex}")
    with pytest.raises(ConfigError, match="cannot be opened"):
        vllm_scope.open("nosuchscheme://x")


@pytest.mark.parametrize("method", ["isfile", "find", "open", "size", "get_file"])
def test_any_exception_of_a_remote_file_system_is_a_file_error(method, monkeypatch):
    """For example, a store whose sign-in fails raises an error that is no OSError."""
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    url = f"memory://{uuid.uuid4().hex}"
    with writer_of(url, layout="per_request") as writer:
        put(writer, 1)

    def refuse(*_args, **_options):
        raise RuntimeError("sign in first")

    monkeypatch.setattr(MemoryFileSystem, method, refuse)
    with pytest.raises(FileError, match="cannot be read: sign in first"):
        vllm_scope.open(url)[0]["embed", 0]


@pytest.mark.parametrize("layout", ["sharded", "npz"])
def test_a_remote_file_whose_reading_fails_is_a_file_error(layout, monkeypatch):
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFile

    url = f"memory://{uuid.uuid4().hex}"
    with writer_of(url, layout=layout) as writer:
        put(writer, 1)

    def refuse(*_args):
        raise RuntimeError("connection lost")

    monkeypatch.setattr(MemoryFile, "read", refuse)
    with pytest.raises(FileError, match="cannot be read: connection lost"):
        vllm_scope.open(url)


@pytest.mark.parametrize("folder", ["a[1]b", "a*b", "a?b"])
def test_a_remote_root_is_no_pattern(folder):
    pytest.importorskip("fsspec")
    root = f"memory://{uuid.uuid4().hex}"
    with writer_of(f"{root}/a1b") as other:
        put(other, 1)
    with writer_of(f"{root}/{folder}") as writer:
        put(writer, 2)
        staged = make_staged(f"{root}/{folder}", False, 0o600)
        place = staged.make()
        with writer_of(place) as engine:
            (name,) = put(engine, 3)[0].files
        staged.move(place, [name])
        writer.flush()
    assert len(vllm_scope.open(f"{root}/{folder}")) == 2
    assert len(vllm_scope.open(f"{root}/a1b")) == 1


def test_exports_of_two_models_are_refused(tmp_path):
    pytest.importorskip("pyarrow")
    for first, second in ((4, 8), (8, 4)):
        root = tmp_path / f"{first}"
        with writer_of(root) as writer:
            for seed, size in ((1, first), (2, second)):
                put(writer, seed, [("embed", 0)], size, torch.float32)
        capture = vllm_scope.open(root)
        for export in (
            lambda folder: export_dataset(capture, folder, [("embed", 0)]),  # noqa: B023
            lambda folder: export_saelens(capture, folder, "embed", 0, "x", 2),  # noqa: B023
        ):
            with pytest.raises(FileError, match="export the rows of one model alone"):
                export(tmp_path / f"out-{uuid.uuid4().hex}")


def test_float16_keeps_finite_values_finite(tmp_path):
    pytest.importorskip("pyarrow")
    with writer_of(tmp_path / "in") as writer:
        request = writer.begin()
        rows = torch.tensor([[1e5, -1e5, 1.5, torch.inf]], dtype=torch.bfloat16)
        request.write("embed", 0, torch.zeros(1, dtype=torch.int64).numpy(), rows)
        request.finish(record_of(1, 1, 1))
    export_dataset(vllm_scope.open(tmp_path / "in"), tmp_path / "out", [("embed", 0)], "float16")
    assert _table(tmp_path / "out")["embed.0"][0].as_py() == [65504.0, -65504.0, 1.5, float("inf")]


class Short(io.FileIO):
    """A disk that is nearly full, while others free room on it."""

    def write(self, data):
        return super().write(memoryview(data).cast("B")[:1000])


def test_a_partial_write_is_continued(monkeypatch, tmp_path):
    monkeypatch.setattr(publish, "open", lambda fd, mode, buffering: Short(fd, "w"), raising=False)
    for layout in LAYOUTS:
        with writer_of(tmp_path / layout, layout=layout) as writer:
            _, rows = put(writer, 3, hidden_size=512)
        (request,) = vllm_scope.open(tmp_path / layout)
        for stream, expected in rows.items():
            assert torch.equal(request[stream], expected)
    pytest.importorskip("pyarrow")
    export_dataset(vllm_scope.open(tmp_path / "sharded"), tmp_path / "out", [("embed", 0)])
    assert _table(tmp_path / "out").num_rows == 8


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def mixed(request, tmp_path):
    """Rows at two layers, every kind of float32 among them, in the layout of a harvest."""
    with writer_of(tmp_path / "in", layout="sharded") as writer:
        for seed in range(3):
            one, count = writer.begin(), 4 + seed
            for layer in (2, 5):
                rows = rows_of(seed + layer, count, dtype=torch.float32)
                rows[0, :4] = torch.tensor([-0.0, 1e-42, torch.inf, torch.nan])
                at = torch.arange(count).numpy()
                one.write("resid_post", layer, at, rows.to(request.param))
            one.finish(record_of(count, 0, uid=str(seed)))
    return vllm_scope.open(tmp_path / "in"), str(request.param).removeprefix("torch.")


def test_exported_rows_have_the_bits_of_the_shards_and_the_card_says_so(mixed, tmp_path):
    pytest.importorskip("pyarrow")
    capture, stored = mixed
    out, streams = tmp_path / "out", [("resid_post", 2), ("resid_post", 5)]
    export_dataset(capture, out, streams)
    table = _table(out)
    for site, layer in streams:
        flat = table[f"{site}.{layer}"].combine_chunks().flatten().to_numpy()
        expected = torch.cat([request[site, layer] for request in capture]).float()
        assert flat.tobytes() == expected.numpy().tobytes()
    card = (out / "README.md").read_text()
    assert f"| dtype in the captured files | {stored} |" in card
    assert "| sites and layers | `resid_post.2` (12 values), `resid_post.5` (12 values) |" in card
    assert "15 rows, one for each token,\nof 3 requests" in card
    same = "has the same bits as in the captured files" in card
    assert same if stored == "float32" else "equals the captured number, which float32" in card


def test_the_hub_reads_the_card_and_its_code_loads_the_folder(mixed, tmp_path):
    pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import DatasetCard

    capture, _ = mixed
    out = tmp_path / "out"
    export_dataset(capture, out, [("resid_post", 2), ("resid_post", 5)])
    card = DatasetCard.load(out / "README.md")
    assert card.data.license is None  # the user's
    assert card.data.pretty_name == f"Rows of {capture[0].manifest.model}"
    code = card.text.split("```python\n")[1].split("```")[0]
    found: dict = {}
    exec(code.replace("FOLDER", str(out)), found)
    assert len(found["rows"]) == 15
    first = torch.cat([request["resid_post", 2] for request in capture]).float()[:8]
    assert found["rows"][:8]["resid_post.2"].shape == (8, 12)
    bits = found["rows"][:8]["resid_post.2"].view(torch.int32)
    assert torch.equal(bits, first.view(torch.int32))
    # As the hub's viewer and `load_dataset("user/name")` find the rows.
    (config,) = card.data.configs
    files = str(out / config["data_files"])
    loaded = datasets.load_dataset("arrow", data_files=files, cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].features == found["rows"].features
    assert loaded["train"]["position"] == found["rows"].with_format(None)["position"]


def test_the_card_names_what_rows_have_lost(tmp_path):
    pytest.importorskip("pyarrow")
    with writer_of(tmp_path / "in", codec="int8") as writer:
        put(writer, 1, [("embed", 0)])
    export_dataset(vllm_scope.open(tmp_path / "in"), tmp_path / "out", [("embed", 0)], "float16")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "bfloat16, under the codec int8 |" in card
    lost = "each number is rounded, and finite numbers beyond ±65,504 became ±65,504"
    assert f"| float16; {lost} |" in card


@pytest.mark.parametrize(
    ("model", "shown", "markdown"),
    [
        pytest.param("a/llama-\U0001f999", "a/llama-\U0001f999", "a/llama-\U0001f999", id="emoji"),
        pytest.param("a\n# b\u2028c", "a # b c", r"a \# b c", id="newlines"),
        pytest.param("a|b", "a|b", r"a\|b", id="a-column"),
        pytest.param("<b>`x`*", "<b>`x`*", r"\<b\>\`x\`\*", id="markup"),
        pytest.param("a\x7fb\ud800c", "a b c", "a b c", id="no-characters"),
        pytest.param('"x: y', '"x: y', '"x: y', id="quote"),
    ],
)
def test_any_name_of_a_model_is_text_in_the_card(model, shown, markdown):
    yaml = pytest.importorskip("yaml")
    stream = SimpleNamespace(dtype="float32", codec={"codec": "none"})
    manifest = SimpleNamespace(model=model, streams={"embed.0": stream})
    card = card_of([SimpleNamespace(manifest=manifest)], {("embed", 0): 4}, "float32", 3)
    _, front, body = card.encode().decode().split("---\n", 2)
    assert yaml.safe_load(front)["pretty_name"] == f"Rows of {shown}"
    lines = body.splitlines()
    assert lines[0] == f"# Rows of {markdown}"
    assert f"| model | {markdown} |" in lines


def test_the_name_of_features_is_text_in_the_card(tmp_path):
    pytest.importorskip("pyarrow")
    site = "a`|\n<img src=x>\n```.features"
    with writer_of(tmp_path / "in") as writer:
        put(writer, 1, [(site, 0)])
    export_dataset(vllm_scope.open(tmp_path / "in"), tmp_path / "out", [(site, 0)])
    lines = (tmp_path / "out" / "README.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| sites and layers |")]
    assert row.startswith(r"| sites and layers | a\`\| \<img src=x\> \`\`\`.features.0 (")
    assert len([line for line in lines if line.startswith("|")]) == 6
    assert len([line for line in lines if line.startswith("```")]) == 2
