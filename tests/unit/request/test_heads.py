"""Codecs of reads: what may be named, and what it is on an engine."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.unit.programs import all_programs
from vllm_scope import Read, Spec, SpecError
from vllm_scope.codecs import CODECS, codec_from, make_codec
from vllm_scope.codecs.packed import EncodedRows, Packing, encoding_of, packing_of
from vllm_scope.codecs.rp8 import MAX_PROJECTION
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.program.operations import Program, build_program
from vllm_scope.request.heads import READ_CODECS, Bank, CodecChoice, Scored, Told, known_head
from vllm_scope.request.sites import Sites, point_of
from vllm_scope.request.spec import scope

SITES = Sites(3, 64, "bfloat16", tuple(range(7)))
OPTIONS = {"rp8": {"k": 16, "seed": 5}, "topk8": {"k": 4}}


def resolved(*reads):
    return Spec(tuple(reads)).resolve(SITES).reads


def test_reads_may_name_every_codec_whose_rows_can_be_told_apart():
    shared = {"codec", "hidden_size", "dtype"}
    assert {
        name: tuple(option for option in kind.model_fields if option not in shared)
        for name, kind in CODECS.items()
        if kind.rowwise
    } == READ_CODECS


@pytest.mark.parametrize(
    ("codec", "as_json"),
    [
        pytest.param(None, None, id="left-out"),
        pytest.param("none", None, id="none"),
        pytest.param("int8", "int8", id="name"),
        pytest.param({"name": "int8"}, "int8", id="no-options"),
        pytest.param({"name": "rp8", "k": 16}, {"name": "rp8", "k": 16}, id="options"),
        pytest.param(
            {"name": "rp8", "seed": np.int64(3), "k": torch.tensor(9)},
            {"name": "rp8", "k": 9, "seed": 3}, id="numbers-of-numpy-and-torch",
        ),
    ],
)  # fmt: skip
def test_a_codec_comes_back_from_json(codec, as_json):
    read = Read("resid_post", layers=[1], codec=codec)
    body = json.loads(scope(read)["scope"])["reads"][0]
    assert body.get("codec") == as_json
    (again,) = Spec.from_json(scope(read)["scope"]).reads
    assert again == read
    assert hash(again) == hash(read)


@pytest.mark.parametrize("name", READ_CODECS)
@pytest.mark.parametrize("hidden_size", [1, 33, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_are_as_large_as_a_codec_says_and_come_back_from_its_bytes(name, hidden_size, dtype):
    options = {} if hidden_size == 1 else OPTIONS.get(name, {})
    codec = make_codec(name, hidden_size, dtype, **options)
    rows = torch.randn(5, hidden_size).to(dtype)
    parts = codec.encode(rows)
    assert {part.name: (part.dtype, part.size) for part in codec.row_parts} == {
        part: (tensor.dtype, tensor.shape[1]) for part, tensor in parts.items()
    }
    assert tuple(part.name for part in codec.row_parts) == codec.part_names
    packing = Packing(codec)
    data = packing.pack(rows)
    assert data.shape == (5, packing.num_slots * SLOT_BYTES)
    assert packing.num_bytes == sum(tensor[0].nbytes for tensor in parts.values())
    assert (data[:, packing.num_bytes :] == 0).all()
    found = EncodedRows(codec, data)[1:4]
    for part, tensor in parts.items():
        assert torch.equal(
            found.parts[part].contiguous().view(torch.uint8), tensor[1:4].view(torch.uint8)
        )
    same = {part: tensor[1:4] for part, tensor in parts.items()}
    assert torch.equal(found.decode(), codec.decode(same, 3))
    assert (len(found), found.shape, found.dtype) == (3, (3, hidden_size), dtype)
    again = pickle.loads(pickle.dumps(found.kept()))
    assert again.codec == codec
    assert torch.equal(again.data, data[1:4])


def test_an_encoding_is_the_codec_with_everything_that_was_left_open():
    (read,) = resolved(Read("resid_post", layers=[1], codec="rp8"))
    expected = make_codec("rp8", 64, torch.bfloat16, k=32, seed=0)
    assert codec_from(read.encoding.metadata) == expected
    assert packing_of(read.encoding).codec == expected
    assert read.encoding.row_bytes == 32 + 8
    spelt = resolved(Read("resid_post", layers=[1], codec={"name": "rp8", "k": 32}))[0]
    assert spelt.encoding == read.encoding
    assert resolved(Read("resid_post", layers=[1]))[0].encoding is None


def test_a_projection_that_takes_a_worker_long_is_refused():
    choice = CodecChoice.parse({"name": "rp8", "k": 513}, "codec")
    with pytest.raises(SpecError, match=r"reads\[0\].codec.*k is 513; .* at most 512"):
        encoding_of(choice, MAX_PROJECTION // 512, "bfloat16", "reads[0].codec")


def test_destinations_may_have_unlike_codecs_of_a_stream_and_sides_of_an_edit_too():
    resolved(
        Read("resid_post", layers=[1], codec="int8"),
        Read("resid_post", layers=[2]),
        Read("resid_post", layers=[1], codec="fp8", when="before"),
        Read("resid_post", layers=[1], to="filesystem"),
        Read("resid_post", layers=[1], tokens=[3], codec="int8"),
    )
    with pytest.raises(SpecError, match=r"reads\[1\].codec .* as rp8 and as rp8"):
        resolved(
            Read("resid_post", layers=[1], codec={"name": "rp8", "k": 3}),
            Read("resid_post", layers=[1], codec={"name": "rp8", "k": 4}),
        )


def test_a_layout_has_its_place_in_the_arena_and_behind_it():
    a, b, c = point_of(0, 0), point_of(2, 0), point_of(2, 1)
    int8 = resolved(Read("embed", codec="int8"))[0].encoding
    fp8 = resolved(Read("embed", codec="fp8"))[0].encoding
    probes = Bank.of([b"one", b"other"], 3)
    layout = Layout((b,), ((probes, (b, c)), (fp8, (a, c)), (int8, (b,))))
    assert layout.arena == Layout((a, b, c))
    widths = Widths((8 * 16,))
    # What probes make of a row, three float32, takes a slot.
    assert (layout.arena.slots(widths), layout.slots(widths)) == (24, 8 + 2 * 1 + 3 * 5)
    assert [x[2:] for x in layout.encoded_at(widths)] == [(8, 1), (10, 5), (20, 5)]
    assert layout.at(0) == Layout((), ((fp8, (a,)),))
    assert layout.at(2) == Layout((b,), ((probes, (b, c)), (fp8, (c,)), (int8, (b,))))
    plain = Layout((a,))
    assert plain.arena is plain


def test_a_program_reads_each_point_once_however_many_codecs_it_has():
    reads = resolved(
        Read("resid_post", layers=[0, 1], codec="int8"), Read("resid_pre", layers=[1]),
        Read("resid_post", layers=[1], to="filesystem", codec="fp8"),
    )  # fmt: skip
    spec = Spec((
        Read("resid_post", layers=[0, 1], codec="int8"), Read("resid_pre", layers=[1]),
        Read("resid_post", layers=[1], to="filesystem", codec="fp8"),
    ))  # fmt: skip
    ids = np.ones(3, np.int64)
    program = RequestProgram.compile(
        spec.resolve(SITES), SITES, frozenset(SITES.boundaries), 3, ids
    )
    (one,) = all_programs(program, 5)
    first, second = point_of(2, 1), point_of(4, 1)
    encoded = {reads[0].encoding: (first, second), reads[2].encoding: (second,)}
    assert one.layout.points == (first,)
    assert dict(one.layout.encoded) == encoded
    assert one.layout.also == ((point_of(2, 2), first),)
    assert one.taps == Program.reading((first, second)).taps
    assert one != build_program((first,), {}, one.layout.encoded[:1])


def test_a_head_is_known_in_another_process_by_its_text_and_size():
    encoding = resolved(Read("embed", codec="int8"))[0].encoding
    banks = (kind.of([b"one", b"other"], 3) for kind in (Bank, Told, Scored))
    for head in (encoding, *banks):
        again = known_head(head.text, head.row_bytes)
        assert (again, type(again)) == (head, type(head))


def test_a_bank_is_its_nets_in_their_order():
    assert Bank.of([b"one", b"other"], 3) == Bank.of([b"one", b"other"], 3)
    assert Bank.of([b"one", b"other"], 3) != Bank.of([b"other", b"one"], 3)
    assert Bank.of([b"one"], 3) != Bank.of([b"one", b"one"], 3)
    assert Bank.of([b"one"], 3).row_bytes == 12
    # A front-end has no weights of modules; it knows a bank by its place and size.
    assert Bank.of([b"one"], 3).nameless == Bank.of([b"other"], 3).nameless
    assert Bank.of([b"one"], 3).nameless != Bank.of([b"one"], 4).nameless


def test_naming_a_codec_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from vllm_scope import Read, scope; "
        "print(scope(Read('embed', codec={'name': 'rp8', 'k': 3}))['scope'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["reads"][0]["codec"] == {"name": "rp8", "k": 3}
