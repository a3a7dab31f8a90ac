"""Sweeps on an AsyncLLM: beside other requests, and when they are cancelled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from tests.checkpoints import reference
from tests.conftest import TOYWORLD, async_engine
from vllm_scope import KL, LogitDifference, Logprob, ScopeError, Sweep, sweep_async
from vllm_scope.engine.frontend.sweeping import Sweeping
from vllm_scope.request.answers import NO_LOGPROBS
from vllm_scope.results.inbox import inbox
from vllm_scope.sweeps import yielding

ASKED, OTHER = (f"Q: What is the capital of {name}? A:" for name in ("Ritova", "Kimar"))
METRIC = LogitDifference(" Sotburg", " Rindos")


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(loop):
    async def start():
        return async_engine(TOYWORLD, max_num_seqs=64, max_logprobs=-1)

    engine = loop.run(start())
    yield engine
    engine.shutdown()


async def chat(engine, name, num_tokens=40):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = [out async for out in engine.generate("The capital of Ritova", params, name)]
    return list(outputs[-1].outputs[0].token_ids)


async def counted(engine):
    return (await engine.collective_rpc("scope_counters"))[0]["requests"]


def test_cells_equal_hooks_and_another_request_goes_on(engine, loop):
    alone = loop.run(chat(engine, "alone"))
    cells = []

    async def both():
        sweep = Sweep(OTHER, metric=METRIC)
        swept = sweep_async(engine, ASKED, sweep, on_cell=cells.append, progress=False)
        return await asyncio.gather(swept, chat(engine, "beside"))

    table, beside = loop.run(both())
    assert beside == alone
    assert len(cells) == table.values.size == 6 * 12
    ref, tokenizer = reference(TOYWORLD, torch.float32), engine.get_tokenizer()
    asked, other = tokenizer.encode(ASKED), tokenizer.encode(OTHER)
    a, b = (tokenizer.encode(t, add_special_tokens=False)[0] for t in (METRIC.a, METRIC.b))
    streams, _ = ref.edited(other, [])
    for layer in range(6):
        for p in range(12):

            def patch(x, p=p, row=streams["resid_pre", layer][p]):
                x = x.clone()
                x[p] = row
                return x

            logits = ref.edited(asked, [("resid_pre", layer, patch)])[1][-1]
            assert table.values[0, layer, p] == pytest.approx(
                float(logits[a] - logits[b]), abs=1e-3
            )
    country = asked.index(next(t for t, u in zip(asked, other, strict=True) if t != u))
    found = table.normalised().values[0]
    assert found[0, country] == pytest.approx(1, abs=1e-3)
    assert found[5, -1] > 0.9


def test_a_cancelled_sweep_leaves_nothing(engine, loop):
    cells = []

    async def cancelled():
        sweep = Sweep(OTHER, metric=METRIC)
        task = asyncio.ensure_future(
            sweep_async(engine, [ASKED] * 4, sweep, on_cell=cells.append, progress=False)
        )
        while len(cells) < 10:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await chat(engine, "after")  # its steps tell the workers who has ended
        return await counted(engine)

    assert loop.run(cancelled()) == 0
    assert not engine.output_processor.has_unfinished_requests()
    assert len(cells) < 4 * 72
    assert len(inbox()) == 0


def test_a_sweep_that_is_cancelled_while_cells_are_added_leaves_nothing(engine, loop):
    async def cancelled():
        sweep = Sweep(OTHER, metric=METRIC)
        task = asyncio.ensure_future(sweep_async(engine, [ASKED] * 4, sweep, progress=False))
        while len(engine.output_processor.request_states) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await chat(engine, "after adding")
        return await counted(engine)

    assert loop.run(cancelled()) == 0
    assert not engine.output_processor.has_unfinished_requests()
    assert len(inbox()) == 0


def test_at_most_a_share_of_the_batch_is_cells(engine, loop):
    async def watched():
        sweep = Sweep(OTHER, metric=METRIC)
        swept = sweep_async(engine, [ASKED] * 4, sweep, progress=False, share=0.28)
        task, most = asyncio.ensure_future(swept), 0
        while not task.done():
            most = max(most, await counted(engine))
        return most, (await task).errors

    most, errors = loop.run(watched())
    assert 4 < most <= 17  # of 64
    assert not errors


@pytest.mark.long
def test_a_sweep_yields_to_other_requests_while_they_run(engine, loop):
    """Two sweeps, and for some time a request."""

    async def watched():
        sweep = Sweep(OTHER, metric=METRIC)
        # Long enough that many counts are taken after the request has ended.
        swept = [sweep_async(engine, [ASKED] * 16, sweep, progress=False) for _ in range(2)]
        tasks, most = [asyncio.ensure_future(one) for one in swept], [0, 0]
        while await counted(engine) < 32:
            await asyncio.sleep(0)
        beside = asyncio.ensure_future(chat(engine, "beside sweeps", 200))
        num_tokens = 0
        while not all(task.done() for task in tasks):
            states = engine.output_processor.request_states.items()
            other = next((one for name, one in states if "beside" in name), None)
            num_tokens = len(other.detokenizer.output_token_ids) if other else num_tokens
            running = await counted(engine)
            if beside.done():
                most[1] = max(most[1], running)
            elif num_tokens > 30:  # the cells that were there when it came have ended
                most[0] = max(most[0], running)
        await beside
        return most, [(await task).errors for task in tasks]

    (with_it, after), errors = loop.run(watched())
    assert with_it <= 2 * 16 + 1
    assert 32 < after <= 2 * 32
    assert errors == [{}, {}]


@pytest.mark.long
@pytest.mark.parametrize(("num_tokens", "together"), [(yielding.TOKENS, 16), (1, 1)])
def test_a_sweep_hears_of_other_front_ends_with_its_answers(
    num_tokens, together, engine, loop, monkeypatch
):
    """This process is made to look at none of its own requests."""
    monkeypatch.setattr(Sweeping, "_others", lambda self: False)
    monkeypatch.setattr(yielding, "TOKENS", num_tokens)

    async def watched():
        cells, most = [], 0
        beside = asyncio.ensure_future(chat(engine, "beside", 200))
        swept = sweep_async(
            engine, [ASKED] * 6, Sweep(OTHER, metric=METRIC), progress=False, on_cell=cells.append
        )
        task = asyncio.ensure_future(swept)
        while not beside.done():
            before = len(cells)
            running = await counted(engine)
            if before > 32:  # of the cells that were sent at first, the last have answered
                most = max(most, running)
        num_beside, after = len(cells), 0
        while not task.done():
            after = max(after, await counted(engine))
        return most, num_beside, after, (await task).errors

    most, num_beside, after, errors = loop.run(watched())
    assert most <= together
    assert after > 16, "the sweep still yields to requests that have ended"
    assert 32 < num_beside < 6 * 72
    assert errors == {}


def test_a_sweep_ends_although_other_requests_never_do(engine, loop):
    """And has few cells in the engine at a time."""

    async def watched():
        sweep, most = Sweep(OTHER, metric=METRIC), 0
        alone = await sweep_async(engine, ASKED, sweep, progress=False)
        beside = asyncio.ensure_future(chat(engine, "beside"))
        await asyncio.sleep(0)
        task = asyncio.ensure_future(sweep_async(engine, ASKED, sweep, progress=False))
        while not task.done():
            if beside.done():
                beside = asyncio.ensure_future(chat(engine, "beside"))
            most = max(most, await counted(engine))
        await beside
        return most, alone.values, (await task).values

    most, alone, beside = loop.run(watched())
    assert most <= 16
    np.testing.assert_allclose(beside, alone, atol=1e-5)


def test_sweeps_and_log_probabilities_beside_each_other_are_as_they_are_alone(engine, loop):
    """A step then has rows of several lengths: of named tokens, of the likeliest, and of all."""

    def swept(metric):
        return sweep_async(engine, ASKED, Sweep(OTHER, metric=metric), progress=False)

    async def likeliest(num):
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=num)
        outputs = [out async for out in engine.generate(ASKED, params, f"likeliest {num}")]
        each = outputs[-1].outputs[0].logprobs
        assert len(each) == 40
        return [{token: one.logprob for token, one in found.items()} for found in each]

    async def together(*calls):
        return await asyncio.gather(*calls)

    metrics = Logprob(0), METRIC, KL()
    alone = [loop.run(swept(metric)) for metric in metrics]
    wanted = [loop.run(likeliest(num)) for num in (0, 3)]
    *tables, none, three = loop.run(together(*map(swept, metrics), likeliest(0), likeliest(3)))
    for one, other in zip(tables, alone, strict=True):
        assert not one.errors
        np.testing.assert_allclose(one.values, other.values, atol=1e-4)
    for one, other in zip((none, three), wanted, strict=True):
        assert [found.keys() for found in one] == [found.keys() for found in other]
        for found, same in zip(one, other, strict=True):
            assert found == pytest.approx(same, abs=1e-4)


def test_an_edit_that_overflows_fails_its_cell_alone(engine, loop):
    rows = np.zeros((6, 12, 256), np.float32)
    rows[2, 3] = 3e38
    sweep = Sweep(rows, metric=METRIC, mode="add", scale=100.0)
    table = loop.run(sweep_async(engine, ASKED, sweep, progress=False))
    assert list(table.errors) == [(0, 2, 3)]
    assert np.isnan(table.values[0, 2, 3])
    assert np.isnan(table.values).sum() == 1


def test_an_error_of_the_callback_ends_the_sweep(engine, loop):
    def fail(cell):
        raise ScopeError("enough")

    with pytest.raises(ScopeError, match="enough"):
        loop.run(sweep_async(engine, ASKED, Sweep(OTHER, metric=METRIC), on_cell=fail))
    assert not engine.output_processor.has_unfinished_requests()


@pytest.mark.long
def test_a_sweep_beside_drafts_fails_its_cells_alone(loop):
    """V1 returns no log-probabilities of named tokens with drafts."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}

    async def beside():
        from vllm import SamplingParams

        engine = async_engine(TOYWORLD, max_num_seqs=16, speculative_config=drafts)
        params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, logprobs=3)

        async def chat(name):
            outputs = engine.generate("The capital of Ritova is", params, name)
            return [len(found) for found in [out async for out in outputs][-1].outputs[0].logprobs]

        try:
            alone = await chat("alone")
            swept = sweep_async(engine, ASKED, Sweep(OTHER, metric=METRIC), progress=False)
            sizes, found = await asyncio.gather(chat("beside"), swept, return_exceptions=True)
            return alone, sizes, found, engine.errored
        finally:
            engine.shutdown()

    alone, sizes, found, errored = loop.run(beside())
    assert not errored
    assert sizes == alone
    if isinstance(found, ScopeError):  # the prompt's own request
        assert str(found).endswith(NO_LOGPROBS)
    else:
        assert set(found.errors.values()) == {NO_LOGPROBS}
