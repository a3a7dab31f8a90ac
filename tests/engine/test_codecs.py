"""Rows that are encoded on the device decode to what their codec makes of the raw rows.

The raw rows are of the same run: `resid_pre` of layer k + 1 is `resid_post` of layer k,
and `resid_pre` of layer 0 is `embed`, so one request reads both.
"""

from __future__ import annotations

import json
import pickle

import pytest
import torch

import vllm_scope
from tests.asking import counters, params, prompts, run
from tests.conftest import local_engine, preempted_in
from vllm_scope import Add, Probe, Read, SpecError, scope
from vllm_scope.codecs import make_codec
from vllm_scope.codecs.packed import Packing
from vllm_scope.files import FileOptions, RequestRecord, open_writer

CODECS = {
    "fp16": {},
    "fp8": {},
    "int8": {},
    "full8": {},
    "rp8": {"k": 48, "seed": 3},
    "topk8": {"k": 16},
}
#: What is read with a codec, and the same rows by another name.
SAME = {("embed", 0): ("resid_pre", 0)} | {
    ("resid_post", k): ("resid_pre", k + 1) for k in range(2)
}
HIDDEN_SIZE = 128


def named(name):
    return {"name": name, **CODECS[name]} if CODECS[name] else name


def reads(codec, tokens="all", **options):
    return [
        Read("resid_post", layers=[0, 1], tokens=tokens, codec=codec, **options),
        Read("embed", tokens=tokens, codec=codec, **options),
    ]


def raw(tokens="all"):
    return Read("resid_pre", tokens=tokens)


def codec_of(name, dtype=torch.float32):
    return make_codec(name, HIDDEN_SIZE, dtype, **CODECS[name])


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def check_parts(found, codec, rows):
    """The parts are what the codec makes of the rows, bit for bit; a projection's sums
    depend on how many rows are multiplied at once, so a value may fall to the next step."""
    expected = codec.encode(rows)
    assert list(found) == list(expected)
    for name, part in expected.items():
        if codec.codec == "rp8":
            assert (found[name].float() - part.float()).abs().max() <= (1 if name == "q" else 1e-3)
        else:
            assert same_bits(found[name], part), name


def check(result, name, num_rows, dtype=torch.float32):
    assert result.status == "complete"
    assert (result.expected, result.delivered, result.dropped) == (6 * num_rows, 6 * num_rows, 0)
    codec = codec_of(name, dtype)
    for stream, other in SAME.items():
        rows, encoded = result[other], result.encoded(*stream)
        assert result.positions(*stream).tolist() == result.positions(*other).tolist()
        assert len(rows) == len(encoded) == num_rows
        assert encoded.codec == codec
        check_parts(encoded.parts, codec, rows)
        assert same_bits(result[stream], codec.decode(encoded.parts, num_rows))
        assert result[stream].dtype == dtype
        assert result.encoded(*other) is None


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def llm(llama, root):
    """Chunks of 32 tokens."""
    files = {"root": str(root), "layout": "per_request"}
    with local_engine(
        llama, dtype="float32", max_num_batched_tokens=32, max_num_seqs=16, block_size=32,
        additional_config={"scope": {"sinks": {"filesystem": files}}},
    ) as llm:  # fmt: skip
        yield llm


@pytest.mark.parametrize("name", CODECS)
def test_rows_in_chunks_decode_to_what_the_codec_makes_of_the_raw_rows(name, llm):
    (output,) = run(llm, [range(5, 105)], params(scope(*reads(named(name)), raw())))
    check(output.scope, name, 111)


def test_a_batch_of_all_codecs_and_none_and_plain_requests(llm):
    names = [*CODECS, None, "plain"] * 3
    specs = [
        None if name == "plain" else scope(*(reads(named(name)) if name else ()), raw())
        for name in names
    ]
    ids = [range(i, i + 4 + 5 * (i % 7)) for i in range(len(names))]
    outputs = run(llm, ids, [params(spec, max_tokens=3 + i % 5) for i, spec in enumerate(specs)])
    plain = run(llm, ids, [params(max_tokens=3 + i % 5) for i in range(len(names))])
    for i, (name, output) in enumerate(zip(names, outputs, strict=True)):
        assert output.outputs[0].token_ids == plain[i].outputs[0].token_ids
        if name is None:
            assert output.scope.status == "complete"
            assert output.scope.delivered == 3 * (len(ids[i]) + 2 + i % 5)
        elif name != "plain":
            check(output.scope, name, len(ids[i]) + 2 + i % 5)


