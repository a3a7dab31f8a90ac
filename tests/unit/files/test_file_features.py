"""Features in files: what a sink wrote is read back exactly, and Parquet has each value once."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

import vllm_scope
from tests.unit.files.test_files import LAYOUTS, put, writer_of
from vllm_scope.analysis.cache import ActivationCache
from vllm_scope.analysis.rows import pooled_rows
from vllm_scope.batch.sparse import SparseRows
from vllm_scope.errors import ConfigError, FileError
from vllm_scope.files import export_features
from vllm_scope.files.options import FileOptions
from vllm_scope.results.features import SparseFeatures
from vllm_scope.sinks import Block, Ending, RequestInfo
from vllm_scope.sinks.filesystem import FilesystemSink

#: The largest number that float32 holds beside its neighbours, and a token without a feature.
INDICES = torch.tensor([[7, -1, 1 << 24], [-1, -1, -1], [4, 6, 7]], dtype=torch.int32)
VALUES = torch.tensor([[1.0, 0, 2e-40], [0, 0, 0], [3, 5, torch.pi]])
TOKENS = [1, 2, 5]


def written(root, **options):
    """Three requests through the sink: two with features `toy`, one with others alone."""
    sink = FilesystemSink(FileOptions.parse({"root": str(root), **options}))
    for key, names in enumerate([["toy", "resid_post"], ["toy"], ["other"]]):
        info = RequestInfo(key, f"r{key}", f"u{key}", (100, 101, 102, 103, 104))
        for name in names:
            positions = np.array(TOKENS)
            asked, size = ((7, 1 << 24, 4, 6), 1 << 25) if key == 0 else (None, None)
            sink.write(
                Block(
                    info, "resid_post", 3, positions, VALUES + key, name, INDICES,
                    num_features=size, asked=asked,
                )
            )  # fmt: skip
        sink.write(Block(info, "resid_post", 3, np.arange(6), torch.ones(6, 8)))
        num = 6 + 3 * len(names)
        report = sink.finish(Ending(info, (7, 8), "stop", num, num, "ok", None))
        assert report.status == "ok", report
    sink.flush()
    sink.close()
    return vllm_scope.open(root)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_come_back_exactly_whatever_the_codec_of_rows(layout, tmp_path):
    capture = written(tmp_path, layout=layout, codec="fp8" if layout != "npz" else "none")
    found = capture["r0"].features("toy")
    assert found.tokens.tolist() == TOKENS
    assert found.positions.tolist() == [1, 1, 5, 5, 5]
    assert found.indices.tolist() == [7, 1 << 24, 6, 7, 4]
    assert found.values.tolist() == torch.tensor([1.0, 2e-40, 5, torch.pi, 3]).tolist()
    assert capture["r0"]["resid_post", 3].shape == (6, 8)
    assert capture["r1"].features("toy").values.tolist() == (found.values + 1).tolist()
    with pytest.raises(KeyError, match=r"no features called 'no' were captured; .* other"):
        capture["r2"].features("no")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_say_which_features_were_read(layout, tmp_path):
    capture = written(tmp_path, layout=layout)
    found = capture["r0"].features("toy")
    assert (found.asked, found.num_features) == ((7, 1 << 24, 4, 6), 1 << 25)
    assert found.dense(7).tolist() == [1.0, 0, float(np.float32(np.pi))]
    with pytest.raises(
        KeyError, match=r"feature 5 was not read; the read named \[7, 16777216, 4, 6"
    ):
        found.dense(5)
    # As of a file that an earlier version wrote: nothing is known.
    other = capture["r1"].features("toy")
    assert (other.asked, other.num_features) == (None, None)
    assert other.dense(5).tolist() == [0, 0, 0]
    for body in tmp_path.rglob("*.json"):
        for request in json.loads(body.read_text())["requests"]:
            for name, stream in request["streams"].items():
                knows = request["request_id"] == "r0" and ".features." in name
                assert ("features" in stream) is knows


def test_features_beside_rows_are_no_rows_for_probes_and_caches(tmp_path):
    requests = list(written(tmp_path))
    assert ("toy.features", 3) in requests[0].keys()
    pooled = pooled_rows(requests)
    assert list(pooled) == [("resid_post", 3)]
    assert torch.equal(pooled["resid_post", 3], torch.ones(3, 8))
    cached = ActivationCache(requests)["blocks.3.hook_resid_post"]
    assert torch.equal(cached, torch.ones(3, 6, 8))


def test_an_index_that_float32_does_not_have_is_refused(tmp_path):
    sink = FilesystemSink(FileOptions.parse({"root": str(tmp_path)}))
    info = RequestInfo(0, "r", "u", (100, 101, 102))
    indices = torch.tensor([[1 << 24, (1 << 24) + 1]], dtype=torch.int32)
    block = Block(info, "resid_post", 3, np.array([1]), torch.ones(1, 2), "toy", indices)
    with pytest.raises(FileError, match="has the index 16,777,217; files have indices up to"):
        sink.write(block)
    sink.close()


@pytest.mark.parametrize(("width", "dtype"), [(5, torch.float32), (4, torch.bfloat16)])
def test_features_of_a_wrong_width_or_dtype_are_a_damaged_file(width, dtype, tmp_path):
    with writer_of(tmp_path) as writer:
        put(writer, 1, [("toy.features", 3)], hidden_size=width, dtype=dtype)
    with pytest.raises(FileError, match=rf"toy\.features\.3 have {width} numbers of {dtype}"):
        vllm_scope.open(tmp_path)[0].features("toy")


def test_parquet_has_a_row_for_each_value_and_for_each_token_without_one(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    capture = written(tmp_path / "in", layout="sharded")
    assert export_features(capture, tmp_path / "x.parquet", "toy") == 12
    table = pq.read_table(tmp_path / "x.parquet").to_pydict()
    assert list(table) == ["request", "position", "token_id", "index", "value"]
    rows = list(zip(*table.values(), strict=True))
    ids = [100, 101, 102, 103, 104, 7, 8]
    wanted = []
    for key in (0, 1):
        found = capture[f"r{key}"].features("toy")
        for token in TOKENS:
            uid = capture[f"r{key}"].manifest.uid
            some = found.top(token) or [(None, None)]
            wanted += [(uid, token, ids[token], index, value) for index, value in some]
    assert rows == wanted
    assert sum(index is None for *_, index, _ in rows) == 2
    with pytest.raises(KeyError, match="no features called 'none' were captured in any request"):
        export_features(capture, tmp_path / "y.parquet", "none")
    assert not list(tmp_path.glob("y*"))


def test_requests_whose_features_have_no_token_add_no_row(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    sink = FilesystemSink(FileOptions.parse({"root": str(tmp_path / "in"), "layout": "packed"}))
    for key, tokens in enumerate(([], [1, 2, 5], [])):
        info = RequestInfo(key, f"r{key}", f"u{key}", (100, 101, 102, 103, 104))
        num, positions = len(tokens), np.array(tokens, np.int64)
        sink.write(Block(info, "resid_post", 3, positions, VALUES[:num], "toy", INDICES[:num]))
        assert sink.finish(Ending(info, (7, 8), "stop", num, num, "ok", None)).status == "ok"
    sink.flush()
    sink.close()
    capture = vllm_scope.open(tmp_path / "in")
    assert len(capture["r0"].features("toy").tokens) == 0
    assert export_features(capture, tmp_path / "x.parquet", "toy") == 6
    table = pq.read_table(tmp_path / "x.parquet")
    assert set(table["request"].to_pylist()) == {capture["r1"].manifest.uid}
    assert table["position"].to_pylist() == [1, 1, 2, 5, 5, 5]


def test_a_result_is_saved_as_parquet(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    found = SparseFeatures(SparseRows(INDICES, VALUES), torch.tensor(TOKENS))
    found.save(tmp_path / "f.parquet")
    table = pq.read_table(tmp_path / "f.parquet")
    assert [str(field.type) for field in table.schema] == ["int64", "int64", "float"]
    assert table["position"].to_pylist() == [1, 1, 2, 5, 5, 5]
    kept = table.filter(table["index"].is_valid())
    for name in ("position", "index", "value"):
        stored = torch.tensor(kept[name].to_pylist())
        ours = {"position": found.positions, "index": found.indices, "value": found.values}
        assert torch.equal(stored, ours[name])


def test_without_pyarrow_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    found = SparseFeatures(SparseRows(INDICES, VALUES), torch.tensor(TOKENS))
    with pytest.raises(ConfigError, match=r"need the package pyarrow; pip install 'vllm-scope\[fi"):
        found.save(tmp_path / "f.parquet")
