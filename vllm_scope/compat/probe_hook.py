"""LLM, AsyncLLM and SamplingParams of vllm-probe-hook, whose outputs have hidden states.

    from vllm_scope.compat.probe_hook import LLM, SamplingParams
    llm = LLM("Qwen/Qwen3-8B", layers=[15, 20], include_prefill=True)
    output = llm.generate(prompts, SamplingParams(max_tokens=32))[0]
    output.hidden_states[15]     # [num_output_tokens - 1, d_model]
    output.prefill_hidden[15]    # [num_prompt_tokens, d_model]

Row i of `hidden_states` is the residual stream of output token i. The model never processes the
token that was sampled last. Therefore `hidden_states` has no row of this token. With
`process_last_token=True`, a second request processes the token that was sampled last.

Layer k has the values of Hugging Face's `hidden_states[k + 1]`, except that the last layer has the
values before the final norm. The values are on the CPU, in the model's dtype. A process can have
any number of LLMs.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM as Engine

from vllm_scope.compat.hidden_states import KEY, HiddenStates, Options
from vllm_scope.compat.hidden_states import translate as translate

if TYPE_CHECKING:
    from vllm import CompletionOutput, PromptType, RequestOutput, TokensPrompt
    from vllm.lora.request import LoRARequest

__all__ = ["LLM", "AsyncLLM", "HiddenStates", "SamplingParams"]


def _last_token_request(completion: CompletionOutput) -> tuple[TokensPrompt, SamplingParams]:
    """The prompt and parameters that capture the row of the token that was sampled last."""
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    layers = list(completion.hidden_states)
    last = Options(layers, last_prefill_token=True, include_decode=False)
    return {"prompt_token_ids": completion.scope.token_ids}, last.params(params)


class _Capturing:
    """The base class of LLM and AsyncLLM, with the constructor of both."""

    def __init__(
        self,
        model: str,
        *,
        layers: Sequence[int] | str = "all",
        include_prefill: bool = False,
        include_decode: bool = True,
        last_prefill_token: bool = False,
        last_decode_token: bool = False,
        process_last_token: bool = False,
        **vllm_kwargs: object,
    ) -> None:
        self.capture = Options(
            layers, include_prefill, include_decode, last_prefill_token, last_decode_token,
            process_last_token,
        )  # fmt: skip
        self._start(model, vllm_kwargs)

    def _start(self, model: str, options: Mapping[str, object]) -> None:
        raise NotImplementedError


class LLM(_Capturing, vllm.LLM):
    """A vllm.LLM whose outputs have `hidden_states` and `prefill_hidden`.

    Args:
        layers ... process_last_token: the fields of Options.
        vllm_kwargs: the other arguments of vllm.LLM, or of the methods of vllm.LLM.
    """

    def _start(self, model: str, options: Mapping[str, object]) -> None:
        vllm.LLM.__init__(self, model, **options)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest] | None = None,
        **vllm_kwargs: object,
    ) -> list[RequestOutput]:
        params = self._params(sampling_params)
        outputs = super().generate(prompts, params, lora_request=lora_request, **vllm_kwargs)
        return self._with_last(outputs, lora_request)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]] | Sequence[Sequence[Mapping[str, object]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest] | None = None,
        **vllm_kwargs: object,
    ) -> list[RequestOutput]:
        params = self._params(sampling_params)
        outputs = super().chat(messages, params, lora_request=lora_request, **vllm_kwargs)
        return self._with_last(outputs, lora_request)

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return self.capture.params(given)
        return [self.capture.params(params) for params in given]

    def _with_last(
        self, outputs: list[RequestOutput], lora: LoRARequest | Sequence[LoRARequest] | None
    ) -> list[RequestOutput]:
        if not self.capture.process_last_token or not self.capture.decode:
            return outputs
        if isinstance(lora, list | tuple):
            lora = [r for r, o in zip(lora, outputs, strict=True) for _ in o.outputs]
        completions = [completion for output in outputs for completion in output.outputs]
        asked = [_last_token_request(completion) for completion in completions]
        prompts, params = [prompt for prompt, _ in asked], [p for _, p in asked]
        lasts = super().generate(prompts, params, lora_request=lora, use_tqdm=False)
        for completion, last in zip(completions, lasts, strict=True):
            completion.hidden_states.end_with(last.prefill_hidden, self.capture.last_decode_token)
        return outputs


class AsyncLLM(_Capturing):
    """An engine with one output for each token, or for several tokens if the caller is slow.

    An output has the rows that have arrived so far. The row of a token arrives with the output of
    one of the next two tokens. The final output of the request has all rows.

    Args:
        layers ... process_last_token: the fields of Options.
        vllm_kwargs: fields of vLLM's AsyncEngineArgs, or other arguments of AsyncLLM.generate.

    Attributes:
        engine: vLLM's AsyncLLM.
    """

    def _start(self, model: str, options: Mapping[str, object]) -> None:
        self.engine = Engine.from_engine_args(AsyncEngineArgs(model, **options))
        self._numbers = itertools.count()

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **vllm_kwargs: object,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request. `sampling_params.output_kind` has vLLM's meaning."""
        name = f"{KEY}-{next(self._numbers)}" if request_id is None else request_id
        stream = self.engine.generate(
            prompt, self.capture.params(sampling_params), name, lora_request=lora_request,
            **vllm_kwargs,
        )  # fmt: skip
        last = self.capture.process_last_token and self.capture.decode
        async for output in stream:
            for completion in output.outputs if last else ():
                if completion.finish_reason not in (None, "abort", "error"):
                    await self._finish(completion, f"{name}-last-{completion.index}", lora_request)
            yield output

    async def _finish(
        self, completion: CompletionOutput, name: str, lora: LoRARequest | None
    ) -> None:
        prompt, params = _last_token_request(completion)
        alone = self.capture.last_decode_token
        async for last in self.engine.generate(prompt, params, name, lora_request=lora):
            if last.finished:
                completion.hidden_states.end_with(last.prefill_hidden, alone)

    def shutdown(self) -> None:
        self.engine.shutdown()
