"""A model provider for the evaluation framework Inspect, which reads and edits the model's rows.

    inspect eval task.py --model vllm-scope/Qwen/Qwen3-8B
    get_model("vllm-scope/any-name", model_path="toyworld/model", chat=False, max_model_len=256)

vLLM's engine (`AsyncLLM`) starts child processes, which run the model. The engine batches the
requests that Inspect sends at the same time. The `GenerateConfig.extra_body` of a request can have
the following fields.

    extra_args      `vllm_scope.scope(...)`, or vllm-lens's keys
    lora_request    {"lora_name", "lora_int_id", "lora_path"}

The `ModelOutput.metadata` of an answer has the following fields.

    scores          {probe: {"scores": [...], "positions": [...]}}
    reads           {"resid_post.5": {"uri", "sha256", "key", "shape", "dtype"}}
                    The rows are in a safetensors file, because Inspect logs a tensor as None.
    activations     tensors of vllm-lens's `output_residual_stream`, for code in this process
    prompt_token_ids, token_ids

If an answer has several choices, metadata["choices"] has one object with these fields per choice.

`reading(...)` is a solver that reads rows and scores. `probe_scorer(...)` is a scorer that compares
a probe's decision with the target. The name `vllm-lens/...` is an alias of `vllm-scope/...`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from torch import Tensor

from vllm_scope.compat.inspect_scoring import auroc as auroc
from vllm_scope.compat.inspect_scoring import probe_scorer as probe_scorer
from vllm_scope.compat.inspect_scoring import reading as reading
from vllm_scope.compat.own_loop import OwnLoop
from vllm_scope.errors import ScopeError, SpecError, shown
from vllm_scope.results.result import ScopeResult

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams

EXTRA = ("extra_args", "lora_request")
#: Maps fields of GenerateConfig to fields of SamplingParams.
SAMPLING = {
    "max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p",
    "top_k": "top_k", "seed": "seed", "stop_seqs": "stop", "num_choices": "n",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
}  # fmt: skip
#: Fields of GenerateConfig that this provider refuses.
REFUSED = ("logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "response_schema")
#: Maps vLLM's finish reasons to Inspect's stop reasons.
REASONS = {"stop": "stop", "length": "max_tokens"}


@modelapi(name="vllm-scope")
def _scope_provider() -> type[ModelAPI]:
    return ScopeAPI


@modelapi(name="vllm-lens")
def _lens_provider() -> type[ModelAPI]:
    return ScopeAPI


class ScopeAPI(ModelAPI):
    """An Inspect model that runs on vLLM with vllm-scope.

    Args:
        model_name: a folder, or a name on Hugging Face's hub. With `model_path`, any text.
        model_path: the folder or name of the model to load, in place of `model_name`.
        chat: whether the model's chat template formats the messages. If False, the texts of the
            messages are joined with newlines, for models that continue text.
        tensors: the folder for the files of rows. The default is the folder "scope-tensors" in the
            folder that INSPECT_LOG_DIR names, or in ./logs if this variable is not set.
        model_args: more options of vLLM's engine.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        model_path: str | None = None,
        chat: bool = True,
        tensors: str | None = None,
        **model_args: object,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        if base_url is not None:
            raise SpecError("base_url: leave it out; this provider starts its own engine.")
        self._options = {"model": model_path or model_name, **model_args}
        self._chat, self._tensors = chat, tensors
        self._engine: OwnLoop | None = None
        self._starting = threading.Lock()
        self._number = 0

    def max_connections(self) -> int:
        """The most requests that Inspect sends at the same time. vLLM can queue some of these."""
        return 256

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        from vllm.lora.request import LoRARequest

        if tools:
            raise SpecError("this provider calls no tools; leave them out of the task.")
        extra = config.extra_body or {}
        if unknown := set(extra) - set(EXTRA):
            raise SpecError(
                f"extra_body has {shown(min(unknown))}; its fields here are {', '.join(EXTRA)}."
            )
        params, lora = _params(config, extra.get("extra_args")), extra.get("lora_request")
        engine = await asyncio.to_thread(self._started)
        self._number += 1
        stream = engine.llm.generate(
            {"prompt_token_ids": self._token_ids(engine, input)},
            params,
            f"inspect-{id(self)}-{self._number}",
            lora_request=LoRARequest(**lora) if isinstance(lora, Mapping) else lora,
        )
        return await asyncio.to_thread(self._model_output, await engine.last(stream))

    def _started(self) -> OwnLoop:
        with self._starting:
            if self._engine is None:
                self._engine = OwnLoop(self._options)
            return self._engine

    def _token_ids(self, engine: OwnLoop, messages: Sequence[ChatMessage]) -> list[int]:
        tokenizer = engine.llm.get_tokenizer()
        if not self._chat:
            return list(tokenizer("\n".join(message.text for message in messages))["input_ids"])
        bodies = [{"role": message.role, "content": message.text} for message in messages]
        text = tokenizer.apply_chat_template(bodies, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _model_output(self, output: RequestOutput) -> ModelOutput:
        choices = [
            ChatCompletionChoice(
                message=ChatMessageAssistant(
                    content=completion.text, model=self.model_name, source="generate"
                ),
                stop_reason=REASONS.get(completion.finish_reason, "unknown"),
            )
            for completion in output.outputs
        ]
        num_input = len(output.prompt_token_ids)
        num_output = sum(len(completion.token_ids) for completion in output.outputs)
        usage = ModelUsage(
            input_tokens=num_input, output_tokens=num_output, total_tokens=num_input + num_output
        )
        each = [self._metadata(output, completion) for completion in output.outputs]
        metadata = each[0] if len(each) == 1 else {"choices": each}
        return ModelOutput(model=self.model_name, choices=choices, usage=usage, metadata=metadata)

    def _metadata(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, object]:
        found: dict[str, object] = {
            "prompt_token_ids": list(output.prompt_token_ids),
            "token_ids": list(completion.token_ids),
        }
        result: ScopeResult | None = completion.scope
        if result is None:
            return found
        if result.status != "complete":
            raise ScopeError(
                f"the request's rows are {result.status}: "
                f"{result.error or f'{result.dropped} of {result.expected} are missing'}."
            )
        if scores := result.scores:
            found["scores"] = {
                name: {"scores": one.tolist(), "positions": scores.positions(name).tolist()}
                for name, one in scores.items()
            }
        if result.keys():
            found["reads"] = self._write(result)
        if hasattr(completion, "activations"):
            found["activations"] = dict(completion.activations)
        return found

    def _write(self, result: ScopeResult) -> dict[str, dict[str, object]]:
        """Write a result's rows to one file. Returns each stream's file and key in the file."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        reads: dict[str, dict[str, object]] = {}
        for site, layer in result.keys():
            key = site if site == "embed" else f"{site}.{layer}"
            # Streams can share memory, and safetensors refuses shared memory. Therefore copy.
            rows = result[site, layer].clone(memory_format=torch.contiguous_format)
            tensors |= {key: rows, f"{key}.positions": result.positions(site, layer).clone()}
            dtype = str(rows.dtype).removeprefix("torch.")
            reads[key] = {"key": key, "shape": list(rows.shape), "dtype": dtype}
        logs = os.environ.get("INSPECT_LOG_DIR", "./logs")
        if self._tensors is None and "://" in logs:
            raise SpecError(f"INSPECT_LOG_DIR is {logs}; name a local folder with tensors=.")
        folder = Path(self._tensors or f"{logs}/scope-tensors")
        body = save(tensors)
        digest = hashlib.sha256(body).hexdigest()
        path = (folder / f"{digest[:32]}.safetensors").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            temporary = path.with_suffix(f".{threading.get_ident()}.tmp")
            temporary.write_bytes(body)
            temporary.replace(path)
        return {key: {"uri": path.as_uri(), "sha256": digest, **r} for key, r in reads.items()}

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        with self._starting:
            if self._engine is not None:
                self._engine.close()
            self._engine = None


def _params(config: GenerateConfig, extra_args: Mapping[str, object] | None) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for name in REFUSED:
        if getattr(config, name, None):
            raise SpecError(f"this provider does not support {name}; leave it out.")
    given = {ours: getattr(config, theirs) for theirs, ours in SAMPLING.items()}
    options = {name: value for name, value in given.items() if value is not None}
    # If the caller set no limit, max_tokens=None lets generation continue to max_model_len.
    options.setdefault("max_tokens", None)
    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(**options, extra_args=extra_args, output_kind=kind)
