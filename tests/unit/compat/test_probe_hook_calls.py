"""vllm-probe-hook's LLM and AsyncLLM over an engine that only remembers what it was asked."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import vllm

from vllm_scope import Add, SpecError, scope
from vllm_scope.compat import EDITING, KEYS
from vllm_scope.compat.probe_hook import KEY, LLM, AsyncLLM, Options, SamplingParams, translate
from vllm_scope.request.sites import Sites

SITES = Sites(2, 4, "float32", (0, 2, 4))
LORA = object()


class Result:
    """Rows whose numbers are the token ids of their positions."""

    status, error, dropped = "complete", None, 0

    def __init__(self, token_ids, num_prompt, first):
        self.token_ids, self.num_prompt, self.first = token_ids, num_prompt, first

    def positions(self, site, layer):
        return torch.arange(self.first, len(self.token_ids) - 1)

    def __getitem__(self, stream):
        return torch.tensor(self.token_ids[self.first : -1]).float()[:, None].expand(-1, 4)


def answered(prompt, params, num_tokens=3):
    """One output, as vLLM's front-end returns it: a prompt of n tokens is answered n, n + 1, ..."""
    ids = prompt["prompt_token_ids"]
    made = [len(ids) + i for i in range(min(num_tokens, params.max_tokens))]
    options = params.extra_args[KEY]
    first = len(ids) - 1 if options.last_prefill_token else 0
    result = Result([*ids, *made], len(ids), first)
    completion = SimpleNamespace(index=0, finish_reason="length", token_ids=made, scope=result)
    output = SimpleNamespace(outputs=[completion], finished=True)
    translate({KEY: options}, SITES).decorate(output, completion)
    return output


@pytest.fixture
def calls(monkeypatch):
    calls = []

    def generate(self, prompts, sampling_params, **options):
        calls.append(options)
        if not isinstance(sampling_params, list):
            sampling_params = [sampling_params] * len(prompts)
        return [answered(*pair) for pair in zip(prompts, sampling_params, strict=True)]

    monkeypatch.setattr(vllm.LLM, "generate", generate)
    monkeypatch.setattr(vllm.LLM, "chat", generate)
    return calls


def an_llm(**options):
    llm = object.__new__(LLM)
    llm.capture = Options(**options)
    return llm


PROMPTS = [{"prompt_token_ids": [10, 11]}, {"prompt_token_ids": [20, 21, 22]}]
PARAMS = SamplingParams(max_tokens=3)


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_options_of_vllm_pass_through(method, calls):
    first, second = getattr(an_llm(include_prefill=True), method)(
        PROMPTS, PARAMS, use_tqdm=False, lora_request=LORA
    )
    assert calls == [{"use_tqdm": False, "lora_request": LORA}]
    assert first.prefill_hidden[1][:, 0].tolist() == [10, 11]
    assert second.hidden_states[0][:, 0].tolist() == [3, 4]
    assert PARAMS.extra_args is None


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        pytest.param({}, [2, 3, 4], id="appended"),
        pytest.param({"last_decode_token": True}, [4], id="alone"),
    ],
)
def test_the_last_token_is_processed_in_a_request_of_its_own(options, rows, calls):
    llm = an_llm(layers=[1], process_last_token=True, **options)
    outputs = llm.generate(PROMPTS, [PARAMS, PARAMS], lora_request=[LORA, None])
    assert calls[1] == {"lora_request": [LORA, None], "use_tqdm": False}
    assert outputs[0].hidden_states[1][:, 0].tolist() == rows
    assert outputs[0].outputs[0].hidden_states is outputs[0].hidden_states


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        pytest.param(scope(Add([1.0] * 4, layer=0)), "edits", id="scope"),
        pytest.param({"steering_vectors": {"post_block": {0: [1.0] * 4}}}, "steering_vectors",
                     id="steering-fork"),
        pytest.param({"apply_steering_vectors": [{}]}, "apply_steering_vectors", id="vllm-lens"),
    ],
)  # fmt: skip
def test_the_last_token_is_not_processed_without_the_edits_of_its_request(extra, key, calls):
    llm = an_llm(layers=[1], process_last_token=True)
    params = SamplingParams(max_tokens=3, extra_args=extra)
    with pytest.raises(SpecError, match=f"process_last_token and {key} do not go together"):
        llm.generate(PROMPTS, params)
    assert calls == []
    an_llm(layers=[1]).generate(PROMPTS, params)


def test_the_last_token_is_processed_in_a_request_that_only_reads_with_the_keys_of_a_face(calls):
    extra = {"output_residual_stream": [0], "steering_vectors": None}
    params = SamplingParams(max_tokens=3, extra_args=extra)
    an_llm(layers=[1], process_last_token=True).generate(PROMPTS, params)
    assert len(calls) == 2


def test_every_key_that_changes_rows_is_a_key_of_a_face():
    assert {key for keys in KEYS.values() for key in keys} > EDITING


def test_an_async_stream_ends_with_the_last_tokens_row():
    names = []

    async def generate(prompt, params, name, *, lora_request=None, **options):
        names.append((name, lora_request, options))
        yield answered(prompt, params)

    async def run():
        llm = object.__new__(AsyncLLM)
        llm.capture, llm._numbers = Options([0], process_last_token=True), iter([7])
        llm.engine = SimpleNamespace(generate=generate)
        return [o async for o in llm.generate(PROMPTS[0], PARAMS, lora_request=LORA, priority=1)]

    (output,) = asyncio.run(run())
    assert output.hidden_states[0][:, 0].tolist() == [2, 3, 4]
    assert names == [("probe_hook-7", LORA, {"priority": 1}), ("probe_hook-7-last-0", LORA, {})]


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_the_constructors_name_their_options(kind):
    named = list(inspect.signature(kind).parameters.values())
    options = {one.name: one.default for one in named[1:-1]}
    assert options == {field.name: field.default for field in fields(Options)}
