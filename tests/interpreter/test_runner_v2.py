"""Model Runner V2, the default on GPUs, here on a CPU: the same rows as ever.

No CUDA graphs; its kernels run in Triton's interpreter, so few and short requests.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

import vllm_scope
from tests import asking
from tests.asking import check, run
from tests.conftest import local_engine, preempted_in
from tests.engine import probing
from tests.engine import test_attention_sites as attention
from tests.engine import test_branch_sites as branches
from tests.engine import test_policies as policies
from tests.engine import test_states as states
from tests.engine import test_sweeps as sweeps
from tests.policies import install
from vllm_scope import Add, Gate, Probe, Read, scope
from vllm_scope.compat.vllm_lens import Hook

FILES = "filesystem"
READ_ALL = scope(Read("resid_post"), Read("embed"))
params = partial(asking.params, max_tokens=8)


@contextmanager
def async_scheduling():
    """vLLM turns it off on a CPU, where it gains nothing; turn it on again."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"]

    def check_and_update_config(cls, vllm_config):
        original.__get__(None, cls)(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def llm(request, llama):
    options = {"dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 8}
    options |= {"block_size": 32, "max_logprobs": -1}
    if request.param:
        with async_scheduling(), local_engine(llama, async_scheduling=True, **options) as llm:
            assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
            yield llm
    else:
        with local_engine(llama, **options) as llm:
            yield llm


@pytest.mark.parametrize("lag", [0, 1], ids=["sync", "async"])
def test_a_policy_closes_a_loop_from_the_first_token_that_no_step_has_begun(
    lag, llama, ref, tmp_path, monkeypatch
):
    install(tmp_path, monkeypatch)
    ahead = async_scheduling() if lag else nullcontext()
    with ahead, local_engine(llama, async_scheduling=bool(lag), **policies.OPTIONS) as llm:
        plain = policies.params(max_tokens=8)
        prompts = [policies.PROMPT, *policies.OTHERS]
        before = run(llm, prompts, plain)
        outputs = run(llm, prompts, [policies.following(max_tokens=8), plain, plain])
    policies.check_closed_loop(outputs[0], ref, lag)
    for one, other in zip(outputs[1:], before[1:], strict=True):
        policies.same(one, other)


def test_it_is_runner_v2(llm):
    assert llm.collective_rpc("scope_describe")[0]["runner"] == "V2"


def test_chunked_mixed_and_repeated_requests(llm, ref):
    ids = [range(5, 75), range(90, 100), [7], range(200, 240)]
    specs = [READ_ALL, None, READ_ALL, READ_ALL]
    for _ in range(2):  # the second time the prefix cache has them all
        outputs = run(llm, ids, [params(spec) for spec in specs])
        assert outputs[1].scope is None
        check([o for i, o in enumerate(outputs) if specs[i]], ref)


def test_rows_of_a_codec_decode_to_what_it_makes_of_the_raw_rows(llm):
    """`resid_pre` of layer 1 is `resid_post` of layer 0, raw and of the same run."""
    ids = [range(5, 75), range(90, 100), [7], range(200, 240)]
    names = ["int8", None, "topk8", "full8"]
    specs = [
        scope(
            *([Read("resid_post", layers=[0], codec=name)] if name else []),
            Read("resid_pre", layers=[1]),
        )
        for name in names
    ]
    outputs = run(llm, ids, [params(spec) for spec in specs])
    for name, output in zip(names, outputs, strict=True):
        result = output.scope
        rows = result["resid_pre", 1]
        assert result.status == "complete"
        assert len(rows) == len(output.prompt_token_ids) + 7
        if name:
            codec = result.encoded("resid_post", 0).codec
            assert codec.codec == name
            expected = codec.decode(codec.encode(rows), len(rows))
            assert torch.equal(result["resid_post", 0], expected)


def test_three_completions(llm, ref):
    outputs = run(llm, [range(30, 50)], params(READ_ALL, n=3, temperature=1.0))
    assert len(outputs[0].outputs) == 3
    check(outputs, ref)


def test_hooks_see_and_change_their_own_requests_rows(llm, ref):
    seen = {}

    def add(ctx, rows):
        seen.update(zip(ctx.positions, rows, strict=True))
        return rows + 1

    hooked = {"apply_hooks": [Hook(add, [1])], "output_residual_stream": [1]}
    outputs = run(llm, [range(5, 75), range(90, 130)], [params(hooked), params(READ_ALL)])
    check(outputs[1:], ref)
    (rows,) = outputs[0].activations["residual_stream"]
    before = torch.stack([seen[position] for position in range(len(rows))])
    assert torch.equal(rows, before + 1)
    ids = [*range(5, 75), *outputs[0].outputs[0].token_ids][:-1]
    torch.testing.assert_close(before, ref.streams(ids)[2], rtol=1e-3, atol=1e-3)


def test_probes_equal_float64_and_one_stops_its_request(llm):
    sites = ["resid_post"]
    probes = probing.every_kind(dict.fromkeys(sites, 128))
    ids = [range(5, 75), range(90, 100), range(200, 240)]
    specs = [scope(*probes, *map(Read, sites)), None, scope(*probes, *map(Read, sites))]
    outputs = run(llm, ids, [params(spec) for spec in specs])
    for output in (outputs[0], outputs[2]):
        probing.check(output.scope, probes, probing.TOLERANCE[torch.float32])
    stop = Probe(
        probing.numbers(1, 128), layer=1, name="p", threshold=-1e30, action="stop",
        tokens="generated",
    )  # fmt: skip
    plain, stopped, beside = run(llm, [ids[0]] * 3, [params(), params(scope(stop)), params()])
    assert stopped.outputs[0].finish_reason == "stop"
    # The verdict is on the first generated token; the next one is the last.
    assert stopped.outputs[0].token_ids == plain.outputs[0].token_ids[:2]
    assert beside.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_gated_edit_and_a_plain_request(llm, ref):
    w, v = torch.randn(128), torch.randn(128)
    gate = Gate(w, 0, kind="sigmoid", sharpness=0.3, name="g")
    asked = scope(Add(v, layer=1, gate=gate), Read("resid_post"))
    ids = [range(5, 75), range(90, 130)]
    edited, plain = run(llm, ids, [params(asked), params(READ_ALL)])
    check([plain], ref)
    seen = []

    def look(x):
        seen[:] = [torch.sigmoid(0.3 * (x @ w))]
        return x

    found = [*ids[0], *edited.outputs[0].token_ids][:-1]
    edits = [("resid_post", 0, look), ("resid_post", 1, lambda x: x + seen[0][:, None] * v)]
    streams, _ = ref.edited(found, edits)
    assert edited.scope.status == "complete"
    for stream in edited.scope.keys():
        torch.testing.assert_close(edited.scope[stream], streams[stream], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(edited.scope.scores["g"], seen[0], rtol=1e-3, atol=1e-3)


def test_gates_with_states_and_a_plain_request(llm, ref):
    kinds = ("pid", "latch")
    ids = [range(5, 75), range(90, 130), range(10, 20)]
    asked = [scope(states.asked(kind), Read("resid_post")) for kind in kinds]
    *found, plain = run(
        llm, ids, [*(params(one, max_tokens=12) for one in asked), params(READ_ALL)]
    )
    check([plain], ref)
    for kind, prompt, output in zip(kinds, ids, found, strict=False):
        edits, seen = states.looped(kind, len(prompt))
        streams, _ = ref.edited([*prompt, *output.outputs[0].token_ids][:-1], edits)
        assert output.scope.status == "complete"
        for stream in output.scope.keys():
            torch.testing.assert_close(output.scope[stream], streams[stream], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(output.scope.scores["g"], seen[0], rtol=1e-3, atol=1e-3)


def test_a_request_that_only_probes_takes_kv_from_the_cache(llm):
    asked = params(scope(Probe(probing.numbers(2, 128), layer=1, name="p")))
    first, second = (run(llm, [range(310, 390)], asked)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    torch.testing.assert_close(first.scope.scores["p"], second.scope.scores["p"])
    assert second.scope.status == "complete"


def test_cells_that_one_request_stands_for(llm, ref):
    sweeps.test_logprob_and_kl(llm, ref)


def test_idle_steps_do_nothing(llm):
    def counters():
        return llm.collective_rpc("scope_counters")[0]

    before = counters()
    run(llm, [range(9), range(12)], params())
    after = counters()
    assert after["steps"] > before["steps"]
    for what in ("steps_planned", "requests_planned", "uploads"):
        assert after[what] == before[what]


@pytest.mark.long
def test_preemption_and_recompute(llama, ref):
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3,
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        ids = [range(i, i + 30) for i in (10, 50, 90)]
        outputs = run(llm, ids, params(READ_ALL, max_tokens=60))
    assert preempted, "the cache was large enough; the test shows nothing"
    check(outputs, ref)


def test_states_with_drafts_are_those_without(llama, ref):
    """The host does not know which drafts were accepted."""
    ids, scale = [[1, 2, 3, 4] * 8, [11, 12] * 10], 0.05
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    options = {"dtype": "float32", "max_num_seqs": 4, "speculative_config": drafts}
    with local_engine(llama, **options) as llm:
        outputs = run(llm, ids, params(scope(states.asked("pid", scale)), max_tokens=40))
        assert llm.collective_rpc("scope_describe")[0]["limits"]["optimistic"]
        counted = llm.collective_rpc("scope_counters")[0]
    assert counted["steps"] < 40, "no draft was accepted; the test shows nothing"
    for prompt, output in zip(ids, outputs, strict=True):
        edits, seen = states.looped("pid", len(prompt), scale)
        _, logits = ref.edited([*prompt, *output.outputs[0].token_ids][:-1], edits)
        tokens = logits[len(prompt) - 1 :].argmax(-1).tolist()
        assert list(output.outputs[0].token_ids) == tokens
        torch.testing.assert_close(output.scope.scores["g"], seen[0], rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_a_request_that_was_preempted_replays_its_states(llama, ref):
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        ids = [range(i, i + 30) for i in (10, 50, 90)]
        outputs = run(llm, ids, params(scope(states.asked("pid")), max_tokens=60))
    assert preempted, "the cache was large enough; the test shows nothing"
    for prompt, output in zip(ids, outputs, strict=True):
        edits, seen = states.looped("pid", len(prompt))
        ref.edited([*prompt, *output.outputs[0].token_ids][:-1], edits)
        torch.testing.assert_close(output.scope.scores["g"], seen[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["per_request", "sharded"])
def test_rows_in_files_are_those_in_memory(llama, tmp_path, layout):
    files = {"root": str(tmp_path), "layout": layout, "threads": 2}
    reads = [Read(site, to=to) for site in ("resid_post", "embed") for to in ("memory", FILES)]
    with local_engine(
        llama, dtype="float32", max_num_batched_tokens=32, max_num_seqs=8, block_size=32,
        additional_config={"scope": {"sinks": {FILES: files}}},
    ) as llm:  # fmt: skip
        ids = [range(5, 75), range(20), [7] * 9]
        outputs = run(llm, ids, params(scope(*reads), n=2, temperature=1.0))
    capture = vllm_scope.open(tmp_path)
    assert len(capture) == 6
    for output in outputs:
        found = {r.manifest.child: r for r in capture.find(request_id=output.request_id)}
        for completion in output.outputs:
            request = found[completion.index]
            assert completion.scope.manifests[FILES].status == request.status == "ok"
            assert request.output_ids.tolist() == list(completion.token_ids)
            assert request.keys() == sorted(completion.scope.keys())
            for stream in request.keys():
                ours, theirs = request[stream], completion.scope[stream]
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.long
def test_rows_inside_the_attention_and_of_what_is_added(llama, ref):
    sites = ["embed", "resid_post", *attention.SITES, *branches.SITES]
    with local_engine(
        llama, dtype="float32", max_num_batched_tokens=32, max_num_seqs=8, block_size=32,
        additional_config={"scope": {"sites": sites}},
    ) as llm:  # fmt: skip
        ids = [range(5, 55), range(20), [7] * 9]
        everything = scope(*map(Read, sites))
        outputs = run(llm, ids, [params(everything), params(READ_ALL), params()])
    check(outputs[1:2], ref)
    for of in (attention, branches):
        of.check(outputs[0].scope, list(ids[0]), list(outputs[0].outputs[0].token_ids), ref)
