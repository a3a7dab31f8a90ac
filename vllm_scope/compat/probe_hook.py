"""vllm-probe-hook: its LLM, AsyncLLM and SamplingParams, with hidden states on outputs.

    from vllm_scope.compat.probe_hook import LLM, SamplingParams
    llm = LLM("Qwen/Qwen3-8B", layers=[15, 20], include_prefill=True)
    output = llm.generate(prompts, SamplingParams(max_tokens=32))[0]
    output.hidden_states[15]     # [num_output_tokens - 1, d_model]
    output.prefill_hidden[15]    # [num_prompt_tokens, d_model]

Row i of `hidden_states` is the residual stream of output token i. The model never processes the
token sampled last, so that token has no row; `process_last_token=True` processes it in a request
of its own.

Layer k is Hugging Face's `hidden_states[k + 1]`. Values are on the CPU, in the model's
dtype. A process may have any number of LLMs.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import vllm
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM as Engine

from vllm_scope.engine.frontend.translators import Translation, called, give, named
from vllm_scope.errors import ScopeError, SpecError, shown
from vllm_scope.request.actions import Read
from vllm_scope.request.selectors import Except
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec
from vllm_scope.results.result import ScopeResult

if TYPE_CHECKING:
    from vllm import CompletionOutput, PromptType, RequestOutput, TokensPrompt
    from vllm.lora.request import LoRARequest

__all__ = ["LLM", "AsyncLLM", "HiddenStates", "SamplingParams"]

SITE = "resid_post"
KEY = "probe_hook"
#: Part of a read -> the argument of LLM and AsyncLLM that errors name.
WORDS = {"Read.layers": "layers", "Read.site": "layers"}


@dataclass(frozen=True)
class Options:
    """What an LLM captures; arguments of LLM and AsyncLLM.

    Attributes:
        layers: numbers from 0, or "all".
        include_prefill: the prompt's tokens, as `output.prefill_hidden`.
        include_decode: the generated tokens, as `output.hidden_states`.
        last_prefill_token: only the prompt's last token, even without `include_prefill`.
        last_decode_token: only the last generated token that is processed.
        process_last_token: process the token sampled last too. A second request does that, and
            finds the other tokens in the prefix cache. Not possible with edits. `max_model_len`
            must leave room for one more token.

    Raises:
        SpecError: nothing is captured, or an option is of a wrong type.
    """

    layers: Sequence[int] | str = "all"
    include_prefill: bool = False
    include_decode: bool = True
    last_prefill_token: bool = False
    last_decode_token: bool = False
    process_last_token: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "layers" and not isinstance(value, bool):
                raise SpecError(f"{name} is {shown(value)}; it is True or False.")
        with called(WORDS):
            Read(SITE, layers=self.layers)
        if not self.prefill and not self.decode:
            raise SpecError(
                "nothing is captured: include_prefill and include_decode are both False."
            )

    @property
    def prefill(self) -> bool:
        return self.include_prefill or self.last_prefill_token

    @property
    def decode(self) -> bool:
        return self.include_decode or self.last_decode_token

    def reads(self) -> list[Read]:
        found = []
        if self.prefill:
            tokens = "last_prompt" if self.last_prefill_token else "prompt"
            found.append(Read(SITE, layers=self.layers, tokens=tokens))
        if self.decode:
            some = Except("last", "prompt") if self.last_decode_token else "generated"
            found.append(Read(SITE, layers=self.layers, tokens=some))
        return found

    def params(self, given: SamplingParams | None) -> SamplingParams:
        """A copy of a request's parameters that asks for the capture."""
        params = copy(given) if given is not None else SamplingParams()
        extra = params.extra_args or {}
        if self.process_last_token and "scope" in extra and Spec.from_json(extra["scope"]).edits:
            raise SpecError(
                "process_last_token and edits do not go together: the token sampled last is "
                "processed in another request. Generate one token more instead."
            )
        params.extra_args = {**extra, KEY: self}
        return params


class HiddenStates(Mapping[int, Tensor]):
    """layer -> [num_rows, d_model]: the rows of one phase that have arrived so far.

    Args:
        of_prompt: rows of the prompt's tokens, else of generated tokens.

    Raises:
        ScopeError: on access, if the request has ended and rows are missing.
    """

    def __init__(self, result: ScopeResult, layers: Sequence[int], *, of_prompt: bool) -> None:
        self._result, self._layers, self._of_prompt = result, tuple(layers), of_prompt
        self._last: HiddenStates | None = None
        self._last_alone = False

    def end_with(self, last: HiddenStates, alone: bool) -> None:
        """Append the row of the token sampled last, or keep only that row."""
        self._last, self._last_alone = last, alone

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self._layers:
            raise KeyError(f"layer {layer} was not captured; there are {list(self._layers)}.")
        result = self._result
        if result.status not in ("complete", "streaming", "aborted"):
            raise ScopeError(
                f"the hidden states of this request are {result.status}: "
                f"{result.error or f'{result.dropped} rows are missing'}."
            )
        in_prompt = result.positions(SITE, layer) < result.num_prompt
        rows = result[SITE, layer][in_prompt if self._of_prompt else ~in_prompt]
        if self._last is None:
            return rows
        return self._last[layer] if self._last_alone else torch.cat([rows, self._last[layer]])

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"HiddenStates of layers {list(self)}"


def translate(values: Mapping[str, object], sites: Sites) -> Translation:
    """The reads of a request of LLM or AsyncLLM.

    Raises:
        SpecError: a layer that the engine does not tap, or options that LLM did not set.
    """
    options = values[KEY]
    if not isinstance(options, Options):
        raise SpecError(f"{KEY} is set by LLM and AsyncLLM of this module.")
    numbers = Read(SITE, layers=options.layers).layer_numbers
    with called(WORDS):
        layers = [layer for _, layer in sites.find(SITE, numbers, "Read")]

    def decorate(output: RequestOutput, completion: CompletionOutput) -> None:
        result: ScopeResult = completion.scope
        decode = HiddenStates(result, layers, of_prompt=False) if options.decode else None
        prefill = HiddenStates(result, layers, of_prompt=True) if options.prefill else None
        give(output, completion, "hidden_states", decode)
        give(output, completion, "prefill_hidden", prefill)

    reads = options.reads()
    paths = named((read, {".layers": "layers", ".site": "layers"}) for read in reads)
    return Translation(tuple(reads), decorate, paths=paths)


def _last_token_request(completion: CompletionOutput) -> tuple[TokensPrompt, SamplingParams]:
    """A prompt that ends in the token sampled last, and parameters that read its row."""
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    layers = list(completion.hidden_states)
    last = Options(layers, last_prefill_token=True, include_decode=False)
    return {"prompt_token_ids": completion.scope.token_ids}, last.params(params)


class _Capturing:
    """The constructor of LLM and AsyncLLM."""

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
        """Make vLLM's engine."""
        raise NotImplementedError


class LLM(_Capturing, vllm.LLM):
    """vllm.LLM whose outputs have `hidden_states` and `prefill_hidden`.

    Args:
        layers ... process_last_token: see Options.
        vllm_kwargs: the other arguments of vllm.LLM, or of its methods.
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
    """An engine whose outputs, one per token, hold the rows that have arrived so far.

    A row arrives one or two tokens after its token; the final output has all rows.

    Args:
        layers ... process_last_token: see Options.
        vllm_kwargs: fields of vLLM's AsyncEngineArgs, or other arguments of its `generate`.

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
        """One output for each token, unless `output_kind` says otherwise."""
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
