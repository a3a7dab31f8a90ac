"""vllm-lens's keys give what the native actions give."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from tests.checkpoints import reference, row_error
from tests.conftest import local_engine, process_engine
from tests.engine.test_edit_scheduling import on
from tests.engine.test_edits import V, check, direction
from vllm_scope import Add, Read, ScopeError, SpecError, scope
from vllm_scope.compat.vllm_lens import Hook, SteeringVector

PROMPT = list(range(30, 70))
TWO = torch.stack([V, direction(3, 2.0)])


@pytest.fixture(scope="module")
def llm(checkpoints):
    with local_engine(checkpoints("llama"), dtype="float32", max_num_batched_tokens=32) as llm:
        yield llm


def params(extra, **options):
    from vllm import SamplingParams

    defaults = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**(defaults | {"logprobs": 3} | options), extra_args=extra)


def run(llm, *extras, prompt=PROMPT, **options):
    """An output for each dict of extra_args, all in one batch."""
    prompts = [{"prompt_token_ids": prompt}] * len(extras)
    return llm.generate(prompts, [params(e, **options) for e in extras], use_tqdm=False)


def test_the_residual_stream_is_stacked_by_ascending_layer(llm, checkpoints):
    some, every = run(llm, {"output_residual_stream": [2, 0]}, {"output_residual_stream": True})
    ids = [*PROMPT, *every.outputs[0].token_ids][:-1]
    expected = torch.stack(reference(checkpoints("llama"), torch.float32).streams(ids)[1:])
    rows = every.activations["residual_stream"]
    assert rows.shape == (3, len(PROMPT) + 6 - 1, 128)
    assert row_error(rows, expected) <= 1e-4
    assert list(every.activations) == ["residual_stream"]
    assert torch.equal(some.activations["residual_stream"], rows[[0, 2]])
    assert every.activations is every.outputs[0].activations


@pytest.mark.parametrize("value", [False, None])
def test_false_and_none_capture_nothing(value, llm):
    (output,) = run(llm, {"output_residual_stream": value})
    assert output.scope is None
    assert not hasattr(output, "activations")


#: A SteeringVector, and the native actions that mean the same.
VECTORS = {
    "broadcast": (SteeringVector(TWO, [0, 2], scale=0.5), [Add(TWO, layers=[0, 2], scale=0.5)]),
    "norm-matched": (
        SteeringVector(V[None], [1], scale=0.7, norm_match=True),
        [Add(V, layer=1, scale=0.7, norm_match=True)],
    ),
    "at-positions": (
        SteeringVector(V[None], [1], position_indices=[3, 41]),
        [Add(V, layer=1, tokens=[3, 41])],
    ),
    "three-dimensions": (
        SteeringVector(TWO[None], [1], position_indices=[42, 5]),
        [Add(TWO[0], layer=1, tokens=[42]), Add(TWO[1], layer=1, tokens=[5])],
    ),
    "three-dimensions-from-the-start": (
        SteeringVector(TWO[None], [1]),
        [Add(TWO[0], layer=1, tokens=[0]), Add(TWO[1], layer=1, tokens=[1])],
    ),
}


@pytest.mark.parametrize("form", ["object", "json", "dicts"])
@pytest.mark.parametrize("case", VECTORS)
def test_a_steering_vector_equals_native_adds(case, form, llm):
    """In chunks of 32 tokens and over decode steps: each position is steered once."""
    vector, actions = VECTORS[case]
    value = {
        "object": [vector],
        "json": json.dumps([vector.model_dump(mode="json")]),
        "dicts": [vector.model_dump()],
    }[form]
    asked = {"output_residual_stream": True, "apply_steering_vectors": value}
    face, native, plain = run(
        llm, asked, scope(*actions, Read("resid_post")), {"output_residual_stream": True}
    )
    rows = face.activations["residual_stream"]
    expected = torch.stack([native.scope["resid_post", k] for k in range(3)])
    assert torch.equal(rows, expected)
    assert face.outputs[0].logprobs == native.outputs[0].logprobs
    assert not torch.equal(rows, plain.activations["residual_stream"])


def test_rows_are_captured_after_steering(llm):
    asked = {"apply_steering_vectors": [SteeringVector(V[None], [0])]}
    steered, plain = run(
        llm, asked | {"output_residual_stream": [0]}, {"output_residual_stream": [0]}, max_tokens=1
    )
    found = steered.activations["residual_stream"] - plain.activations["residual_stream"]
    torch.testing.assert_close(found[0], V.expand(len(PROMPT), -1), rtol=1e-4, atol=1e-4)


def test_params_that_are_used_again_steer_again(llm):
    asked = params({"apply_steering_vectors": [SteeringVector(TWO, [0, 2])]})
    before = dict(asked.extra_args)
    outputs = [
        llm.generate({"prompt_token_ids": PROMPT}, asked, use_tqdm=False)[0] for _ in range(2)
    ]
    assert asked.extra_args == before
    assert outputs[0].outputs[0].logprobs == outputs[1].outputs[0].logprobs
    (plain,) = run(llm, None)
    assert plain.outputs[0].logprobs != outputs[1].outputs[0].logprobs


def test_each_of_several_completions_has_its_own(llm):
    (output,) = run(llm, {"output_residual_stream": [1]}, n=3, temperature=1.0)
    for completion in output.outputs:
        rows = completion.activations["residual_stream"]
        assert torch.equal(rows[0], completion.scope["resid_post", 1])
    with pytest.raises(ScopeError, match=r"3 completions; use output\.outputs\[i\]\.activations"):
        output.activations["residual_stream"]


def test_native_actions_go_beside_the_keys(llm):
    (output,) = run(llm, {"output_residual_stream": [1], **scope(Read("embed", tokens=[0]))})
    assert output.scope["embed"].shape == (1, 128)
    assert output.activations["residual_stream"].shape == (1, 45, 128)


BAD = {
    "a-layer-that-is-not-there": ({"output_residual_stream": [99]}, "has layers 0 to 2"),
    "an-empty-list": ({"output_residual_stream": []}, "True for all layers"),
    "a-word": ({"output_residual_stream": "yes"}, "is not JSON"),
    "attention": ({"output_qk": [1]}, "does not tap queries and keys; start it with"),
    "hooks": ({"apply_hooks": [object()]}, "it must be a list of Hook"),
    "no-vector": ({"apply_steering_vectors": [3]}, "it must be a SteeringVector"),
    "unknown-field": ({"apply_steering_vectors": [{"layer": 3}]}, "its fields are activations"),
    "wrong-size": (
        {"apply_steering_vectors": [SteeringVector(torch.ones(1, 64), [0])]},
        "'resid_post' have 128",
    ),
    "a-position-after-the-end": (
        {"apply_steering_vectors": [SteeringVector(V[None], [0], position_indices=[999])]},
        r"^apply_steering_vectors\[0\].position_indices has 999; with this prompt and max_tokens",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_given_is_an_error_of_that_request(case, llm):
    extra, words = BAD[case]
    with pytest.raises(SpecError, match=words):
        run(llm, extra)
    (output,) = run(llm, {"output_residual_stream": [0]})
    assert output.activations["residual_stream"].shape == (1, 45, 128)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: SteeringVector(V, [0]), "must be \\[num_layers", id="one-dimension"),
        pytest.param(lambda: SteeringVector(TWO, [0]), "2 rows for 1", id="layers"),
        pytest.param(
            lambda: SteeringVector(V[None], [0], position_indices=[1, 1]), "twice", id="twice"
        ),
        pytest.param(
            lambda: SteeringVector(TWO[None], [0], position_indices=[1]), "2 positions for 1",
            id="positions",
        ),
    ],
)  # fmt: skip
def test_a_steering_vector_that_cannot_be_is_refused(make, words):
    with pytest.raises(SpecError, match=words):
        make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_vector_survives_its_json(dtype):
    vector = SteeringVector(TWO.to(dtype), [0, 2], 2.0, True, [1])
    again = SteeringVector(**json.loads(json.dumps(vector.model_dump())))
    assert torch.equal(again.activations, vector.activations)
    assert again.activations.dtype == dtype
    assert (again.scale, again.norm_match, again.position_indices) == (2.0, True, [1])


def test_compressed_vectors_are_read_and_bombs_are_not():
    zstd = pytest.importorskip("backports.zstd")
    import base64

    body = SteeringVector(TWO, [0, 2]).model_dump()["activations"]
    raw = base64.b64decode(body["data"])
    body |= {"compression": "zstd", "data": base64.b64encode(zstd.compress(raw)).decode()}
    assert torch.equal(SteeringVector(body, [0, 2]).activations, TWO)
    body["data"] = base64.b64encode(zstd.compress(bytes(1 << 26))).decode()
    with pytest.raises(SpecError, match="takes 1024"):
        SteeringVector(body, [0, 2])


def test_what_is_missing_says_why():
    with pytest.raises(ImportError, match="stay in one process"):
        from vllm_scope.compat.vllm_lens import serialize_hook_results  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Hok'"):
        from vllm_scope.compat.vllm_lens import Hok  # noqa: F401


@pytest.mark.long
def test_positions_are_exact_under_ngram_speculation(llama, ref):
    """Drafts are judged before the next step is planned: there is no async scheduling with them."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    options = {"speculative_config": config, "enforce_eager": True, "skip_tokenizer_init": True}
    prompts = [[1, 2, 3, 4] * 8, [11, 12] * 10]
    with process_engine(llama, dtype="float32", **options) as llm:
        asked = []
        for prompt in prompts:
            some = [3, len(prompt), len(prompt) + 7, len(prompt) + 30]
            vector = SteeringVector(V[None], [0], scale=0.1, position_indices=some)
            asked.append({"apply_steering_vectors": [vector], **scope(Read("resid_post"))})
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, [params(e, max_tokens=60) for e in asked], use_tqdm=False)
        steps = llm.collective_rpc("scope_counters")[0]["steps"]
    assert steps < 60, "no draft was accepted; the test shows nothing"
    for output, extra in zip(outputs, asked, strict=True):
        some = torch.tensor(extra["apply_steering_vectors"][0].position_indices)
        mean = on(lambda p, some=some: torch.isin(p, some), lambda x: x + 0.1 * V)
        check(output, ref, [("resid_post", 0, mean)])


def test_async_engines_understand_the_keys_too(checkpoints):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def main():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
            str(checkpoints("llama")), dtype="float32", max_model_len=512, enforce_eager=True,
            skip_tokenizer_init=True, gpu_memory_utilization=0.3,
        ))  # fmt: skip

        async def last(extra, name):
            async for output in engine.generate({"prompt_token_ids": PROMPT}, params(extra), name):
                if name == "face":
                    assert output.activations["residual_stream"].dim() == 3
            return output

        vector = SteeringVector(TWO, [0, 2])
        try:
            with pytest.raises(SpecError, match="runs in another process"):
                await last({"apply_hooks": [Hook(print, [0])]}, "hooked")
            return await asyncio.gather(
                last({"apply_steering_vectors": [vector], "output_residual_stream": True}, "face"),
                last(scope(*vector.to_actions(), Read("resid_post")), "native"),
            )
        finally:
            engine.shutdown()

    face, native = asyncio.run(main())
    expected = torch.stack([native.scope["resid_post", k] for k in range(3)])
    torch.testing.assert_close(face.activations["residual_stream"], expected)
