"""What is written is read back, in every layout, whole, and from nowhere else."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

import vllm_scope
from vllm_scope.analysis.cache import ActivationCache
from vllm_scope.analysis.rows import pooled_rows, token_rows
from vllm_scope.codecs import make_codec
from vllm_scope.codecs.packed import EncodedRows, Packing
from vllm_scope.errors import ConfigError, FileError, SpecError
from vllm_scope.files import (
    FileOptions,
    IndexedRequest,
    RequestRecord,
    Writer,
    iterate,
    open_writer,
)
from vllm_scope.files.roots import make_publisher

LAYOUTS = ["per_request", "packed", "sharded", "npz"]
CODECS = ["none", "fp16", "fp8", "int8", "full8", "rp8", "topk8"]
STREAMS = [("embed", 0), ("resid_post", 2), ("resid_post", 10)]


def writer_of(root, **options) -> Writer:
    return open_writer(FileOptions.parse({"root": str(root), **options}))


def record_of(num_prompt=5, num_output=4, num_streams=3, **fields) -> RequestRecord:
    num_rows = (num_prompt + max(num_output - 1, 0)) * num_streams
    return RequestRecord(
        **{
            "request_id": "7",
            "prompt_ids": list(range(100, 100 + num_prompt)),
            "output_ids": list(range(200, 200 + num_output)),
            "model": "toy",
            "expected": num_rows,
            "delivered": num_rows,
            **fields,
        }
    )


def rows_of(seed: int, num_rows: int, hidden_size=12, dtype=torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, hidden_size, generator=generator).to(dtype)


def put(writer: Writer, seed: int, streams=STREAMS, hidden_size=12, dtype=torch.bfloat16, **fields):
    """Write a request whole; returns its manifest and its rows by stream."""
    one, rows = store(writer, seed, streams, hidden_size, dtype, **fields)
    return one.manifest, rows


def store(
    writer: Writer, seed: int, streams=STREAMS, hidden_size=12, dtype=torch.bfloat16, **fields
):
    record = record_of(num_streams=len(streams), **fields)
    request = writer.begin()
    rows = {}
    for number, (site, layer) in enumerate(streams):
        found = rows_of(seed * 100 + number, record.num_positions, hidden_size, dtype)
        rows[site, layer] = found
        request.write(site, layer, np.arange(len(found)), found)
    return request.finish(record), rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_tokens_and_labels_come_back_exactly(layout, dtype, tmp_path):
    with writer_of(tmp_path, layout=layout) as writer:
        written = [
            put(writer, seed, dtype=dtype, name=f"r{seed}", num_prompt=3 + seed, uid=str(seed))
            for seed in range(3)
        ]
    capture = vllm_scope.open(tmp_path)
    assert len(capture) == 3
    assert capture.keys() == STREAMS
    for seed, (manifest, rows) in enumerate(written):
        request = capture[f"r{seed}"]
        assert request.keys() == STREAMS
        for stream in STREAMS:
            assert request[stream].dtype == dtype
            assert torch.equal(request[stream], rows[stream])
            assert request.positions(*stream).tolist() == list(range(len(rows[stream])))
        assert request.prompt_ids.tolist() == list(range(100, 103 + seed))
        assert request.output_ids.tolist() == [200, 201, 202, 203]
        assert request.status == manifest.status == "ok"
        assert request.name == manifest.name
        assert request.manifest == manifest


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_in_every_layout_reads_back_what_it_would_decode(layout, codec, tmp_path):
    from vllm_scope.codecs import make_codec

    with writer_of(tmp_path, layout=layout, codec=codec) as writer:
        first = put(writer, 1, name="a")[1]
        second = put(writer, 2, name="b")[1]
    maker = make_codec(codec, 12, torch.bfloat16)
    capture = vllm_scope.open(tmp_path)
    for name, rows in (("a", first), ("b", second)):
        for stream in STREAMS:
            expected = maker.decode(maker.encode(rows[stream]), len(rows[stream]))
            torch.testing.assert_close(capture[name][stream], expected, rtol=0, atol=0)
            some = capture[name].at(*stream, [6, 0, 3])
            torch.testing.assert_close(some, expected[[6, 0, 3]], rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("layout", ["per_request", "packed", "npz"])
def test_zstd_reads_back_bit_for_bit(layout, tmp_path):
    pytest.importorskip("backports.zstd")
    with writer_of(tmp_path, layout=layout, codec="zstd", codec_options={"level": 3}) as writer:
        rows = put(writer, 1, name="a")[1]
    request = vllm_scope.open(tmp_path)["a"]
    for stream in STREAMS:
        assert torch.equal(request[stream], rows[stream])
        assert torch.equal(request.at(*stream, [2]), rows[stream][[2]])
    batches = list(vllm_scope.open(tmp_path).iter_rows("embed", 0, 3))
    assert torch.equal(torch.cat(batches), rows["embed", 0])


@st.composite
def arrivals(draw):
    """Blocks of two streams in any order, positions repeated and past the end."""
    blocks = draw(
        st.lists(
            st.tuples(
                st.sampled_from([("embed", 0), ("resid_post", 1)]),
                st.lists(st.integers(0, 11), min_size=0, max_size=6),
            ),
            max_size=8,
        )
    )
    return blocks, draw(st.integers(1, 6)), draw(st.integers(0, 6))


@given(arrivals(), st.sampled_from(LAYOUTS))
def test_the_last_row_of_a_position_stays_and_unprocessed_positions_are_left_out(
    tmp_path_factory, case, layout
):
    blocks, num_prompt, num_output = case
    num_positions = num_prompt + max(num_output - 1, 0)
    expected: dict[tuple[str, int], dict[int, float]] = {}
    root = tmp_path_factory.mktemp("root")
    with writer_of(root, layout=layout) as writer:
        request = writer.begin()
        value = 0.0
        for (site, layer), positions in blocks:
            values = [value + i for i in range(len(positions))]
            value += len(positions)
            reused = torch.tensor(values)[:, None].repeat(1, 3)
            request.write(site, layer, np.array(positions, np.int64), reused)
            reused.fill_(torch.nan)
            kept = expected.setdefault((site, layer), {})
            kept.update((p, v) for p, v in zip(positions, values, strict=True))
        for kept in expected.values():
            for position in [p for p in kept if p >= num_positions]:
                del kept[position]
        num_rows = sum(map(len, expected.values()))
        manifest = request.finish(
            record_of(num_prompt, num_output, expected=num_rows, delivered=num_rows)
        ).manifest
    assert manifest.status == "ok"
    (read,) = vllm_scope.open(root)
    assert read.keys() == sorted(expected)
    for stream, kept in expected.items():
        assert read.positions(*stream).tolist() == sorted(kept)
        assert read[stream][:, 0].tolist() == [kept[p] for p in sorted(kept)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        pytest.param({}, "ok", None, id="complete"),
        pytest.param({"expected": 30}, "partial", "6 of 30 rows are missing", id="fewer"),
        pytest.param(
            {"delivered": 25, "expected": 25},
            "partial",
            "24 reached the file",
            id="lost",
        ),
        pytest.param(
            {"status": "error", "reason": "it broke", "dropped": 3}, "error", "it broke", id="error"
        ),
    ],
)
def test_a_missing_row_differs_from_one_that_nobody_asked_for(
    layout, fields, status, says, tmp_path
):
    with writer_of(tmp_path, layout=layout) as writer:
        manifest, _ = put(writer, 1, **fields)
    (request,) = vllm_scope.open(tmp_path)
    assert request.status == manifest.status == status
    assert says is None or says in request.manifest.reason
    assert request.manifest.dropped == fields.get("dropped", 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_without_rows_is_still_there(layout, tmp_path):
    with writer_of(tmp_path, layout=layout) as writer:
        record = record_of(3, 0, expected=9, delivered=0, status="error", reason="aborted")
        writer.begin().finish(record)
    (request,) = vllm_scope.open(tmp_path)
    assert (request.status, request.manifest.reason) == ("error", "aborted")
    assert request.keys() == []
    assert request.token_ids.tolist() == [100, 101, 102]
    with pytest.raises(KeyError, match="captured are none"):
        request["embed", 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_index_beside_a_file_has_shapes_dtypes_codec_and_counts(layout, tmp_path):
    with writer_of(tmp_path, layout=layout, codec="int8") as writer:
        manifest, _ = put(writer, 1)
    (beside,) = tmp_path.glob("*.json")
    body = json.loads(beside.read_text())
    assert body["layout"] == layout
    (found,) = body["requests"]
    assert found == json.loads(json.dumps(manifest.to_json()))
    assert found["files"] == [beside.stem + (".npz" if layout == "npz" else ".safetensors")]
    entry = found["streams"]["resid_post.10"]
    assert entry["shape"] == [8, 12]
    assert entry["dtype"] == "bfloat16"
    assert entry["codec"] == {"codec": "int8", "hidden_size": 12, "dtype": "bfloat16"}
    assert (found["expected"], found["delivered"], found["dropped"]) == (24, 24, 0)


def test_a_request_file_is_plain_safetensors(tmp_path):
    with writer_of(tmp_path, layout="per_request") as writer:
        _, rows = put(writer, 1, name="a", tag="t")
    with safe_open(tmp_path / "t" / "a.safetensors", "pt") as file:
        names = [f"{site}.{layer}" for site, layer in STREAMS]
        assert sorted(file.keys()) == sorted(
            [*names, *(f"{name}.positions" for name in names), "token_ids"]
        )
        assert torch.equal(file.get_tensor("resid_post.2"), rows["resid_post", 2])
        assert file.get_tensor("embed.0.positions").dtype == torch.int64


def test_a_shard_is_flat_tokens_with_an_index_per_row(tmp_path):
    with writer_of(tmp_path, layout="sharded") as writer:
        rows = [put(writer, seed, name=str(seed), num_prompt=2 + seed)[1] for seed in range(3)]
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        stream = ("resid_post", 2)
        assert torch.equal(
            file.get_tensor("resid_post.2"), torch.cat([found[stream] for found in rows])
        )
        lengths = [5, 6, 7]
        numbers = [n for n, length in enumerate(lengths) for _ in range(length)]
        assert file.get_tensor("resid_post.2.request").tolist() == numbers
        positions = [p for length in lengths for p in range(length)]
        assert file.get_tensor("resid_post.2.positions").tolist() == positions
        token_ids = [t for seed in range(3) for t in [*range(100, 102 + seed), *range(200, 203)]]
        assert file.get_tensor("resid_post.2.token_ids").tolist() == token_ids


def test_the_number_of_shards_follows_bytes_not_requests(tmp_path):
    row_bytes = 4 * 4096
    with writer_of(tmp_path, layout="sharded", file_mib=1) as writer:
        for seed in range(40):
            # 8 rows each, and 5 MiB in all.
            put(writer, seed, streams=[("embed", 0)], hidden_size=4096, dtype=torch.float32)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 40 * 8 * row_bytes // (1 << 20) == 5
    assert len(vllm_scope.open(tmp_path)) == 40
    assert all(shard.stat().st_size > 1 << 20 for shard in shards[:-1])


def test_a_shard_holds_one_width_and_dtype_per_stream(tmp_path):
    with writer_of(tmp_path, layout="sharded") as writer:
        wide = put(writer, 1, hidden_size=20, name="wide")[1]
        narrow = put(writer, 2, name="narrow")[1]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    capture = vllm_scope.open(tmp_path)
    assert torch.equal(capture["wide"]["embed", 0], wide["embed", 0])
    assert torch.equal(capture["narrow"]["embed", 0], narrow["embed", 0])
    with pytest.raises(FileError, match="not of one shape"):
        capture.iter_rows("embed", 0, 4)


def test_requests_of_different_codecs_fill_shards_of_their_own(tmp_path):
    codecs = [None, *(make_codec(name, 12, torch.bfloat16) for name in ("int8", "fp8"))]
    rows = rows_of(7, 5)
    with writer_of(tmp_path, layout="sharded") as writer:
        for number in range(30):
            codec = codecs[number % 3]
            request = writer.begin()
            for start, stop in ((0, 2), (2, 5)):
                some = rows[start:stop] + number
                if codec is not None:
                    some = EncodedRows(codec, Packing(codec).pack(some))
                request.write("embed", 0, np.arange(start, stop), some)
            record = RequestRecord(str(number), range(5), [6], "m", 5, 5)
            assert request.finish(record).manifest.status == "ok"
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    capture = vllm_scope.open(tmp_path)
    for number in range(30):
        codec, expected = codecs[number % 3], rows + number
        found = capture[str(number)].stored(("embed", 0))
        if codec is not None:
            assert found.codec == codec
            expected = codec.decode(codec.encode(expected), 5)
        assert torch.equal(found.rows(0, 5), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_encoded_rows_are_stored_as_they_came_whatever_the_writers_codec(layout, tmp_path):
    codec = make_codec("topk8", 12, torch.bfloat16, k=3)
    rows = rows_of(3, 6)
    data = Packing(codec).pack(rows)
    with writer_of(tmp_path, layout=layout, codec="int8") as writer:
        request = writer.begin()
        for some in ([4, 1], [0, 5], [1, 2, 3]):  # position 1 twice, and out of order
            request.write("embed", 0, np.array(some), EncodedRows(codec, data[some]))
        request.write("resid_post", 1, np.arange(6), rows)
        with pytest.raises(ValueError, match="the rows have two codecs"):
            request.write("embed", 0, np.arange(6), rows)
        request.finish(RequestRecord("r", range(5), [6, 7], "m", 12, 12))
    (found,) = vllm_scope.open(tmp_path)
    stored = found.stored(("embed", 0))
    assert (stored.codec, found.stored(("resid_post", 1)).codec.codec) == (codec, "int8")
    assert stored.positions.tolist() == list(range(6))
    for name, part in codec.encode(rows).items():
        assert torch.equal(stored._parts()[name], part)


@pytest.mark.parametrize(
    ("options", "num_files"),
    [({"packed_requests": 4}, 3), ({"packed_requests": 100}, 1)],
    ids=["by-requests", "at-the-end"],
)
def test_packed_puts_some_requests_into_a_file(options, num_files, tmp_path):
    with writer_of(tmp_path, layout="packed", **options) as writer:
        for seed in range(9):
            put(writer, seed, request_id=str(seed))
    assert len(list(tmp_path.glob("*.safetensors"))) == num_files
    capture = vllm_scope.open(tmp_path)
    assert sorted(r.manifest.request_id for r in capture) == [str(seed) for seed in range(9)]


def test_flush_makes_finished_requests_visible(tmp_path):
    with writer_of(tmp_path, layout="sharded") as writer:
        put(writer, 1)
        assert len(vllm_scope.open(tmp_path)) == 0
        writer.flush()
        assert len(vllm_scope.open(tmp_path)) == 1
        writer.flush()
        assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_a_request_that_is_dropped_leaves_no_trace(tmp_path):
    with writer_of(tmp_path, layout="per_request") as writer:
        writer.begin().write("embed", 0, np.arange(2), torch.zeros(2, 3))
    assert list(tmp_path.iterdir()) == []


def test_flush_raises_the_error_of_a_shard_that_fails_at_once(tmp_path, monkeypatch):
    submit = ThreadPoolExecutor.submit

    def ended(pool, *call):
        future = submit(pool, *call)
        wait([future])
        return future

    monkeypatch.setattr(ThreadPoolExecutor, "submit", ended)
    writer = writer_of(tmp_path, layout="sharded")
    put(writer, 1)
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    with pytest.raises(FileError, match="cannot be written"):
        writer.flush()
    writer.close()


@pytest.mark.parametrize("layout", ["per_request", "npz", "sharded", "packed"])
def test_stages_of_one_request_are_read_as_one(layout, tmp_path):
    streams = [[("embed", 0), ("resid_post", 0)], [("resid_post", 1)]]
    rows = {}
    for stage in (1, 0):
        with writer_of(tmp_path, layout=layout) as writer:
            rows |= put(
                writer, stage, streams[stage], uid="u", stage=stage, num_stages=2, name="a"
            )[1]
            if stage == 0:
                put(writer, 9, streams[0], uid="v", stage=0, num_stages=2, name="b")
    capture = vllm_scope.open(tmp_path)
    assert len(capture) == 2
    both, half = capture["a"], capture["b"]
    assert both.keys() == sorted(rows)
    for stream, found in rows.items():
        assert torch.equal(both[stream], found)
    assert (both.status, both.manifest.expected, both.manifest.delivered) == ("ok", 24, 24)
    assert len(both.manifest.files) == 2
    assert half.status == "partial"
    assert half.manifest.reason == "stages [1] of 2 are missing"


def test_completions_of_one_request_are_separate_requests(tmp_path):
    with writer_of(tmp_path, layout="per_request") as writer:
        for child in range(3):
            put(writer, child, name="a", uid="u", child=child)
    capture = vllm_scope.open(tmp_path)
    assert len(capture) == 3
    assert sorted(r.manifest.child for r in capture.find(name="a")) == [0, 1, 2]
    with pytest.raises(KeyError, match="3 requests are called 'a'"):
        capture["a"]


@pytest.mark.parametrize("layout", ["sharded", "packed"])
def test_a_request_that_was_stored_twice_is_found_twice(layout, tmp_path):
    for seed in range(2):
        with writer_of(tmp_path, layout=layout) as writer:
            put(writer, seed, uid="u", name="a")
    assert len(vllm_scope.open(tmp_path).find(name="a")) == 2


def test_a_repeated_name_replaces_and_a_repeated_request_id_does_not(tmp_path):
    with writer_of(tmp_path, layout="per_request") as writer:
        put(writer, 1, name="same")
        last = put(writer, 2, name="same")[1]
        put(writer, 3, request_id="0")
        put(writer, 4, request_id="0")
    capture = vllm_scope.open(tmp_path)
    assert len(capture) == 3
    assert torch.equal(capture["same"]["embed", 0], last["embed", 0])
    assert len(capture.find(request_id="0")) == 2


def test_find_returns_the_requests_that_match_every_value(tmp_path):
    with writer_of(tmp_path, layout="per_request") as writer:
        put(writer, 1, name="a", tag="x")
        put(writer, 2, name="a", tag="y")
        put(writer, 3, name="b", tag="y", status="error", reason="r")
    capture = vllm_scope.open(tmp_path)
    assert len(capture.find(tag="y")) == 2
    assert len(capture.find(tag="y", status="error")) == 1
    assert capture.find(tag="x")[0].manifest.name == "a"
    assert len(vllm_scope.open(tmp_path / "x" / "a.safetensors")) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_size", [1, 7, 8, 1000])
def test_rows_for_training_come_once_each_in_order(layout, batch_size, tmp_path):
    with writer_of(tmp_path, layout=layout, packed_requests=3) as writer:
        for seed in range(8):
            put(writer, seed, request_id=str(seed), num_prompt=1 + seed)
    capture = vllm_scope.open(tmp_path)
    batches = list(capture.iter_rows("resid_post", 2, batch_size))
    everything = torch.cat([request["resid_post", 2] for request in capture])
    assert torch.equal(torch.cat(batches), everything)
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_shuffled_rows_come_once_each_in_an_order_of_the_seed(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_scope.files.iterate.RUN_ROWS", 4)
    monkeypatch.setattr("vllm_scope.files.iterate.POOL_RUNS", 5)
    with writer_of(tmp_path, layout="sharded") as writer:
        for seed in range(8):
            put(writer, seed, dtype=torch.float32)
    capture = vllm_scope.open(tmp_path)

    def order(seed: int) -> list[float]:
        batches = list(capture.iter_rows("embed", 0, 10, shuffle=True, seed=seed))
        assert [len(batch) for batch in batches] == [10] * 6 + [4]
        return torch.cat(batches)[:, 0].tolist()

    plain = torch.cat(list(capture.iter_rows("embed", 0, 10)))[:, 0].tolist()
    assert sorted(order(0)) == sorted(plain)
    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != plain


def test_in_order_batches_of_a_shard_are_views_of_the_file(tmp_path):
    with writer_of(tmp_path, layout="sharded") as writer:
        for seed in range(4):
            put(writer, seed)
    capture = vllm_scope.open(tmp_path)
    first, second, *_ = capture.iter_rows("embed", 0, 8)
    assert second.data_ptr() - first.data_ptr() == first.nbytes


def test_wrong_arguments_are_refused_with_a_sentence(tmp_path):
    with writer_of(tmp_path) as writer:
        put(writer, 1, name="a")
        with pytest.raises(ValueError, match=r"positions are \[3\] and rows \[2, 4\]"):
            writer.begin().write("embed", 0, np.arange(3), torch.zeros(2, 4))
        request = writer.begin()
        request.write("embed", 0, np.arange(2), torch.zeros(2, 4))
        with pytest.raises(ValueError, match=r"rows are \[n, 5\] torch.float32, after"):
            request.write("embed", 0, np.arange(2), torch.zeros(2, 5))
    capture = vllm_scope.open(tmp_path)
    with pytest.raises(KeyError, match=r"captured are embed.0, resid_post.2, resid_post.10"):
        capture[0]["resid_post", 3]
    with pytest.raises(
        KeyError, match=r"'embed' is not a site and a layer; .* as in \['embed', 0\]"
    ):
        capture[0]["embed"]
    with pytest.raises(KeyError, match=r"position 9 of embed\.0 was not captured; 8 positions"):
        capture[0].at("embed", 0, [1, 9])
    with pytest.raises(KeyError, match="no request is called 'b'; the capture has"):
        capture["b"]
    for index in (np.int64(0), torch.tensor(0)):  # such as random indices
        assert capture[index].manifest == capture[0].manifest
    with pytest.raises(IndexError, match="there is no request 99; the capture has"):
        capture[99]
    with pytest.raises(KeyError, match="was not captured"):
        capture.iter_rows("resid_pre", 1, 4)
    with pytest.raises(ValueError, match="batch_size is 0"):
        capture.iter_rows("embed", 0, 0)
    with pytest.raises(FileError, match="does not exist"):
        vllm_scope.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param({"fsync": "False"}, "fsync is 'False'", id="text-as-bool"),
        pytest.param({"fsync": 1}, "fsync is 1", id="number-as-bool"),
        pytest.param({"file_mib": "256"}, "file_mib is '256'", id="text-as-number"),
        pytest.param({"file_mib": 0}, "file_mib is 0; it must be at least 1.", id="zero"),
        pytest.param({"layout": "per_file"}, "'per_request', 'packed', 'sharded' or 'npz'", id="l"),
        pytest.param({"shards": 3}, "The options are root, layout", id="unknown"),
        pytest.param({"file_mb": 3}, "file_mb is no option; did you mean file_mib?", id="near"),
        pytest.param({"root": ""}, "root is ''; it must have 1 or more characters.", id="no-root"),
        pytest.param({"mode": "rw"}, "mode is 'rw'; it must be 6 and two digits", id="mode"),
        pytest.param({"codec": "gzip"}, "codec is 'gzip'", id="codec"),
        pytest.param({"codec_options": {"k": 3}}, "takes no options", id="codec-option"),
        pytest.param(
            {"codec": "rp8", "codec_options": {"dtype": "float16"}}, "takes k, seed", id="not-own"
        ),
        pytest.param({"codec": "zstd"}, "layout 'sharded' reads single rows", id="zstd-sharded"),
    ],
)
def test_wrong_options_are_refused(body, says):
    with pytest.raises(ConfigError) as caught:
        FileOptions.parse({"root": "x", **body})
    assert says in str(caught.value)


def test_importing_the_package_imports_neither_torch_nor_files():
    code = (
        "import sys, vllm_scope; vllm_scope.open; "
        "print([m for m in ('torch', 'vllm', 'vllm_scope.files', 'fsspec') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_local_files_need_no_optional_package(tmp_path):
    code = f"""