def test_streams_of_one_request_have_codecs_of_their_own(llm):
    names = {0: "int8", 1: "topk8"}
    spec = scope(
        *(Read("resid_post", layers=[k], codec=named(name)) for k, name in names.items()),
        Read("resid_post", layers=[2], tokens=[0, 7], codec="fp16"), raw(),
    )  # fmt: skip
    (output,) = run(llm, [range(40)], params(spec))
    result = output.scope
    assert result.status == "complete"
    for k, name in names.items():
        check_parts(
            result.encoded("resid_post", k).parts, codec_of(name), result["resid_pre", k + 1]
        )
    assert result.positions("resid_post", 2).tolist() == [0, 7]
    assert result.encoded("resid_post", 2).codec.codec == "fp16"


@pytest.mark.parametrize("tokens", ["generated", "last", [0, -1, 25], slice(18, 30, 4)])
def test_selectors_pick_their_tokens(tokens, llm):
    (output,) = run(llm, [range(20)], params(scope(*reads("int8", tokens), raw())))
    result, codec = output.scope, codec_of("int8")
    assert result.status == "complete"
    for stream, other in SAME.items():
        some = result.positions(*stream)
        expected = result[other][some]
        assert 0 < len(some) < 20
        assert same_bits(result[stream], codec.decode(codec.encode(expected), len(some)))


def test_every_completion_of_n_has_its_own_rows(llm):
    spec = scope(*reads("full8"), raw())
    (output,) = run(llm, [range(60, 100)], params(spec, n=3, temperature=1.0, max_tokens=10))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    for completion in output.outputs:
        check(completion.scope, "full8", 49)


def test_rows_before_an_edit_and_after_it_and_scores(llm):
    """Scores lie between plain rows and encoded ones."""
    vector = torch.linspace(-3, 3, HIDDEN_SIZE)
    spec = scope(
        Add(vector, layer=0, tokens="generated"),
        Read("resid_post", layers=[0], when="before", codec="int8"),
        Read("resid_post", layers=[0], codec="fp8"),
        *(Probe(vector, layer=0, name=f"p{i}") for i in range(5)),
        Read("resid_pre", layers=[1]),
    )
    (output,) = run(llm, [range(20)], params(spec))
    result = output.scope
    assert result.status == "complete"
    check_parts(
        result.encoded("resid_post", 0, "after").parts, codec_of("fp8"), result["resid_pre", 1]
    )
    before, after = result["resid_post", 0, "before"], result["resid_pre", 1]
    step = before.abs().amax(1, keepdim=True) / 127
    assert ((before - after)[:20].abs() <= step[:20]).all()
    assert (((before + vector) - after)[20:].abs() <= step[20:]).all()
    for i in range(5):
        torch.testing.assert_close(result.scores[f"p{i}"], after @ vector, rtol=1e-4, atol=1e-3)


