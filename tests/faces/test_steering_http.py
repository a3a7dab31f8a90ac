"""The steering fork's keys give what the native edits give."""

from __future__ import annotations

import json

import pytest
import torch

from tests.conftest import local_engine
from tests.engine.test_edits import V, direction
from vllm_scope import Add, Read, SpecError, scope
from vllm_scope.faces.steering_http import load_module, load_modules, reads_of

PROMPT = list(range(30, 70))
W, D = direction(5, 2.0), direction(2)
SITES = {"scope": {"sites": ["embed", "resid_pre", "resid_mid", "resid_post"]}}


@pytest.fixture(scope="module")
def llm(checkpoints):
    path = checkpoints("llama")
    with local_engine(path, dtype="float32", additional_config=SITES) as llm:
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
        {"steering_vectors": {"pre_attn": {2: V}}}, [Add(V, "resid_pre", 2)],
    ),
    "after-attention": (
        {"steering_vectors": {"post_attn": {0: V}}}, [Add(V, "resid_mid", 0)],
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


@pytest.mark.parametrize("ref", [("formal", 1.5), '["formal", 1.5]', ["formal", 1.5]])
def test_a_module_is_loaded_from_json_and_referred_to(ref, llm, tmp_path):
    path = tmp_path / "formal.json"
    scaled = {"vector": W.tolist(), "scale": 2.0}
    path.write_text(json.dumps({"post_block": {"0": V.tolist(), "2": scaled}}))
    digests = load_modules(llm, [f"formal={path}"])
    assert digests == {"formal": load_module(path).digest}
    both = torch.stack([V, 2 * W])
    face, native = run(
        llm, {"steering_module_ref": ref} | scope(READ),
        scope(Add(both, layers=[0, 2], scale=1.5), READ),
    )  # fmt: skip
    assert torch.equal(face.scope["resid_post", 2], native.scope["resid_post", 2])


def test_a_module_of_tiers_is_refused(tmp_path):
    path = tmp_path / "tiers.json"
    one = {"post_block": {"0": [1.0]}}
    path.write_text(json.dumps({"vectors": one, "prefill_vectors": one}))
    with pytest.raises(SpecError, match="has the tiers prefill_vectors, vectors"):
        load_module(path)
    path.write_text(json.dumps({"vectors": one}))
    assert list(load_module(path)) == [("resid_post", 0)]


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
def test_a_capture_is_a_read_per_hook(positions, tokens):
    hooks = {"post_block": [1, 2], "pre_attn": [0]}
    capture = {"filesystem": {"request_id": "a", "hooks": hooks, "positions": positions}}
    assert reads_of(capture) == [
        Read("resid_post", [1, 2], tokens=tokens), Read("resid_pre", [0], tokens=tokens)
    ]  # fmt: skip


FILES = {"filesystem": {"hooks": {"post_block": [1]}}}
BAD = {
    "files": ({"capture": FILES}, "no filesystem sink yet"),
    "another-consumer": ({"capture": {"s3": {}}}, "the consumer here is 'filesystem'"),
    "unknown-hook": ({"steering_vectors": {"mlp": {1: V}}}, "hooks are pre_attn, post_attn"),
    "unknown-field": (
        {"steering_vectors": {"post_block": {1: {"vector": V, "gain": 2}}}}, "vector and scale",
    ),
    "layer-out-of-range": ({"steering_vectors": {"post_block": {9: V}}}, "layers 0 to 2"),
    "wrong-size": ({"steering_vectors": {"post_block": {1: [1.0] * 64}}}, "rows have 128"),
    "mixed-sizes": (
        {"steering_vectors": {"post_block": {0: V, 1: [1.0]}}}, r"vectors of \[1, 128\]",
    ),
    "not-json": ({"steering_vectors": "{"}, "is not JSON"),
    "unknown-module": ({"steering_module_ref": ("nobody", 1.0)}, "does not hold"),
    "no-scale": ({"steering_module_ref": ("formal",)}, r"it is \(name, scale\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_given_is_an_error_of_that_request(case, llm):
    extra, words = BAD[case]
    with pytest.raises(SpecError, match=words):
        run(llm, extra)
    (output,) = run(llm, scope(READ))
    assert output.scope.status == "complete"