import sys
from concurrent.futures import ThreadPoolExecutor, wait
for name in ("fsspec", "pyarrow", "backports"):
    sys.modules[name] = None
import numpy as np, torch, vllm_scope
from vllm_scope.files import FileOptions, RequestRecord, open_writer
with open_writer(FileOptions.parse({{"root": {str(tmp_path)!r}}})) as writer:
    request = writer.begin()
    request.write("embed", 0, np.arange(2), torch.ones(2, 3))
    request.finish(RequestRecord("0", [1, 2], [], "m", 2, 2))
print(vllm_scope.open({str(tmp_path)!r})[0]["embed", 0].sum().item())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "6.0"


def test_a_manifest_is_plain_json(tmp_path):
    with writer_of(tmp_path) as writer:
        manifest, _ = put(writer, 1, tag="ü", name="n")
    assert isinstance(manifest, IndexedRequest)
    assert json.loads(json.dumps(manifest.to_json()))["tag"] == "ü"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "topk8", "codec_options": {"k": "64"}}, "k"),
        ({"codec": "topk8", "codec_options": {"k": -5}}, "k"),
        ({"codec": "rp8", "codec_options": {"seed": -1}}, "seed"),
        ({"codec": "zstd", "codec_options": {"level": 99}, "layout": "per_request"}, "level"),
    ],
)
def test_a_codecs_values_are_refused_before_any_row_comes(options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        FileOptions.parse({"root": str(tmp_path), **options})


@pytest.mark.parametrize("codec", ["rp8", "topk8"])
@pytest.mark.parametrize("k", [1, 64, 512, 2048])
def test_a_codecs_values_that_fit_some_width_are_accepted(codec, k, tmp_path):
    options = {"root": str(tmp_path), "codec": codec, "codec_options": {"k": k}}
    assert FileOptions.parse(options).codec_options == {"k": k}


def test_a_missing_package_is_reported_before_any_row_comes(monkeypatch, tmp_path):
    def missing():
        raise ConfigError("codec 'zstd' needs the package backports.zstd")

    monkeypatch.setattr("vllm_scope.files.writer.zstd_library", missing)
    with pytest.raises(ConfigError, match="needs the package"):
        writer_of(tmp_path, codec="zstd", layout="per_request")


def test_fsync_is_refused_for_urls():
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigError, match="URLs have no fsync"):
        writer_of("memory://capture", fsync=True)


