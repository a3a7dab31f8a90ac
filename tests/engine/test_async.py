"""AsyncLLM: rows stream token by token, in every output kind; clients may leave."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch

from tests.checkpoints import check_completion, reference
from tests.conftest import TOYWORLD, async_engine
from vllm_scope import Read, SpecError, scope
from vllm_scope.engine.frontend import ahead
from vllm_scope.engine.frontend import requests as frontend
from vllm_scope.engine.http.calls import EngineCalls
from vllm_scope.engine.params import TICKET

SPEC = scope(Read("resid_post", layers=[0, 5]), Read("embed"))
TEXT = "My father told me about the book Goldette. Happily, it was"


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(loop):
    async def start():
        return async_engine(TOYWORLD)

    engine = loop.run(start())
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def ref():
    return reference(TOYWORLD, torch.float32)


def params(kind="CUMULATIVE", spec=SPEC, **options):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    defaults = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    return SamplingParams(
        **(defaults | options), extra_args=spec, output_kind=RequestOutputKind[kind]
    )


async def collect(engine, parameters, name, text=TEXT):
    return [out async for out in engine.generate(text, parameters, name)]


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])
def test_each_output_carries_what_has_arrived(kind, engine, loop, ref):
    outputs = loop.run(collect(engine, params(kind), f"stream-{kind}"))
    prompt = outputs[-1].prompt_token_ids
    if kind == "CUMULATIVE":
        ids = list(outputs[-1].outputs[0].token_ids)
    else:
        ids = [t for out in outputs for t in out.outputs[0].token_ids]
    assert len(ids) == 20
    check_completion(outputs[-1].scope, prompt, ids, ref)
    if kind == "FINAL_ONLY":
        return
    sizes = [len(out.scope.positions("resid_post", 5)) for out in outputs]
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(prompt) + 19
    # Token by token: most outputs bring rows that the one before did not have.
    assert len(set(sizes)) >= len(outputs) // 2, sizes
    for out, size in zip(outputs[:-1], sizes[:-1], strict=True):
        assert out.scope.status == "streaming"
        assert out.scope["resid_post", 5].shape == (size, 256)
        assert torch.equal(out.scope["resid_post", 5], outputs[-1].scope["resid_post", 5][:size])


def test_streamed_completions_of_n_have_their_own_rows(engine, loop, ref):
    outputs = loop.run(collect(engine, params(n=3, temperature=1.0), "n3"))
    last = {c.index: c for out in outputs for c in out.outputs}
    assert sorted(last) == [0, 1, 2]
    for completion in last.values():
        assert completion.finish_reason is not None
        check_completion(
            completion.scope, outputs[-1].prompt_token_ids, list(completion.token_ids), ref
        )


def test_sixty_four_at_once_half_of_them_plain(engine, loop, ref):
    async def all_of_them():
        return await asyncio.gather(*(
            collect(engine, params(spec=SPEC if i % 2 else None, max_tokens=4 + i % 9),
                    f"many-{i}", f"{i} {TEXT}")
            for i in range(64)
        ))  # fmt: skip

    for i, outputs in enumerate(loop.run(all_of_them())):
        last = outputs[-1]
        if i % 2:
            ids = list(last.outputs[0].token_ids)
            check_completion(last.scope, last.prompt_token_ids, ids, ref)
        else:
            assert last.scope is None


def test_a_client_that_leaves_takes_its_rows_with_it(engine, loop, ref):
    from vllm_scope.results.inbox import inbox

    async def leave():
        stream = engine.generate(TEXT, params(max_tokens=300), "leaves")
        async for out in stream:
            if len(out.outputs[0].token_ids) > 3:
                break
        await stream.aclose()

    loop.run(leave())
    outputs = loop.run(collect(engine, params(), "after-leaving"))
    check_completion(
        outputs[-1].scope, outputs[-1].prompt_token_ids, list(outputs[-1].outputs[0].token_ids), ref
    )
    del outputs
    gc.collect()
    assert len(inbox()) == 0
    (counters,) = loop.run(engine.collective_rpc("scope_counters"))
    assert counters["requests"] == 0


def test_an_aborted_request_says_so_and_keeps_what_arrived(engine, loop, ref):
    async def abort():
        outputs = []
        async for out in engine.generate(TEXT, params(max_tokens=300), "aborted"):
            outputs.append(out)
            if len(outputs) == 10:
                await engine.abort("aborted")
        return outputs

    outputs = loop.run(abort())
    last = outputs[-1]
    assert last.outputs[0].finish_reason == "abort"
    assert last.scope.status == "aborted"
    assert last.scope.delivered <= last.scope.expected
    assert last.scope.dropped == last.scope.expected - last.scope.delivered
    rows = last.scope["resid_post", 0]
    ids = [*last.prompt_token_ids, *last.outputs[0].token_ids]
    expected = ref.streams(ids)[1][last.scope.positions("resid_post", 0)]
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def test_a_bad_spec_fails_its_request_only(engine, loop, ref):
    from vllm.exceptions import VLLMClientError

    async def beside():
        return await asyncio.gather(
            collect(engine, params(), "good"),
            collect(engine, params(spec=scope(Read("resid_post", layers=[99]))), "bad"),
            return_exceptions=True,
        )

    good, bad = loop.run(beside())
    assert isinstance(bad, SpecError)
    # What vLLM's server answers with HTTP 400.
    assert isinstance(bad, VLLMClientError)
    assert "this model has layers 0 to 5" in str(bad)
    last = good[-1]
    check_completion(last.scope, last.prompt_token_ids, list(last.outputs[0].token_ids), ref)


def test_monitors_set_changed_and_unset_while_requests_run_keep_their_own_weights(
    engine, loop, monkeypatch
):
    weights = {seed: torch.randn(8, 256, generator=torch.manual_seed(seed)) for seed in (1, 2)}
    bodies = {
        seed: {"m": {"weight": w[:6].tolist(), "layers": list(range(6)), "threshold": 1e30}}
        for seed, w in weights.items()
    }
    sizes, original = [], frontend.with_ticket

    def recorded(*args):
        made = original(*args)
        sizes.append(len(made.extra_args[TICKET]))
        return made

    monkeypatch.setattr(frontend, "with_ticket", recorded)
    read = scope(Read("resid_post"))

    async def whole(stream):
        async for output in stream:
            last = output
        return last

    async def work():
        running = []
        for turn, seed in enumerate([1, 2, 1, None, 2]):
            await EngineCalls(engine).set_monitors({} if seed is None else bodies[seed])
            for i in range(3):
                # Of the first, weights are not there yet; the others wait for its first output.
                stream = engine.generate(TEXT, params(spec=read, max_tokens=60), f"{turn}-{i}")
                await anext(stream)
                running.append((seed, asyncio.create_task(whole(stream))))
        held = ahead.held_by(engine.output_processor)
        await EngineCalls(engine).set_monitors({})
        assert ahead.held_by(engine.output_processor) == frozenset()
        return held, [(seed, await task) for seed, task in running]

    held, found = loop.run(work())
    assert len(held) == 1
    for seed, output in found:
        result = output.scope
        assert result.status == "complete"
        if seed is None:
            assert not result.scores
            continue
        rows = [result["resid_post", layer].double() for layer in range(6)]
        due = sum(row @ w for row, w in zip(rows, weights[seed].double(), strict=False))
        torch.testing.assert_close(result.scores["monitor/m"].double(), due, rtol=1e-4, atol=1e-3)
    # The weights have 6,144 bytes. Of three requests of one turn the later ones take none along.
    assert all(size < 2000 for size in sizes[1::3] + sizes[2::3]), sizes
