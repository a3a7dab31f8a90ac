"""vllm-probe-hook's LLM and AsyncLLM: hidden states equal the native reads."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.checkpoints import reference, row_error
from tests.conftest import MEMORY, TOYWORLD, inside_this_process, without_llvmlite
from vllm_scope import Add, ScopeError, SpecError, scope

TEXT = "My father told me about the book Goldette. Happily, it was"
ENGINE = {
    "dtype": "float32", "max_model_len": 256, "enforce_eager": True, **MEMORY,
}  # fmt: skip


def sampling(**options):
    from vllm_scope.compat.probe_hook import SamplingParams

    return SamplingParams(**({"temperature": 0, "max_tokens": 5, "ignore_eos": True} | options))


@pytest.fixture(scope="module")
def make():
    """LLMs inside this process, as many as a test wants, side by side."""
    from vllm_scope.compat.probe_hook import LLM

    made = []

    def start(**options):
        options = ENGINE | {"distributed_executor_backend": "uni"} | options
        with without_llvmlite():
            made.append(LLM(str(TOYWORLD), **options))
        return made[-1]

    with inside_this_process():
        yield start
        for llm in made:
            llm.llm_engine.engine_core.shutdown()
        made.clear()


@pytest.fixture(scope="module")
def llm(make):
    return make(layers=[1, 4], include_prefill=True)


def streams(output, completion=None):
    """Hugging Face's rows of every token, the one sampled last too."""
    completion = completion or output.outputs[0]
    ids = [*output.prompt_token_ids, *completion.token_ids]
    found = reference(TOYWORLD, torch.float32).streams(ids)
    return {layer: found[layer + 1] for layer in range(6)}, len(output.prompt_token_ids)


def with_options(llm, **options):
    """The same engine with other options: they are of requests, not of the engine."""
    from copy import copy
    from dataclasses import replace

    other = copy(llm)
    other.capture = replace(llm.capture, **options)
    return other


def test_row_i_belongs_to_output_token_i_and_the_last_has_none(llm):
    outputs = llm.generate([TEXT, f"{TEXT} a"], sampling(), use_tqdm=False)
    for output in outputs:
        rows, num_prompt = streams(output)
        assert list(output.hidden_states) == list(output.prefill_hidden) == [1, 4]
        for layer in (1, 4):
            assert output.hidden_states[layer].shape == (4, 256)
            assert row_error(output.hidden_states[layer], rows[layer][num_prompt:-1]) <= 1e-4
            assert row_error(output.prefill_hidden[layer], rows[layer][:num_prompt]) <= 1e-4
            native = output.scope["resid_post", layer]
            both = torch.cat([output.prefill_hidden[layer], output.hidden_states[layer]])
            assert torch.equal(both, native)


