"""Inspect: models that are read while they are evaluated.

    inspect eval task.py --model vllm-scope/Qwen/Qwen3-8B
    get_model("vllm-scope/any-name", model_path="toyworld/model", chat=False, max_model_len=256)

vLLM (`AsyncLLM`) runs in children of this process and batches the requests that Inspect sends
together. A request's `GenerateConfig.extra_body` may hold

    extra_args      `vllm_scope.scope(...)`, or vllm-lens's keys
    lora_request    {"lora_name", "lora_int_id", "lora_path"}

Then `ModelOutput.metadata` has

    scores          {probe: {"scores": [...], "positions": [...]}}
    reads           {"resid_post.5": {"uri", "sha256", "key", "shape", "dtype"}}: the rows, in
                    a safetensors file, because Inspect's logs write tensors as None
    activations     of vllm-lens's `output_residual_stream`, for code in this process
    prompt_token_ids, token_ids

If there are several choices, metadata["choices"] has one such object for each.

`reading(...)` is a solver that reads. `probe_scorer(...)` is a scorer: does a probe fire where
the target says that it should? The name `vllm-lens/...` is an alias.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

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
from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    Metric,
    SampleScore,
    Score,
    Scorer,
    Target,
    accuracy,
    metric,
    scorer,
    stderr,
)
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolChoice, ToolInfo

from vllm_scope.errors import ScopeError, SpecError, shown

Pooling = Literal["last", "mean", "max"]
#: Pooling -> the one score of a completion's scores.
POOLS: dict[Pooling, Callable[[list[float]], float]] = {
    "last": lambda scores: scores[-1],
    "mean": lambda scores: sum(scores) / len(scores),
    "max": max,
}
EXTRA = ("extra_args", "lora_request")
#: Fields of GenerateConfig -> fields of SamplingParams; and the fields that are refused.
SAMPLING = {
    "max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p",
    "top_k": "top_k", "seed": "seed", "stop_seqs": "stop", "num_choices": "n",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
}  # fmt: skip
REFUSED = ("logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "response_schema")


@modelapi(name="vllm-scope")
def _scope_provider() -> type[ModelAPI]:
    return ScopeAPI


@modelapi(name="vllm-lens")
def _lens_provider() -> type[ModelAPI]:
    return ScopeAPI


class _Engine:
    """AsyncLLM on an event loop of its own, because Inspect has a new loop for each eval."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.llm = self._submit(self._start(options)).result()
        # Inspect keeps models for the next eval and never closes them. When the process ends, vLLM
        # stops EngineCore, and tasks that still wait for it would log that it died. atexit calls
        # the last registered function first, so this one runs before vLLM's.
        atexit.register(self.close)

    async def _start(self, options: Mapping[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def generate(self, prompt: Any, params: Any, name: str, lora: Any) -> Any:
        async def last() -> Any:
            stream = self.llm.generate(prompt, params, name, lora_request=lora)
            return [output async for output in stream][-1]

        return await asyncio.wrap_future(self._submit(last()))

    async def _stop(self) -> None:
        # On its own loop `shutdown` cancels the tasks that wait for the engine. On another thread
        # these tasks would find the engine dead and log that.
        self.llm.shutdown()
        self.llm = None

    def close(self) -> None:
        atexit.unregister(self.close)
        self._submit(self._stop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class ScopeAPI(ModelAPI):
    """vLLM with vllm-scope, as a model of Inspect.

    Args:
        model_name: a folder or a name on the hub; with `model_path` any name.
        model_path: the model to load.
        chat: messages go through the model's chat template. False joins their texts
            with newlines, for models that continue text.
        tensors: the folder for files of rows; "scope-tensors" in INSPECT_LOG_DIR (or ./logs) by
            default.
        model_args: further options of vLLM's engine.
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
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        if base_url is not None:
            raise SpecError("base_url: this provider starts its own engine, and takes no server.")
        self._options = {"model": model_path or model_name, **model_args}
        self._chat, self._tensors = chat, tensors
        self._engine: _Engine | None = None
        self._starting = threading.Lock()
        self._number = 0

    def max_connections(self) -> int:
        """As many as vLLM may batch; the others wait in its queue."""
        return 256

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        if tools:
            raise SpecError("this provider calls no tools; leave them out of the task.")
        extra = dict(config.extra_body or {})
        unknown = set(extra) - set(EXTRA)
        if unknown:
            raise SpecError(
                f"extra_body has {shown(min(unknown))}; its fields here are {', '.join(EXTRA)}."
            )
        for name in REFUSED:
            if getattr(config, name, None):
                raise SpecError(f"{name} is not given by this provider.")
        options = {
            ours: getattr(config, theirs)
            for theirs, ours in SAMPLING.items()
            if getattr(config, theirs) is not None
        }
        params = SamplingParams(
            # Without a limit, up to the end of the context.
            **({"max_tokens": None} | options),
            extra_args=extra.get("extra_args"),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        lora = extra.get("lora_request")
        engine = await asyncio.to_thread(self._started)
        self._number += 1
        output = await engine.generate(
            {"prompt_token_ids": self._token_ids(engine, input)},
            params,
            f"inspect-{id(self)}-{self._number}",
            LoRARequest(**lora) if isinstance(lora, Mapping) else lora,
        )
        return await asyncio.to_thread(self._model_output, output)

    def _started(self) -> _Engine:
        with self._starting:
            if self._engine is None:
                self._engine = _Engine(self._options)
            return self._engine

    def _token_ids(self, engine: _Engine, messages: Sequence[ChatMessage]) -> list[int]:
        tokenizer = engine.llm.get_tokenizer()
        if not self._chat:
            return list(tokenizer("\n".join(message.text for message in messages))["input_ids"])
        bodies = [{"role": message.role, "content": message.text} for message in messages]
        text = tokenizer.apply_chat_template(bodies, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _model_output(self, output: Any) -> ModelOutput:
        reasons: dict[str, Any] = {"stop": "stop", "length": "max_tokens"}
        choices = [
            ChatCompletionChoice(
                message=ChatMessageAssistant(
                    content=completion.text, model=self.model_name, source="generate"
                ),
                stop_reason=reasons.get(completion.finish_reason, "unknown"),
            )
            for completion in output.outputs
        ]
        num_input = len(output.prompt_token_ids)
        num_output = sum(len(completion.token_ids) for completion in output.outputs)
        each = [self._metadata(output, completion) for completion in output.outputs]
        return ModelOutput(
            model=self.model_name,
            choices=choices,
            usage=ModelUsage(
                input_tokens=num_input,
                output_tokens=num_output,
                total_tokens=num_input + num_output,
            ),
            metadata=each[0] if len(each) == 1 else {"choices": each},
        )

    def _metadata(self, output: Any, completion: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "prompt_token_ids": list(output.prompt_token_ids),
            "token_ids": list(completion.token_ids),
        }
        result = completion.scope
        if result is None:
            return found
        if result.status != "complete":
            raise ScopeError(
                f"the request's rows are {result.status}: "
                f"{result.error or f'{result.dropped} of {result.expected} are missing'}."
            )
        if result.scores:
            found["scores"] = {
                name: {
                    "scores": result.scores[name].tolist(),
                    "positions": result.scores.positions(name).tolist(),
                }
                for name in result.scores
            }
        if result.keys():
            found["reads"] = self._write(result)
        if hasattr(completion, "activations"):
            found["activations"] = dict(completion.activations)
        return found

    def _write(self, result: Any) -> dict[str, Any]:
        """Write rows to a file named by its digest; returns the place of each stream."""
        from safetensors.torch import save

        tensors: dict[str, Any] = {}
        reads: dict[str, dict[str, Any]] = {}
        for site, layer in result.keys():
            key = site if site == "embed" else f"{site}.{layer}"
            # Copies: streams may share memory, which safetensors refuses.
            rows = result[site, layer].clone(memory_format=torch.contiguous_format)
            positions = result.positions(site, layer).clone()
            tensors |= {key: rows, f"{key}.positions": positions}
            reads[key] = {
                "key": key,
                "shape": list(rows.shape),
                "dtype": str(rows.dtype).removeprefix("torch."),
            }
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


@solver
def reading(spec: Mapping[str, Any]) -> Solver:
    """Generate, and read or steer while the model does.

    Args:
        spec: what `vllm_scope.scope(...)` returns.
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await generate(state, extra_body={"extra_args": dict(spec)})

    return solve


@metric
def auroc() -> Metric:
    """How often a sample with the concept scores above one without; 0.5 is chance."""

    def measure(scores: list[SampleScore]) -> float:
        found: dict[bool, list[float]] = {True: [], False: []}
        for each in scores:
            metadata = each.score.metadata or {}
            found[metadata["present"]].append(metadata["score"])
        pairs = [(p, n) for p in found[True] for n in found[False]]
        if not pairs:
            return float("nan")
        return sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)

    return measure


@scorer(metrics=[accuracy(), stderr(), auroc()])
def probe_scorer(
    probe: str, positive: str, threshold: float = 0.0, pooling: Pooling = "last"
) -> Scorer:
    """Whether a probe's score is above a threshold if, and only if, the target is `positive`.

    Args:
        probe: its name.
        positive: the target of samples that have the concept.
        threshold: of the pooled score.
        pooling: the last score of the probe, the mean of all, or the largest.

    Raises:
        SpecError: the sample's output has no scores of that probe.
    """
    if pooling not in POOLS:
        raise SpecError(f"pooling is {shown(pooling)}; it is one of {', '.join(POOLS)}.")

    async def score(state: TaskState, target: Target) -> Score:
        scores = (state.output.metadata or {}).get("scores", {})
        if not scores.get(probe, {}).get("scores"):
            raise SpecError(
                f"this sample has no scores of {shown(probe)}; it has {shown(sorted(scores))}. "
                "Let the solver be reading(scope(Probe(...)))."
            )
        pooled = float(POOLS[pooling](scores[probe]["scores"]))
        fired, present = pooled > threshold, target.text == positive
        return Score(
            value=CORRECT if fired == present else INCORRECT,
            answer=positive if fired else f"not {positive}",
            metadata={"probe": probe, "score": pooled, "present": present},
        )

    return score
