"""Cells of a sweep equal single requests, and Hugging Face's model with hooks at these places."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import vllm_scope
from tests.asking import counters
from tests.conftest import local_engine, long_except
from vllm_scope import (
    KL,
    Ablate,
    Add,
    LogitDifference,
    Logprob,
    Read,
    Replace,
    ScopeError,
    SpecError,
    Sweep,
    scope,
)
from vllm_scope.analysis import patching
from vllm_scope.engine.core import variants
from vllm_scope.engine.core.scheduler import admission_of
from vllm_scope.engine.frontend import sweep_bounds
from vllm_scope.program.operations import Cost

SITES = ["embed", "resid_mid", "resid_post", "z", "q", "k", "v", "attn_out", "mlp_out"]
ENGINE = {
    "dtype": "float32", "max_logprobs": -1, "max_num_seqs": 8, "block_size": 32,
    "additional_config": {"scope": {"sites": SITES}},
}  # fmt: skip
PROMPTS = [list(range(30, 42)), list(range(100, 109)), list(range(200, 240))]
SOURCES = [list(range(60, 72)), list(range(130, 139)), list(range(300, 340))]
A, B = [5, 6, 7], [50, 60, 70]
METRIC = LogitDifference(A, B)


@pytest.fixture(scope="module")
def llm(llama):
    with local_engine(llama, **ENGINE) as llm:
        yield llm


def texts(ids):
    return [{"prompt_token_ids": each} for each in ids]


def run(llm, sweep, prompts=PROMPTS, **options):
    return vllm_scope.sweep(llm, texts(prompts), sweep, progress=False, **options)


def single(llm, ids, actions, tokens):
    """The metric of one request by LLM.generate."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, logprob_token_ids=list(tokens),
        extra_args=scope(*actions) if actions else None,
    )  # fmt: skip
    (out,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    found = out.outputs[0].logprobs[0]
    return found[tokens[0]].logprob - found[tokens[1]].logprob


def rows_of(llm, ids, site):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, detokenize=False, extra_args=scope(Read(site)))
    (out,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    return out.scope


def at(position, function):
    def edit(x):
        x = x.clone()
        x[position] = function(x[position])
        return x

    return edit


def reference_of(ref, ids, edits, i):
    logits = ref.edited(ids, edits)[1][-1].double()
    return float(logits[A[i]] - logits[B[i]])


MODES = {
    "patch": (lambda row, p, at: Replace(row, positions=[p], **at), lambda row: lambda x: row),
    "ablate": (
        lambda row, p, at: Ablate(row, tokens=[p], **at),
        lambda row: lambda x: x - (x @ row) * row / (row @ row),
    ),
    "add": (
        lambda row, p, at: Add(row, scale=0.5, tokens=[p], **at),
        lambda row: lambda x: x + row / 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "site",
    long_except(["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"], "resid_post"),
)
@pytest.mark.parametrize("mode", MODES)
def test_cells_equal_hooks_and_single_requests(mode, site, llm, ref):
    """Three prompts of different lengths, one of them longer than a block of KV."""
    table = run(
        llm,
        Sweep(
            texts(SOURCES), metric=METRIC, site=site, mode=mode, scale=0.5 if mode == "add" else 1
        ),
    )
    assert table.values.shape == (3, 3, 40)
    ask, mean = MODES[mode]
    for i, (ids, source) in enumerate(zip(PROMPTS, SOURCES, strict=True)):
        streams, logits = ref.edited(source, [])
        assert table.source[i] == pytest.approx(
            float(logits[-1][A[i]] - logits[-1][B[i]]), abs=1e-4
        )
        assert table.plain[i] == pytest.approx(reference_of(ref, ids, [], i), abs=1e-4)
        assert np.isnan(table.values[i, :, len(ids) :]).all()
        scope_rows = rows_of(llm, source, site)
        for layer, p in product(range(3), {0, 3, len(ids) - 2, len(ids) - 1}):
            wanted = reference_of(
                ref, ids, [(site, layer, at(p, mean(streams[site, layer][p])))], i
            )
            assert table.values[i, layer, p] == pytest.approx(wanted, abs=1e-4)
            action = ask(scope_rows[site, layer][p], p, {"site": site, "layer": layer})
            alone = single(llm, ids, [action], (A[i], B[i]))
            assert table.values[i, layer, p] == pytest.approx(alone, abs=1e-5)
    assert not np.allclose(table.values[0, :, :12], table.plain[0], atol=1e-3)
    assert not table.errors


def test_one_cell_at_a_time_is_a_single_request_bit_for_bit(llm):
    sweep = Sweep(texts(SOURCES[:1]), metric=LogitDifference(5, 50), layers=[0, 2])
    table = run(llm, sweep, PROMPTS[:1], share=0.01)
    rows = rows_of(llm, SOURCES[0], "resid_pre")
    # Two cells are in the engine at once; with their requests together, the batch is the same.
    from vllm import SamplingParams

    cells = [(layer, p) for p in range(12) for layer in (0, 2)]
    params = [
        SamplingParams(
            temperature=0, max_tokens=1, detokenize=False, logprob_token_ids=[5, 50],
            extra_args=scope(Replace(rows["resid_pre", layer][p], positions=[p], site="resid_pre",
                                     layer=layer)),
        )
        for layer, p in cells
    ]  # fmt: skip
    for pair in range(0, len(cells), 2):
        outs = llm.generate(texts(PROMPTS[:1] * 2), params[pair : pair + 2], use_tqdm=False)
        for (layer, p), out in zip(cells[pair : pair + 2], outs, strict=True):
            found = out.outputs[0].logprobs[0]
            assert table.values[0, [0, 2].index(layer), p] == found[5].logprob - found[50].logprob


@pytest.mark.parametrize("site", ["z", "q", "v"])
def test_a_head_is_patched_alone(site, llm, ref):
    table = run(
        llm, Sweep(texts(SOURCES), metric=METRIC, site=site, heads="all", positions=[-1, 4])
    )
    heads, size = rows_of(llm, [1], site)[site, 0].shape[1:]
    assert table.values.shape == (3, 3, 2, heads)
    for i, (ids, source) in enumerate(zip(PROMPTS, SOURCES, strict=True)):
        streams, _ = ref.edited(source, [])
        for layer, (c, p), head in product(range(3), enumerate([-1, 4]), range(heads)):
            own = slice(head * size, (head + 1) * size)

            def patch(x, p=p, own=own, row=streams[site, layer][p]):
                x = x.clone()
                x[p, own] = row[own]
                return x

            wanted = reference_of(ref, ids, [(site, layer, patch)], i)
            assert table.values[i, layer, c, head] == pytest.approx(wanted, abs=1e-4)


def test_all_positions_of_a_head_at_once_and_transformerlens_names(llm, ref):
    found = patching.get_act_patch_attn_head_out_all_pos(
        llm, texts(PROMPTS), texts(SOURCES), METRIC, progress=False
    )
    size = rows_of(llm, [1], "z")["z", 0].shape[2]
    wanted = torch.zeros(found.shape, dtype=torch.float64)
    for i, (ids, source) in enumerate(zip(PROMPTS, SOURCES, strict=True)):
        streams, _ = ref.edited(source, [])
        for layer, head in product(*map(range, found.shape)):
            own = slice(head * size, (head + 1) * size)

            def patch(x, own=own, rows=streams["z", layer]):
                x = x.clone()
                x[:, own] = rows[:, own]
                return x

            wanted[layer, head] += reference_of(ref, ids, [("z", layer, patch)], i) / len(PROMPTS)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_given_rows_of_every_shape(llm, ref):
    row = torch.randn(128, generator=torch.Generator().manual_seed(0))
    for shape in ((128,), (3, 128), (3, 2, 128), (1, 3, 2, 128)):
        table = run(llm, Sweep(row.expand(shape), metric=METRIC, mode="add", positions=[2, -1]),
                    PROMPTS[:1] * 3)  # fmt: skip
        for i, layer, (c, p) in product(range(3), range(3), enumerate([2, -1])):
            wanted = reference_of(
                ref, PROMPTS[0], [("resid_pre", layer, at(p, lambda x: x + row))], i
            )
            assert table.values[i, layer, c] == pytest.approx(wanted, abs=1e-4)
        assert np.isnan(table.source).all()
    together = run(llm, Sweep(row, metric=METRIC, mode="ablate", positions=[2, -1], together=True))
    for i, layer in product(range(3), range(3)):
        mean = MODES["ablate"][1](row)
        edits = [("resid_pre", layer, at(2, mean)), ("resid_pre", layer, at(-1, mean))]
        wanted = reference_of(ref, PROMPTS[i], edits, i)
        assert together.values[i, layer] == pytest.approx(wanted, abs=1e-4)


def test_logprob_and_kl(llm, ref):
    """Four cells, which one request stands for."""
    base = {"layers": [1], "positions": [3, 5, 7, 9]}
    row = torch.randn(128, generator=torch.Generator().manual_seed(1))
    clean = ref.edited(PROMPTS[0], [])[1][-1].double().log_softmax(0)
    each = [
        ref.edited(PROMPTS[0], [("resid_pre", 1, at(p, lambda x: row))])[1][-1]
        for p in base["positions"]
    ]
    edited = torch.stack(each).double().log_softmax(1)
    found = run(llm, Sweep(row, metric=Logprob(7), **base), PROMPTS[:1])
    np.testing.assert_allclose(found.values[0, 0], edited[:, 7], atol=1e-4)
    found = run(llm, Sweep(row, metric=KL(), **base), PROMPTS[:1])
    wanted = (clean.exp() * (clean - edited)).sum(1)
    assert wanted.min() > 1e-3
    np.testing.assert_allclose(found.values[0, 0], wanted, rtol=1e-3)
    assert found.plain.item() == 0


def test_a_cell_that_cannot_be_leaves_the_table_its_others(llm):
    rows = torch.randn(3, 9, 128, generator=torch.Generator().manual_seed(2))
    rows[1, 4] = 0
    seen, asked = [], {"metric": LogitDifference(5, 50), "mode": "ablate"}
    table = run(llm, Sweep(rows, **asked), PROMPTS[1:2], on_cell=seen.append)
    assert list(table.errors) == [(0, 1, 4)]
    assert table.errors[0, 1, 4].startswith("Ablate.direction is zero")
    assert np.argwhere(np.isnan(table.values)).tolist() == [[0, 1, 4]]
    assert len(seen) == table.values.size
    rows[1, 4] = 1
    whole = run(llm, Sweep(rows, **asked), PROMPTS[1:2]).values
    others = ~np.isnan(table.values)
    np.testing.assert_allclose(table.values[others], whole[others], rtol=0, atol=1e-5)


def test_a_sweep_of_kl_has_few_cells_in_the_engine(llm, monkeypatch):
    """The tiny model's vocabulary stands for a large one."""
    size, most, step = llm.llm_engine.model_config.get_vocab_size(), [], llm.llm_engine.step

    def watched():
        most.append(llm.llm_engine.get_num_unfinished_requests())
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", watched)
    sweep = Sweep(torch.ones(128), metric=KL(), layers=[1])
    wanted = run(llm, sweep, PROMPTS[:1])
    assert max(most) > 2
    most.clear()
    monkeypatch.setattr(sweep_bounds, "MAX_LOGPROBS", 2 * size + 1)
    found = run(llm, sweep, PROMPTS[:1])
    assert max(most) == 2
    np.testing.assert_allclose(found.values, wanted.values, rtol=0, atol=1e-5)


def test_an_ended_sweep_leaves_nothing(llm):
    sweep, seen = Sweep(texts(SOURCES), metric=METRIC), []

    def stop(cell):
        seen.append(cell)
        if len(seen) == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(llm, sweep, on_cell=stop)
    assert not llm.llm_engine.has_unfinished_requests()
    assert counters(llm)["requests"] == 0
    admission = admission_of(llm.llm_engine.engine_core.engine_core.scheduler)
    assert not admission.waiting
    assert admission.held == Cost()
    assert len(seen) == 20
    # A request after it gets its own answer, and the same sweep its values.
    plain = run(llm, sweep).plain
    assert single(llm, PROMPTS[0], [], (A[0], B[0])) == pytest.approx(plain[0], abs=1e-5)


def test_who_ends_all_requests_is_told_of_those_that_the_front_end_knows(llm, monkeypatch):
    """As a pause does, and a shutdown."""
    from vllm.v1.request import RequestStatus

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    step, ended = llm.llm_engine.step, []

    def watched():
        found = step()
        if len(scheduler.requests) > 4:
            ended.extend(scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED))
            raise ScopeError("paused")
        return found

    monkeypatch.setattr(llm.llm_engine, "step", watched)
    row = torch.ones(128)
    with pytest.raises(ScopeError, match="paused"):
        run(llm, Sweep(row, metric=Logprob(5)), PROMPTS[:1])
    names = [request.request_id for request in ended]
    assert names
    assert not [name for name in names if "." in name], "variants are EngineCore's"
    assert len(set(names)) == len(names)
    assert not variants._running.of(scheduler).groups
    assert not scheduler.requests


def test_cells_arrive_while_it_runs(llm):
    cells = []
    table = run(llm, Sweep(texts(SOURCES), metric=METRIC), on_cell=cells.append)
    assert len(cells) == 3 * sum(map(len, PROMPTS))
    for cell in cells:
        assert table.values[cell.prompt, cell.layer, cell.position] == cell.value
        assert cell.head is None


def test_cells_share_the_blocks_of_kv_before_their_position(llm, monkeypatch):
    """Blocks have 32 tokens."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    num_cached, schedule = {}, scheduler.schedule

    def watched(*args, **kwargs):
        output = schedule(*args, **kwargs)
        num_cached.update(
            {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        )
        return output

    monkeypatch.setattr(scheduler, "schedule", watched)
    row = torch.randn(128, generator=torch.Generator().manual_seed(7))
    run(llm, Sweep(row, metric=Logprob(5), layers=[0], positions=[31, 32, 39]), PROMPTS[2:])
    assert list(num_cached.values())[1:] == [0, 32, 32]
    assert len({name.rsplit(".", 1)[0] for name in num_cached}) == 2, "one request is three cells"


def test_operators_monitors_do_not_change_cells(llm):
    sweep = Sweep(texts(SOURCES), metric=METRIC, layers=[1], positions=[0, -1])
    without = run(llm, sweep)
    monitor = {"weight": [1.0] * 128, "layers": [2], "threshold": -1e30}
    vllm_scope.set_monitors(llm, {"low": monitor})
    try:
        found = run(llm, sweep)
    finally:
        vllm_scope.set_monitors(llm, {})
    np.testing.assert_allclose(found.values, without.values, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.plain, without.plain, rtol=0, atol=1e-5)


def test_what_is_refused(llm):
    with pytest.raises(SpecError, match=r"Sweep.source\[0\] has 9 tokens and prompts\[0\] has 12"):
        run(llm, Sweep(texts(SOURCES[1:]), metric=Logprob(5)), PROMPTS[:2])
    with pytest.raises(SpecError, match=r"this model has layers 0 to 2"):
        run(llm, Sweep(texts(SOURCES), metric=METRIC, layers=[7]))
    with pytest.raises(SpecError, match=r"prompts\[1\] has 9 tokens"):
        run(llm, Sweep(texts(SOURCES), metric=METRIC, positions=[10]))
    with pytest.raises(SpecError, match="has no tokenizer"):
        run(llm, Sweep("a text", metric=METRIC))
    with pytest.raises(SpecError, match="has the shape"):
        run(llm, Sweep(torch.zeros(7), metric=METRIC))
    with pytest.raises(
        SpecError, match=r"the token 99999 for prompts\[0\]; the vocabulary has 0 to"
    ):
        run(llm, Sweep(torch.zeros(128), metric=Logprob(99999)))
    with pytest.raises(SpecError, match="give the engine, the prompts and a Sweep"):
        vllm_scope.sweep(llm, Sweep(torch.zeros(128), metric=METRIC), PROMPTS)
    with pytest.raises(SpecError, match=r"Sweep\.source is zero, and has no dir"):
        run(llm, Sweep(torch.zeros(128), metric=METRIC, mode="ablate"))
    assert issubclass(SpecError, ScopeError)
    assert not llm.llm_engine.has_unfinished_requests()
    assert counters(llm)["requests"] == 0