#: Options, and what is left of the rows: prefill, decode (None: the attribute is None).
OPTIONS = {
    "by-default": ({"include_prefill": False}, None, slice(0, 4)),
    "prefill-alone": ({"include_decode": False}, slice(0, None), None),
    "last-of-the-prompt": ({"last_prefill_token": True}, slice(-1, None), slice(0, 4)),
    "last-of-the-decode": ({"last_decode_token": True}, slice(0, None), slice(3, 4)),
    "both-last": (
        {"last_prefill_token": True, "last_decode_token": True}, slice(-1, None), slice(3, 4),
    ),
    "last-token-processed": ({"process_last_token": True}, slice(0, None), slice(0, 5)),
    "only-the-last-processed": (
        {"process_last_token": True, "last_decode_token": True}, slice(0, None), slice(4, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_options_choose_the_rows(case, llm):
    options, prefill, decode = OPTIONS[case]
    (output,) = with_options(llm, **options).generate([TEXT], sampling(), use_tqdm=False)
    rows, num_prompt = streams(output)
    for found, chosen, part in (
        (output.prefill_hidden, prefill, slice(None, num_prompt)),
        (output.hidden_states, decode, slice(num_prompt, None)),
    ):
        if chosen is None:
            assert found is None
            continue
        expected = rows[4][part][chosen]
        assert found[4].shape == expected.shape
        assert row_error(found[4], expected) <= 1e-4


def test_one_token_alone_has_no_row_unless_it_is_processed(llm):
    (output,) = llm.generate([TEXT], sampling(max_tokens=1), use_tqdm=False)
    assert output.hidden_states[1].shape == (0, 256)
    more = with_options(llm, process_last_token=True)
    (output,) = more.generate([TEXT], sampling(max_tokens=1), use_tqdm=False)
    rows, num_prompt = streams(output)
    assert row_error(output.hidden_states[1], rows[1][num_prompt:]) <= 1e-4


def test_each_of_several_completions_has_its_own(llm):
    more = with_options(llm, process_last_token=True)
    (output,) = more.generate([TEXT], sampling(n=3, temperature=1.0), use_tqdm=False)
    for completion in output.outputs:
        rows, num_prompt = streams(output, completion)
        assert row_error(completion.hidden_states[4], rows[4][num_prompt:]) <= 1e-4
    with pytest.raises(ScopeError, match=r"output\.outputs\[i\]\.hidden_states"):
        output.hidden_states[4]


def test_chats_are_captured_too(llm):
    messages = [{"role": "user", "content": "What is the capital of Qidelar?"}]
    (output,) = llm.chat(messages, sampling(), use_tqdm=False)
    rows, num_prompt = streams(output)
    assert row_error(output.hidden_states[1], rows[1][num_prompt:-1]) <= 1e-4


def test_several_llms_live_in_one_process(llm, make):
    other = make(layers="all", include_decode=True)
    (first,) = llm.generate([TEXT], sampling(), use_tqdm=False)
    (second,) = other.generate([TEXT], sampling(max_tokens=3), use_tqdm=False)
    (third,) = llm.generate([TEXT], sampling(), use_tqdm=False)
    assert list(second.hidden_states) == list(range(6))
    assert torch.equal(second.hidden_states[4], first.hidden_states[4][:2])
    assert torch.equal(third.hidden_states[4], first.hidden_states[4])


BAD = {
    "nothing": ({"include_prefill": False, "include_decode": False}, "nothing is captured"),
    "no-layers": ({"layers": []}, "is empty"),
    "not-a-bool": ({"include_prefill": "yes"}, "True or False"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_refused_before_the_model_is_loaded(case):
    from vllm_scope.compat.probe_hook import LLM

    options, words = BAD[case]
    with pytest.raises(SpecError, match=words):
        LLM("no-such-model", **options)


def test_an_edited_request_cannot_have_its_last_token_processed(llm):
    more = with_options(llm, process_last_token=True)
    edited = sampling(extra_args=scope(Add(torch.ones(256), layer=0)))
    with pytest.raises(SpecError, match="do not go together"):
        more.generate([TEXT], edited, use_tqdm=False)


def test_hidden_states_stream_token_by_token():
    from vllm_scope.compat.probe_hook import AsyncLLM

    async def main():
        llm = AsyncLLM(str(TOYWORLD), layers=[4], include_prefill=True, process_last_token=True,
                       **ENGINE)  # fmt: skip

        async def collect(text):
            found = []
            async for output in llm.generate(text, sampling(max_tokens=12)):
                found.append((output, output.hidden_states[4].clone()))
            return found

        try:
            return await asyncio.gather(*(collect(f"{TEXT}{end}") for end in ("", " not", " a")))
        finally:
            llm.shutdown()

    for outputs in asyncio.run(main()):
        last, rows = outputs[-1]
        sizes = [len(each) for _, each in outputs]
        assert len(outputs) > 6, sizes
        assert sizes == sorted(sizes)
        assert sizes[-1] == 12
        expected, num_prompt = streams(last)
        assert row_error(rows, expected[4][num_prompt:]) <= 1e-4
        for _, some in outputs[:-1]:
            assert torch.equal(some, rows[: len(some)])
        # Token by token: most outputs bring rows that the one before did not have.
        assert len(set(sizes)) >= len(outputs) // 2, sizes