def road_bytes(llm, spec):
    before = counters(llm)["sinks"]["memory"]["bytes"]
    (output,) = run(llm, [range(100)], params(spec))
    assert output.scope.status == "complete"
    return counters(llm)["sinks"]["memory"]["bytes"] - before


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        pytest.param("fp16", 2 * 128, id="fp16"),
        pytest.param("fp8", 128 + 4, id="fp8"),
        pytest.param("int8", 128 + 4, id="int8"),
        pytest.param("full8", 128 + 8, id="full8"),
        pytest.param("rp8", 48 + 8, id="rp8"),
        pytest.param("topk8", 16 * 5 + 8, id="topk8"),
    ],
)
def test_what_travels_is_what_the_codec_leaves(name, row_bytes, llm):
    num_rows = 3 * 111
    assert road_bytes(llm, scope(Read("resid_post"))) == num_rows * 512
    spec = scope(Read("resid_post", codec=named(name)))
    assert road_bytes(llm, spec) == num_rows * -(-row_bytes // 16) * 16


@pytest.mark.parametrize("name", CODECS)
def test_files_are_those_that_encoding_on_the_host_makes(name, llm, root, tmp_path):
    spec = scope(*reads(named(name), to="filesystem", name=f"as-{name}"), raw())
    before = counters(llm)["sinks"]["filesystem"]["bytes"]
    (output,) = run(llm, [range(50)], params(spec))
    codec, result = codec_of(name), output.scope
    manifest = result.manifests["filesystem"]
    assert (manifest.status, manifest.delivered) == ("ok", 3 * 61)
    assert {s["codec"]["codec"] for s in manifest.streams.values()} == {name}
    options = {"root": str(tmp_path), "layout": "per_request", "codec": name}
    with open_writer(FileOptions.parse(options | {"codec_options": CODECS[name]})) as writer:
        request = writer.begin()
        for stream, other in SAME.items():
            request.write(*stream, result.positions(*other).numpy(), result[other])
        ids = output.prompt_token_ids, output.outputs[0].token_ids
        request.finish(RequestRecord("r", *ids, "m", 3 * 61, 3 * 61, name="as"))
    found, made = vllm_scope.open(root)[f"as-{name}"], vllm_scope.open(tmp_path)["as"]
    assert found.keys() == made.keys() == sorted(SAME)
    for stream, other in SAME.items():
        one, two = found.stored(stream), made.stored(stream)
        assert one.codec == two.codec == codec
        check_parts(one._parts(), codec, result[other])
        assert one.positions.tolist() == two.positions.tolist()
        if name != "rp8":
            assert same_bits(found[stream], made[stream])
    written = counters(llm)["sinks"]["filesystem"]["bytes"] - before
    assert written == 3 * 61 * Packing(codec).num_slots * 16


def test_one_stream_goes_to_memory_and_to_files_under_unlike_codecs(llm, root):
    to_files = reads("int8", to="filesystem", name="both")
    (output,) = run(llm, [range(50)], params(scope(*reads("topk8"), raw(), *to_files)))
    result, codec = output.scope, make_codec("topk8", HIDDEN_SIZE, torch.float32)
    request = vllm_scope.open(root)["both"]
    for stream, other in SAME.items():
        check_parts(result.encoded(*stream).parts, codec, result[other])
        check_parts(request.stored(stream)._parts(), codec_of("int8"), result[other])


def test_results_with_codecs_can_be_pickled(llm):
    (output,) = run(llm, [range(50)], params(scope(*reads("int8"), raw())))
    check(pickle.loads(pickle.dumps(output.scope)), "int8", 61)


def test_projections_are_within_a_step_of_the_rows_projections(llm):
    from vllm_scope.codecs.rp8 import projection

    (output,) = run(llm, [range(50)], params(scope(*reads(named("rp8")), raw())))
    encoded = output.scope.encoded("resid_post", 1)
    found = encoded.codec.projections(encoded.parts)
    matrix = projection(HIDDEN_SIZE, 48, 3, torch.device("cpu"))
    error = (found - output.scope["resid_pre", 2] @ matrix).abs()
    assert (error <= 0.51 * encoded.parts["scale"] + 1e-5).all()


BAD = [
    pytest.param("int9", "'int9'; rows can be read as none, fp16, fp8, int8", id="name"),
    pytest.param("zstd", "'zstd', a codec for files only", id="zstd"),
    pytest.param({"name": "rp8", "size": 3}, "has 'size'; codec 'rp8' takes k, seed", id="option"),
    pytest.param({"name": "int8", "k": 3}, "'int8' takes no options", id="no-options"),
    pytest.param({"name": "topk8", "k": "3"}, "k is '3'; it must be a whole number", id="type"),
    pytest.param({"name": "topk8", "k": True}, "k is True; it must be a whole number", id="bool"),
    pytest.param({"k": 3}, "it must be a name, or an object with a name", id="no-name"),
    pytest.param(8, "is 8; it must be a name, or an object", id="number"),
    pytest.param({"name": "topk8", "k": 129}, "k is 129; a row has 128 values", id="too-large"),
    pytest.param({"name": "rp8", "k": 0}, "k is 0", id="too-small"),
    pytest.param({"name": "rp8", "k": 1 << 70}, "whole number of at most 64 bits", id="huge"),
    pytest.param({"name": "rp8", "seed": -1}, "seed is -1", id="seed"),
]


@pytest.mark.parametrize(("codec", "sentence"), BAD)
def test_a_bad_codec_is_refused_at_the_door_and_its_neighbours_go_on(codec, sentence, llm):
    body = {"reads": [{"site": "embed"}, {"site": "resid_post", "codec": codec}]}
    spec = {"scope": json.dumps(body)}
    with pytest.raises(SpecError, match=r"reads\[1\]\.codec") as caught:
        run(llm, [range(5)], params(spec))
    assert sentence in str(caught.value)
    (output,) = run(llm, [range(5)], params(scope(*reads("int8"), raw())))
    check(output.scope, "int8", 16)


def test_two_codecs_of_one_stream_at_one_destination_are_refused(llm):
    spec = scope(
        Read("resid_post", layers=[0, 1], codec="int8"),
        Read("resid_post", layers=[1, 2], tokens="last"),
    )
    with pytest.raises(SpecError, match=r"reads\[1\].*'resid_post' 1 .* int8 and as none"):
        run(llm, [range(5)], params(spec))


def test_more_projections_than_a_worker_holds_fail_their_own_request_and_leave_its_edits(llm):
    codecs = [{"name": "rp8", "k": 8, "seed": seed} for seed in range(10)]
    edit = Add(torch.linspace(-3, 3, HIDDEN_SIZE), layer=0)
    specs = [params(scope(edit, *reads(codec), raw())) for codec in codecs]
    outputs = llm.generate(prompts(*[range(20)] * 10), specs, use_tqdm=False)
    (edited,) = run(llm, [range(20)], params(scope(edit)))
    assert {tuple(o.outputs[0].token_ids) for o in outputs} == {tuple(edited.outputs[0].token_ids)}
    states = [output.scope.status for output in outputs]
    assert states.count("complete") == 8
    assert states.count("failed") == 2
    reasons = {output.scope.error for output in outputs if output.scope.error}
    assert len(reasons) == 1
    assert "at most 8 are possible at a time" in reasons.pop()
    (output,) = run(llm, [range(20)], params(scope(*reads(codecs[9]), raw())))
    assert output.scope.status == "complete"


@pytest.mark.long
def test_preemption_and_recompute(llama):
    """A KV cache of 9 blocks cannot hold four growing requests."""
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=9, block_size=32,
        max_model_len=128, max_num_seqs=4,
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        ids = [list(range(i, i + 20)) for i in (10, 50, 90, 130)]
        names = ["int8", "topk8", "fp8", "full8"]
        specs = [params(scope(*reads(named(n)), raw()), max_tokens=80) for n in names]
        outputs = run(llm, ids, specs)
    assert preempted, "the cache was large enough; the test shows nothing"
    for name, output in zip(names, outputs, strict=True):
        check(output.scope, name, 99)


def test_steps_larger_than_the_arena_are_encoded_tap_by_tap(llama):
    """0.4 MiB holds one tap of a 512-token step, not four; in bf16, of two bytes a value."""
    with local_engine(
        llama, dtype="bfloat16", max_num_batched_tokens=512,
        additional_config={"scope": {"arena_mib": 0.2}},
    ) as llm:  # fmt: skip
        names = ["int8", "rp8", "topk8"]
        specs = [params(scope(*reads(named(name)), raw())) for name in names]
        outputs = run(llm, [range(400), range(300, 350), range(5, 9)], specs)
        # One tap of a step holds 25 slots a token: a row of 16 and one of int8, of 9.
        with pytest.raises(SpecError, match="32 slots a token at one tap, of 25"):
            run(llm, [[5, 6]], params(scope(*reads("fp16"), raw())))
    for name, output, size in zip(names, outputs, (400, 50, 4), strict=True):
        check(output.scope, name, size + 11, torch.bfloat16)


def test_global_sinks_may_read_with_a_codec(llama, tmp_path):
    sink = {"root": str(tmp_path), "layout": "sharded"}
    sink["reads"] = [{"site": "resid_post", "layers": [0, 1], "codec": "int8"}]
    with local_engine(
        llama, dtype="float32", additional_config={"scope": {"global_sinks": {"filesystem": sink}}}
    ) as llm:
        specs = [scope(raw()), None, scope(*reads(named("topk8")), raw())]
        outputs = run(llm, [range(20), range(30, 50), range(40)], [params(s) for s in specs])
        for answers in llm.collective_rpc("scope_flush"):
            assert not any(answers.values()), answers
    found = {tuple(request.prompt_ids.tolist()): request for request in vllm_scope.open(tmp_path)}
    assert len(found) == 3
    for output in outputs:
        request = found[tuple(output.prompt_token_ids)]
        assert (request.status, request.manifest.delivered) == (
            "ok",
            2 * (len(output.prompt_token_ids) + 11),
        )
        for stream in (("resid_post", 0), ("resid_post", 1)):
            if output.scope is not None:
                rows = output.scope[SAME[stream]]
                check_parts(request.stored(stream)._parts(), codec_of("int8"), rows)
    check(outputs[2].scope, "topk8", 51)