@pytest.mark.parametrize("layout", ["per_request", "npz"])
def test_a_replaced_file_is_not_read_with_its_old_index(layout, tmp_path):
    """Its manifest and tokens are those of before."""
    for seed in (1, 2):
        with writer_of(tmp_path, layout=layout) as writer:
            _, rows = put(writer, seed, name="same", num_output=4 + seed)
        if seed == 1:
            (request,) = vllm_scope.open(tmp_path)
    with pytest.raises(FileError, match="was replaced after it was listed; open the folder again"):
        request[STREAMS[0]]
    (request,) = vllm_scope.open(tmp_path)
    assert torch.equal(request[STREAMS[0]], rows[STREAMS[0]])


def test_a_shuffled_pool_is_bounded_where_runs_cannot_be_cut(monkeypatch, tmp_path):
    pytest.importorskip("backports.zstd")
    monkeypatch.setattr("vllm_scope.files.iterate.RUN_ROWS", 4)
    monkeypatch.setattr("vllm_scope.files.iterate.POOL_RUNS", 5)
    with writer_of(tmp_path, codec="zstd", layout="per_request") as writer:
        for seed in range(12):
            put(writer, seed, [("embed", 0)], name=f"r{seed}")
    sizes = []

    class Counted(iterate._Pool):
        def __init__(self, *args):
            super().__init__(*args)
            sizes.append(sum(map(len, self.kept)))

    monkeypatch.setattr(iterate, "_Pool", Counted)
    capture = vllm_scope.open(tmp_path)
    total = sum(len(batch) for batch in capture.iter_rows("embed", 0, 8, shuffle=True))
    assert total == 12 * 8
    assert max(sizes) <= 20


