"""vllm-lens's hooks: each sees and changes the rows of its own request, and no others."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import reference
from tests.conftest import local_engine, long_except
from tests.engine.test_edits import V
from vllm_scope import Add, Read, ScopeError, SpecError, scope
from vllm_scope.compat.vllm_lens import Hook, SteeringVector

PROMPT = list(range(30, 70))
OTHER = list(range(90, 113))
BOTH = {"output_residual_stream": True}


#: The name of the last norm's weight, in vLLM's model.
NORMS = {"llama": "model.norm.weight", "gpt2": "transformer.ln_f.weight"}


@pytest.fixture(scope="module", params=long_except(NORMS, "llama"))
def family(request):
    """Layers that return (hidden, residual), and layers that return the stream."""
    return request.param


@pytest.fixture(scope="module")
def llm(checkpoints, family):
    # Chunks of 32 tokens, so that prompts cross steps and share them.
    with local_engine(checkpoints(family), dtype="float32", max_num_batched_tokens=32) as llm:
        yield llm


def run(llm, *extras, prompt=PROMPT, **options):
    from vllm import SamplingParams

    defaults = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "detokenize": False}
    defaults |= {"logprobs": 3}
    params = [SamplingParams(**(defaults | options), extra_args=extra) for extra in extras]
    prompts = prompt if isinstance(prompt[0], list) else [prompt] * len(extras)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def last_logprob(output):
    """Of the third likeliest token, at the last one: the first is all but certain to some."""
    return min(each.logprob for each in output.outputs[0].logprobs[-1].values())


def plus(ctx, rows):
    return rows + V


def keep(ctx, rows):
    ctx.saved.setdefault(ctx.layer_idx, []).append((ctx.positions, rows))
    assert len(rows) == ctx.seq_len == len(ctx.positions)


def kept(saved, layer):
    """Its rows by position; those of the step after the last are not the request's."""
    found = {}
    for positions, rows in saved[layer]:
        assert not set(positions) & set(found), "a position was shown twice"
        found |= dict(zip(positions, rows, strict=True))
    return found


def test_a_hook_sees_each_position_of_its_request_once(llm):
    hooked, plain = run(
        llm, {"apply_hooks": [Hook(keep, [0, 2])], **BOTH}, BOTH, prompt=[PROMPT, OTHER]
    )
    assert list(hooked.hook_results) == ["0"]
    assert not hasattr(plain, "hook_results")
    rows = hooked.activations["residual_stream"]
    for layer in (0, 2):
        found = kept(hooked.hook_results["0"], layer)
        assert set(range(rows.shape[1])) <= set(found) <= set(range(rows.shape[1] + 1))
        seen = torch.stack([found[p] for p in range(rows.shape[1])])
        assert torch.equal(seen, rows[layer])


def test_what_a_hook_returns_is_what_the_model_goes_on_with(llm, checkpoints, family):
    """As a native Add does it, in a batch whose other requests stay as they were."""
    before = run(llm, None, None, prompt=[OTHER, PROMPT])
    asked = {"apply_hooks": [Hook(plus, [1])], **BOTH}
    adds = scope(Add(V, layer=1), Read("resid_post"))
    hooked, other, native, plain = run(
        llm, asked, None, adds, None, prompt=[PROMPT, OTHER, PROMPT, PROMPT]
    )
    rows = hooked.activations["residual_stream"]
    expected = torch.stack([native.scope["resid_post", k] for k in range(3)])
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-3)
    assert hooked.outputs[0].token_ids == native.outputs[0].token_ids
    ids = [*PROMPT, *hooked.outputs[0].token_ids][:-1]
    ref = reference(checkpoints(family), torch.float32)
    streams, _ = ref.edited(ids, [("resid_post", 1, lambda x: x + V)])
    torch.testing.assert_close(rows[1], streams["resid_post", 1], rtol=1e-3, atol=1e-2)
    for now, then in ((other, before[0]), (plain, before[1])):
        assert now.outputs[0].token_ids == then.outputs[0].token_ids
        assert last_logprob(now) == pytest.approx(last_logprob(then), rel=1e-3)
    assert abs(last_logprob(hooked) - last_logprob(plain)) > 0.1


