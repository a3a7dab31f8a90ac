"""The steering fork's keys give what the native edits and reads give."""

from __future__ import annotations

import base64
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import vllm_scope
from tests.checkpoints import reference
from tests.conftest import local_engine
from tests.engine.test_edits import V, check, direction
from tests.unit.recording import Other, Whole, install
from vllm_scope import Add, Clamp, Read, ScopeError, SpecError, scope
from vllm_scope.compat.steering_http import (
    FilesystemCaptureRequest,
    load_modules,
    read_request,
)
from vllm_scope.compat.steering_http.engine import LLM, SamplingParams, sink_of
from vllm_scope.config import ScopeConfig
from vllm_scope.vectors import load_vectors

PROMPT = list(range(30, 70))
W, D = direction(5, 2.0), direction(2)


def packed(*rows, **more):
    """A hook's vectors with base64, as the fork's clients send them."""
    data = base64.b64encode(np.stack([row.numpy() for row in rows]).tobytes()).decode()
    return {"dtype": "float32", "shape": [len(rows), 128], "data": data, **more}


MODULE = {
    "vectors": {"post_block": {"0": V.tolist(), "2": {"vector": W.tolist(), "scale": 2.0}}},
    "prefill_vectors": {"pre_attn": packed(D, layer_indices=[1])},
    "decode_vectors": {"post_block": {"0": W.tolist()}},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def llm(checkpoints, root):
    path = root / "start.json"
    path.write_text(json.dumps(MODULE))
    consumers = [
        {"name": "filesystem", "params": {"root": str(root), "default_layout": "per_file"}},
        {"name": "mine"},
        {"name": "broken", "params": {"fail": "write"}},
    ]
    with pytest.MonkeyPatch.context() as patch:
        install(patch, {"mine": Whole, "broken": Other})
        with local_engine(
            checkpoints("llama"), LLM, dtype="float32", enable_steering=True,
            max_steering_configs=4, capture_consumers=consumers,
            additional_config={"scope": {"modules": {"at-start": str(path)}}},
        ) as llm:  # fmt: skip
            yield llm


def run(llm, *extras):
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=3,
            extra_args=extra,
        )
        for extra in extras
    ]  # fmt: skip
    return llm.generate([{"prompt_token_ids": PROMPT}] * len(extras), params, use_tqdm=False)