def test_shuffled_rows_are_those_of_more_files_than_stay_mapped(monkeypatch, tmp_path):
    monkeypatch.setattr("vllm_scope.files.iterate.RUN_ROWS", 3)
    monkeypatch.setattr("vllm_scope.files.iterate.POOL_RUNS", 5)
    monkeypatch.setattr("vllm_scope.files.iterate._MOST_MAPPED", 2)
    with writer_of(tmp_path, layout="per_request") as writer:
        expected = [put(writer, seed, name=f"r{seed}")[1][STREAMS[1]] for seed in range(9)]
    found = list(vllm_scope.open(tmp_path).iter_rows(*STREAMS[1], 7, shuffle=True, seed=3))
    assert sorted(torch.cat(found).tolist()) == sorted(torch.cat(expected).tolist())


@pytest.mark.parametrize("width", [12, 5000])
def test_rows_that_are_kept_as_they_are_come_back(width, tmp_path):
    """One layer's rows among those of three do not lie one behind another."""
    options = FileOptions.parse({"root": str(tmp_path)})
    table = rows_of(3, 3 * 400, width).view(400, 3, width)
    with Writer(options, make_publisher(str(tmp_path), fsync=False), copies=False) as writer:
        request = writer.begin()
        for layer in range(3):
            request.write("resid_post", layer, np.arange(400), table[:, layer])
        request.finish(record_of(400, 1, 3, name="a"))
    found = vllm_scope.open(tmp_path)["a"]
    for layer in range(3):
        assert torch.equal(found["resid_post", layer], table[:, layer])