@pytest.mark.parametrize("layer", [0, 2])
def test_a_pre_hook_changes_what_the_layer_is_given(layer, llm):
    """The whole stream: it was given the part that the layer before had added."""
    edit = Add(V, layer=layer - 1) if layer else Add(V, site="embed")
    hooked, native = run(
        llm, {"apply_hooks": [Hook(plus, [layer], pre=True)], **BOTH},
        scope(edit, Read("resid_post")),
    )  # fmt: skip
    rows = hooked.activations["residual_stream"]
    expected = torch.stack([native.scope["resid_post", k] for k in range(3)])
    # The exit of the layer before is read before the hook.
    here = slice(layer, None)
    torch.testing.assert_close(rows[here], expected[here], rtol=1e-4, atol=1e-3)


def test_hooks_of_one_layer_run_in_their_order(llm):
    hooks = [Hook(plus, [1]), Hook(keep, [1]), Hook(lambda ctx, rows: rows - V, [1])]
    hooked, plain = run(llm, {"apply_hooks": hooks, **BOTH}, BOTH)
    assert list(hooked.hook_results) == ["0", "1", "2"]
    found = kept(hooked.hook_results["1"], 1)
    rows = plain.activations["residual_stream"]
    seen = torch.stack([found[p] for p in range(rows.shape[1])])
    torch.testing.assert_close(seen, rows[1] + V, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(hooked.activations["residual_stream"], rows, rtol=1e-3, atol=1e-2)


def test_changes_in_place_that_are_not_returned_change_nothing(llm):
    def spoil(ctx, rows):
        rows.zero_()

    hooked, plain = run(llm, {"apply_hooks": [Hook(spoil, [0, 1, 2])], **BOTH}, BOTH)
    assert torch.equal(hooked.activations["residual_stream"], plain.activations["residual_stream"])


def test_kv_of_hooked_requests_is_nobody_elses(llm):
    # Blocks of the CPU's cache have 128 tokens.
    prompt = [20 + 7 * i % 150 for i in range(300)]
    (first,) = run(llm, None, prompt=prompt)
    (hooked,) = run(llm, {"apply_hooks": [Hook(plus, [0]), Hook(keep, [0])]}, prompt=prompt)
    # It finds nothing of the plain one's in the cache, so that its hooks see every token.
    assert len(kept(hooked.hook_results["1"], 0)) >= len(prompt)
    (again,) = run(llm, {"apply_hooks": [Hook(plus, [0]), Hook(keep, [0])]}, prompt=prompt)
    assert len(kept(again.hook_results["1"], 0)) >= len(prompt)
    assert again.outputs[0].logprobs == hooked.outputs[0].logprobs
    (plain,) = run(llm, None, prompt=prompt)
    assert plain.num_cached_tokens > 0
    assert plain.outputs[0].token_ids == first.outputs[0].token_ids
    assert last_logprob(plain) == pytest.approx(last_logprob(first), rel=1e-3)
    assert abs(last_logprob(again) - last_logprob(first)) > 0.1


def test_each_of_several_completions_has_its_own(llm):
    (output,) = run(llm, {"apply_hooks": [Hook(keep, [1])], **BOTH}, n=3, temperature=1.0)
    for completion in output.outputs:
        rows = completion.activations["residual_stream"]
        found = kept(completion.hook_results["0"], 1)
        seen = torch.stack([found[p] for p in range(rows.shape[1])])
        assert torch.equal(seen, rows[1])
    with pytest.raises(ScopeError, match=r"use output\.outputs\[i\]\.hook_results"):
        output.hook_results["0"]


def test_a_hook_finds_the_models_parameters(llm, family):
    def norm(ctx, rows):
        ctx.saved["weight"] = ctx.get_parameter(NORMS[family]).clone()

    (output,) = run(llm, {"apply_hooks": [Hook(norm, [2])]}, max_tokens=1)
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    expected = model.model_runner.get_model().get_parameter(NORMS[family])
    assert torch.equal(output.hook_results["0"]["weight"], expected)


def fails(ctx, rows):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        pytest.param(fails, "RuntimeError: on purpose", id="it-raises"),
        pytest.param(lambda ctx, rows: rows[:, :3], "it returned", id="a-wrong-shape"),
        pytest.param(lambda ctx, rows: 3, "it returned int", id="a-number"),
    ],
)
def test_an_error_in_a_hook_is_its_requests_own(fn, words, llm):
    bad = {"apply_hooks": [Hook(keep, [0]), Hook(fn, [1])], **BOTH}
    good = {"apply_hooks": [Hook(keep, [0])], **BOTH}
    failed, fine = run(llm, bad, good, prompt=[PROMPT, OTHER])
    with pytest.raises(ScopeError, match=words):
        failed.hook_results["0"]
    with pytest.raises(ScopeError, match="a function after layer 1 failed"):
        failed.activations["residual_stream"]
    assert failed.scope.status == "failed"
    assert len(fine.hook_results["0"][0]) >= 1
    assert fine.activations["residual_stream"].shape == (3, len(OTHER) + 5, 128)