READ = Read("resid_post")
FAR = 3.4e38
#: The fork's keys, and the native edits that mean the same.
STEERED = {
    "base": ({"steering_vectors": {"post_block": {1: V.tolist()}}}, [Add(V, layer=1)]),
    "scaled": (
        {"steering_vectors": {"post_block": {1: {"vector": V.tolist(), "scale": 0.5}}}},
        [Add(0.5 * V, layer=1)],
    ),
    "prefill": (
        {"prefill_steering_vectors": {"post_block": {1: V}}}, [Add(V, layer=1, tokens="prompt")],
    ),
    "decode": (
        {"decode_steering_vectors": {"post_block": {"0": V, "2": W}}},
        [Add(torch.stack([V, W]), layers=[0, 2], tokens="generated")],
    ),
    "before-attention": (
        {"steering_vectors": {"pre_attn": {2: V}}}, [Add(V, site="resid_pre", layer=2)],
    ),
    "after-attention": (
        {"steering_vectors": {"post_attn": {0: V}}}, [Add(V, site="resid_mid", layer=0)],
    ),
    "packed": (
        {
            "steering_vectors": json.dumps(
                {"post_block": packed(V, W, layer_indices=[2, 0], scales=[1.0, 0.5])}
            )
        },
        [Add(torch.stack([V, 0.5 * W]), layers=[2, 0])],
    ),
    "clamps": (
        {
            "steering_clamps": {
                "post_block": {
                    1: [{"vector": D, "min": -0.1, "max": 0.2}, {"vector": W, "value": 0}]
                },
                "pre_attn": {"2": [{"vector": D.tolist(), "max": -0.5, "strength": 0.5}]},
            }
        },
        [
            Clamp(D, lo=-0.1, hi=0.2, layer=1), Clamp(W, lo=0, hi=0, layer=1),
            Clamp(D, lo=-FAR, hi=-0.5, site="resid_pre", layer=2, strength=0.5),
        ],
    ),
    "packed-clamps-of-tiers": (
        {
            "prefill_steering_clamps": {
                "post_block": packed(
                    D, W, layer_indices=[1, 1], bounds=[[None, 0.1], [-0.2, 0.2]],
                    strengths=[1.0, 0.5],
                )
            },
            "decode_steering_clamps": {"post_block": {0: [{"vector": W, "min": 1.0}]}},
        },
        [
            Clamp(D, lo=-FAR, hi=0.1, layer=1, tokens="prompt"),
            Clamp(W, lo=-0.2, hi=0.2, layer=1, tokens="prompt", strength=0.5),
            Clamp(W, lo=1.0, hi=FAR, layer=0, tokens="generated"),
        ],
    ),
    "clamps-come-after-all-vectors": (
        {
            "steering_clamps": {"post_block": {1: [{"vector": D, "value": 0.5}]}},
            "decode_steering_vectors": {"post_block": {1: D}},
            "steering_vectors": {"post_block": {1: V}},
        },
        [Add(V, layer=1), Add(D, layer=1, tokens="generated"), Clamp(D, lo=0.5, hi=0.5, layer=1)],
    ),
    "tiers-add-up": (
        {
            "steering_vectors": {"post_block": {1: V.tolist()}},
            "prefill_steering_vectors": json.dumps({"post_block": {1: W.tolist()}}),
            "decode_steering_vectors": {"post_block": {1: D.tolist()}},
        },
        [
            Add(V, layer=1), Add(W, layer=1, tokens="prompt"),
            Add(D, layer=1, tokens="generated"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STEERED)
def test_steering_vectors_equal_native_adds(case, llm):
    extra, edits = STEERED[case]
    face, native, plain = run(llm, extra | scope(READ), scope(*edits, READ), scope(READ))
    for layer in range(3):
        assert torch.equal(face.scope["resid_post", layer], native.scope["resid_post", layer])
    assert face.outputs[0].logprobs == native.outputs[0].logprobs
    assert face.outputs[0].logprobs != plain.outputs[0].logprobs


def test_the_forks_sampling_params_are_vllms_with_the_keys_inside(llm):
    import vllm

    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, detokenize=False,
        steering_vectors={"post_block": {1: V}}, extra_args=scope(READ),
    )  # fmt: skip
    assert isinstance(params, vllm.SamplingParams)
    (face,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    (native,) = run(llm, scope(Add(V, layer=1), READ))
    assert torch.equal(face.scope["resid_post", 2], native.scope["resid_post", 2])
    assert set(params.extra_args) == {"scope", "steering_vectors"}


def inline(**hooks):
    return {"kind": "inline", "packed": hooks}


def probed(probe, threshold, sharpness, steer, strength=1.0):
    """A gate as the fork's clients send it."""
    return {
        "when": {
            "kind": "probe", "probe": probe, "threshold": threshold, "sharpness": sharpness,
        },
        "scope": "this_token",
        "apply": {"kind": "add", "steer": steer, "strength": strength},
    }  # fmt: skip


#: Gates; and by place, in order of the forward, what a hook looks for and what it adds of what.
GATED = {
    "at-the-probes-place": (
        [probed(
            inline(post_block=packed(D, layer_indices=[1])), 0.2, 0.5,
            inline(post_block=packed(V, layer_indices=[1])), 0.7,
        )],
        [("look", "resid_post", 1, D, 0.2, 0.5), ("add", "resid_post", 1, 0.7 * V)],
    ),
    "across-hooks-and-layers": (
        [probed(
            inline(post_attn=packed(D, layer_indices=[0])), -0.3, 0.4,
            inline(post_block=packed(V, W, layer_indices=[0, 2], scales=[1.0, 0.5])),
        )],
        [
            ("look", "resid_mid", 0, D, -0.3, 0.4), ("add", "resid_post", 0, V),
            ("add", "resid_post", 2, 0.5 * W),
        ],
    ),
}  # fmt: skip


def hooks_of(steps, values):
    """The reference's edits. `values` becomes the gate's values of the last forward."""

    def look(vector, threshold, sharpness, x):
        values[:] = [torch.sigmoid(sharpness * (x @ vector - threshold))]
        return x

    def add(vector, x):
        return x + in_answer(values[0][:, None] * vector)

    does = {"look": look, "add": add}
    return [(site, layer, partial(does[what], *of)) for what, site, layer, *of in steps]


def in_answer(change):
    """Nothing for the prompt's tokens."""
    return torch.cat([torch.zeros(len(PROMPT), change.shape[1]), change[len(PROMPT) :]])


#: Beside the gates: vectors without one, at the places of gates too.
SMALL = W / 20
BESIDE = {
    "decode_steering_vectors": {"post_block": {0: SMALL, 1: SMALL}},
    "steering": [{
        "when": {"kind": "always"}, "scope": "rest_of_request",
        "apply": {"kind": "add", "steer": inline(pre_attn=packed(SMALL, layer_indices=[1]))},
    }],
}  # fmt: skip


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-vectors"])
@pytest.mark.parametrize("case", GATED)
def test_a_gate_equals_hooks_that_look_and_add(case, beside, llm, checkpoints):
    gates, steps = GATED[case]
    values = []
    edits, extra = hooks_of(steps, values), {"steering": gates}
    if beside:
        extra = BESIDE | {"steering": [*gates, *BESIDE["steering"]]}
        places = ("resid_post", 0), ("resid_post", 1), ("resid_pre", 1)
        edits += [(*place, lambda x: x + in_answer(SMALL.expand_as(x))) for place in places]
    (output,) = run(llm, extra | scope(READ))
    check(output, reference(checkpoints("llama"), torch.float32), edits)
    opened = values[0][len(PROMPT) :]
    assert 0.02 < float(opened.mean()) < 0.98, "the gate is always open or always closed"


CONSUMERS = {
    "files": (
        {"root": "/a", "writer_threads": 2, "fsync": True, "queue_size": 9},
        ("sinks", {"root": "/a", "threads": 2, "fsync": True, "layout": "per_request"}),
    ),
    "packed": (
        {"root": "/a", "default_layout": "packed"}, ("sinks", {"root": "/a", "layout": "packed"}),
    ),
    "of-every-request": (
        {"root": "/a", "global_hooks": {"post_block": [1]}, "global_positions": "all_prompt"},
        ("global_sinks", {
            "root": "/a", "layout": "per_request",
            "reads": [{"site": "resid_post", "layers": [1], "tokens": "prompt"}],
        }),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONSUMERS)
def test_consumers_are_sinks(case):
    params, (kind, options) = CONSUMERS[case]
    assert sink_of({"name": "filesystem", "params": params}) == (kind, "filesystem", options)
    assert ScopeConfig.parse({kind: {"filesystem": options}})


@pytest.mark.parametrize(
    ("consumer", "words"),
    [
        pytest.param({"name": "filesystem", "params": {"rot": 1}}, "has 'rot'", id="unknown"),
        pytest.param(
            {"name": "filesystem", "params": {"on_collision": "suffix"}},
            "replaces a file of its name",
            id="collision",
        ),
        pytest.param({"name": "filesystem", "instance_name": "b"}, "one instance", id="instance"),
        pytest.param(
            {"name": "filesystem", "params": {"global_hooks": {}, "default_tag": "a"}},
            "a root of their own", id="a-tag-for-all",
        ),
        pytest.param("filesystem", r"each must be \{name, params\}", id="a-word"),
    ],
)  # fmt: skip
def test_a_consumer_that_cannot_be_is_refused(consumer, words):
    with pytest.raises(ValueError, match=words):
        sink_of(consumer)


def of_module(scale):
    return [
        Add(torch.stack([V, 2 * W]), layers=[0, 2], scale=scale),
        Add(D, site="resid_pre", layer=1, scale=scale, tokens="prompt"),
        Add(W, layer=0, scale=scale, tokens="generated"),
    ]


@pytest.mark.parametrize(
    ("extra", "scale"),
    [
        pytest.param({"steering_module_ref": ("formal", 1.5)}, 1.5, id="a-pair"),
        pytest.param({"steering_module_ref": '["formal", 1.5]'}, 1.5, id="json"),
        pytest.param({"steering_name": "formal"}, 1.0, id="by-name"),
        pytest.param({"steering_module_ref": ["at-start", -1]}, -1.0, id="of-the-start"),
    ],
)
def test_a_module_of_three_tiers_is_loaded_and_referred_to(extra, scale, llm, tmp_path):
    path = tmp_path / "formal.json"
    path.write_text(json.dumps(MODULE))
    digests = load_modules(llm, [f"formal={path}"])
    assert digests == {"formal": load_vectors(path).digest}
    own = {"decode_steering_vectors": {"post_block": {1: V}}}
    added = Add(V, layer=1, tokens="generated")
    face, native, plain = run(
        llm, extra | own | scope(READ), scope(*of_module(scale), added, READ), scope(READ)
    )
    for layer in range(3):
        assert torch.equal(face.scope["resid_post", layer], native.scope["resid_post", layer])
    assert face.outputs[0].logprobs == native.outputs[0].logprobs
    assert face.outputs[0].logprobs != plain.outputs[0].logprobs


def test_a_name_that_is_loaded_again_means_the_new_tiers(llm, tmp_path):
    path = tmp_path / "mood.json"
    path.write_text(json.dumps({"vectors": {"post_block": {"1": V.tolist()}}}))
    load_modules(llm, [f"mood={path}"])
    run(llm, {"steering_name": "mood"} | scope(READ))
    path.write_text(json.dumps({"decode_vectors": {"post_block": {"2": W.tolist()}}}))
    load_modules(llm, [f"mood={path}"])
    face, native = run(
        llm, {"steering_name": "mood"} | scope(READ),
        scope(Add(W, layer=2, tokens="generated"), READ),
    )  # fmt: skip
    for layer in range(3):
        assert torch.equal(face.scope["resid_post", layer], native.scope["resid_post", layer])


HOOKS = {"post_block": [1, 2], "pre_attn": {"layers": [0], "ranges": [[1, 2]]}}


@pytest.mark.parametrize(
    ("positions", "tokens"),
    [
        pytest.param("last_prompt", "last_prompt", id="last-prompt"),
        pytest.param("all_prompt", "prompt", id="prompt"),
        pytest.param("all_generated", "generated", id="generated"),
        pytest.param("all", "all", id="all"),
        pytest.param([0, 7], [0, 7], id="positions"),
    ],
)
def test_a_capture_leaves_files_that_equal_native_reads(positions, tokens, llm, root):
    name = f"request of {positions}"
    wanted = {"request_id": name, "tag": "run-7", "hooks": HOOKS, "positions": positions}
    reads = [
        Read("resid_post", layers=[1, 2], tokens=tokens),
        Read("resid_pre", layers=[0, 1, 2], tokens=tokens),
    ]
    steered = {"steering_vectors": {"post_block": {0: V}}}
    face, native = run(
        llm, {"capture": {"filesystem": wanted}} | steered, scope(Add(V, layer=0), *reads)
    )
    result = face.capture_results["filesystem"]
    assert (result.status, result.error) == ("ok", None)
    (path,) = result.payload
    assert Path(path).is_file()
    assert Path(path).is_relative_to(root / "run-7")
    for found in (read_request(path), read_request(root / "run-7" / name)):
        assert set(found) == {
            *((k, "post_block") for k in (1, 2)), *((k, "pre_attn") for k in range(3))
        }  # fmt: skip
        for (layer, hook), entry in found.items():
            site = {"post_block": "resid_post", "pre_attn": "resid_pre"}[hook]
            assert entry.positions == native.scope.positions(site, layer).tolist()
            assert np.array_equal(entry.array, native.scope[site, layer].numpy())
    (request,) = vllm_scope.open(root).find(name=name)
    assert request.token_ids.tolist() == [*PROMPT, *face.outputs[0].token_ids]
    assert face.scope.keys() == []
    assert native.capture_results == {}


def test_every_completion_has_its_own_results_and_they_are_pending_first(llm, root):
    from vllm import SamplingParams

    wanted = FilesystemCaptureRequest("three", "n", {"post_block": "all"}, "all")
    params = SamplingParams(
        n=2, max_tokens=6, ignore_eos=True, detokenize=False,
        extra_args={"capture": {"filesystem": wanted}},
    )  # fmt: skip
    engine = llm.llm_engine
    engine.add_request("pending", {"prompt_token_ids": PROMPT}, params)
    seen = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            for completion in output.outputs:
                seen.append((completion.finish_reason, completion.capture_results["filesystem"]))
    assert {result.status for reason, result in seen if reason is None} == {"pending"}
    ended = [result for reason, result in seen if reason is not None][-2:]
    assert [result.status for result in ended] == ["ok", "ok"]
    assert len({path for result in ended for path in result.payload}) == 2
    (whole,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert [c.capture_results["filesystem"].status for c in whole.outputs] == ["ok", "ok"]
    with pytest.raises(ScopeError, match=r"use output.outputs\[i\].capture_results"):
        whole.capture_results["filesystem"]
    with pytest.raises(KeyError, match="2 requests"):
        read_request(root / "n" / "three")


def test_other_consumers_are_sinks_by_name(llm):
    capture = {
        "mine": {"hooks": {"post_attn": [1]}, "positions": "all_prompt"},
        "broken": {"hooks": {"post_block": [0]}, "positions": [3]},
    }
    face, native = run(
        llm, {"capture": json.dumps(capture)}, scope(Read("resid_mid", layers=[1], tokens="prompt"))
    )
    results = face.capture_results
    assert (results["mine"].status, results["mine"].payload) == ("ok", [{"said": "fine"}])
    assert results["broken"].status == "error"
    assert "disk full" in results["broken"].error
    (rows,) = [rows for name, rows in Whole.made[0].rows.items() if name[1:] == ("resid_mid", 1)]
    expected = native.scope["resid_mid", 1][:, 0].tolist()
    assert rows == list(zip(range(40), expected, strict=True))
    assert face.outputs[0].token_ids == native.outputs[0].token_ids


FILES = {"hooks": {"post_block": [1]}}
BAD = {
    "no-such-consumer": (
        {"capture": {"s3": FILES}}, "is 's3'; this engine has memory, filesystem, mine, broken",
    ),
    "nothing-captured": ({"capture": {"filesystem": {"tag": "a"}}}, "hooks says what is read"),
    "unknown-positions": (
        {"capture": {"filesystem": FILES | {"positions": "last"}}}, "one of last_prompt, all",
    ),
    "a-layout": (
        {"capture": {"filesystem": FILES | {"layout": "packed"}}}, "only the operator sets it",
    ),
    "captured-layer": (
        {"capture": {"filesystem": {"hooks": {"post_block": [7]}}}}, "layers 0 to 2",
    ),
    "range-upside-down": (
        {"capture": {"filesystem": {"hooks": {"post_block": {"ranges": [[2, 1]]}}}}},
        r"has the range \[2, 1\]; a range is \[first, last\]",
    ),
    "clamp-without-bounds": (
        {"steering_clamps": {"post_block": {1: [{"vector": V}]}}}, r"\[1\]\[0\] has no bound",
    ),
    "clamp-of-both-kinds": (
        {"steering_clamps": {"post_block": {1: [{"vector": V, "value": 1, "min": 0}]}}},
        "has min, value; a clamp has min, max or both, or value alone",
    ),
    "clamp-upside-down": (
        {"steering_clamps": {"post_block": {1: [{"vector": V, "min": 1, "max": 0}]}}},
        r"\[1\]\[0\]\.min is 1 and hi 0",
    ),
    "clamp-along-zero": (
        {"steering_clamps": {"post_block": {1: [{"vector": 0 * V, "max": 0}]}}},
        r"\[0\]\.vector is zero",
    ),
    "clamp-too-strong": (
        {"steering_clamps": {"post_block": {1: [{"vector": V, "max": 0, "strength": 2}]}}},
        r"\[0\]\.strength is 2; it must be from 0 to 1",
    ),
    "gate-before-its-probe": (
        {"steering": [probed(
            inline(post_block=packed(D, layer_indices=[1])), 0, 1,
            inline(post_block=packed(V, layer_indices=[0])),
        )]},
        r"^steering\[0\]\.when\.probe reads 'resid_post' 1, which comes after the edited",
    ),
    "features": ({"sae_full_reconstruction_specs": [{}]}, "replace a row by its reconstruction"),
    "patches": ({"patch": [{}]}, "vllm_scope.Replace"),
    "two-modules": (
        {"steering_name": "a", "steering_module_ref": ("b", 1)}, "give one of them",
    ),
    "unknown-hook": ({"steering_vectors": {"mlp": {1: V}}}, "hooks are pre_attn, post_attn"),
    "unknown-field": (
        {"steering_vectors": {"post_block": {1: {"vector": V, "gain": 2}}}}, "vector and scale",
    ),
    "layer-out-of-range": ({"steering_vectors": {"post_block": {9: V}}}, "layers 0 to 2"),
    "wrong-size": ({"steering_vectors": {"post_block": {1: [1.0] * 64}}}, "rows have 128"),
    "mixed-sizes": (
        {"steering_vectors": {"post_block": {0: V, 1: [1.0]}}},
        r"\['post_block'\]\[1\] has 1 numbers; this model's rows have 128",
    ),
    "not-json": ({"steering_vectors": "{"}, "is not JSON"),
    "unknown-module": (
        {"steering_module_ref": ("nobody", 1.0)},
        "^steering_module_ref names the steering module 'nobody', which this engine does not hold",
    ),
    "no-scale": ({"steering_module_ref": ("formal",)}, r"it must be \(name, scale\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_given_is_an_error_of_that_request(case, llm):
    extra, words = BAD[case]
    with pytest.raises(SpecError, match=words):
        run(llm, extra)
    (output,) = run(llm, scope(READ))
    assert output.scope.status == "complete"