def test_few_rows_do_not_keep_the_memory_of_many(tmp_path):
    """A read of one position lies in memory for more of them."""
    options = FileOptions.parse({"root": str(tmp_path)})
    table = torch.zeros(64, 3, 12)
    with Writer(options, make_publisher(str(tmp_path), fsync=False), copies=False) as writer:
        for count, kept in ((1, False), (31, False), (32, True), (64, True)):
            request = writer.begin()
            request.write("resid_post", 1, np.arange(count), table[:count, 1])
            (rows,) = request.streams(count)["resid_post", 1].blocks
            assert (rows.untyped_storage().nbytes() == table.nbytes) == kept
            assert torch.equal(rows, table[:count, 1])


def test_rows_for_a_probe_come_from_files_and_not_from_a_partial_request(tmp_path):
    with writer_of(tmp_path) as writer:
        first, second = (put(writer, seed, name=f"r{seed}")[1] for seed in (1, 2))
        put(writer, 3, name="lost", expected=30)
    capture = vllm_scope.open(tmp_path)
    whole = [capture["r1"], capture["r2"]]
    stream = ("resid_post", 10)
    pooled = pooled_rows(whole, [stream], "mean")[stream]
    mean = np.stack([rows[stream].float().numpy().mean(0) for rows in (first, second)])
    np.testing.assert_allclose(pooled.numpy(), mean, rtol=1e-6, atol=1e-6)
    rows, truth = token_rows(whole, [1, 0], stream)
    assert torch.equal(rows, torch.cat([first[stream], second[stream]]).float())
    assert truth.tolist() == [True] * 8 + [False] * 8
    cached = ActivationCache(whole)["blocks.10.hook_resid_post"]
    assert torch.equal(cached, torch.stack([first[stream], second[stream]]))
    with pytest.raises(SpecError, match=r"results\[1\] is 'partial': some of its rows are missing"):
        pooled_rows([whole[0], capture["lost"]])