BAD = {
    "a-layer-that-is-not-there": ({"apply_hooks": [Hook(keep, [3])]}, "layers 0 to 2"),
    "what-travelled": (
        {"apply_hooks": [{"fn": {"cloudpickle": "gASV"}, "layer_indices": [0]}]},
        "arbitrary code of this process, and a server runs none",
    ),
    "json": ({"apply_hooks": '[{"fn": {"cloudpickle": ""}}]'}, "a server runs none"),
    "a-vector-that-it-would-not-see": (
        {
            "apply_hooks": [Hook(keep, [0])],
            "apply_steering_vectors": [SteeringVector(V[None], [0])],
        },
        "would not see the vector",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_hooks_that_cannot_be_are_refused(case, llm):
    extra, words = BAD[case]
    with pytest.raises(SpecError, match=words):
        run(llm, extra)
    assert run(llm, None)[0].scope is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(
            lambda: Hook({"cloudpickle": ""}, [0]), "no request can send a function", id="fn"
        ),
        pytest.param(lambda: Hook(keep, []), "a list of layers", id="no-layer"),
        pytest.param(lambda: Hook(keep, [True]), "a list of layers", id="no-number"),
    ],
)
def test_a_hook_that_cannot_be_is_refused(make, words):
    with pytest.raises(SpecError, match=words):
        make()


def test_an_engine_that_compiles_says_why_it_runs_no_hooks(llm, monkeypatch):
    monkeypatch.setattr(llm.llm_engine.vllm_config.model_config, "enforce_eager", False)
    with pytest.raises(SpecError, match="no request uses CUDA graphs"):
        run(llm, {"apply_hooks": [Hook(keep, [0])]})


def test_functions_are_held_no_longer_than_their_request(llm):
    from vllm_scope.engine import functions

    (output,) = run(llm, {"apply_hooks": [Hook(keep, [0])]})
    assert output.hook_results["0"]
    del output
    run(llm, None)
    assert len(functions._kept) == 0


def test_persistent_hooks_are_every_requests(llm):
    (plain,) = run(llm, BOTH)
    llm.register_hooks([Hook(plus, [0])])
    llm.register_hooks([Hook(keep, [0])], prefetch_params=["model.norm.weight"])
    try:
        own, other = run(
            llm, {"apply_hooks": [Hook(keep, [0])], **BOTH}, BOTH, prompt=[PROMPT, OTHER]
        )
        results = llm.collect_hook_results()
        assert set(results) == {own.request_id, other.request_id}
        assert list(own.hook_results) == ["0"]
        assert not hasattr(other, "hook_results")
        for output in (own, other):
            rows = output.activations["residual_stream"]
            found = kept(results[output.request_id]["1"], 0)
            seen = torch.stack([found[p] for p in range(rows.shape[1])])
            # Theirs come first, and a request's own see what they left.
            assert torch.equal(seen, rows[0])
        mine = kept(own.hook_results["0"], 0)
        assert torch.equal(mine[3], own.activations["residual_stream"][0, 3])
        llm.clear_hook_results()
        assert llm.collect_hook_results() == {}
    finally:
        llm.clear_hooks()
    (again,) = run(llm, BOTH)
    assert llm.collect_hook_results() == {}
    rows = [output.activations["residual_stream"] for output in (plain, again)]
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-3)


def test_persistent_hooks_are_refused_where_none_run(llm, monkeypatch):
    with pytest.raises(SpecError, match="it must be a list of Hook"):
        llm.register_hooks([print])
    monkeypatch.setattr(llm.llm_engine.vllm_config.model_config, "enforce_eager", False)
    with pytest.raises(SpecError, match="no request uses CUDA graphs"):
        llm.register_hooks([Hook(keep, [0])])
    assert run(llm, None)[0].scope is None
