"""One architecture: vLLM's rows beside Hugging Face's, at every site that can be tapped.

Owns:  `compare`, `sentence`.
Runs:  in a process of its own: a model that vLLM cannot run must not end the others.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import row_error
from tests.conftest import MEMORY, inside_this_process, local_engine, without_llvmlite
from tests.matrix.architectures import multimodal, reference_of
from tests.matrix.checkpoint import NUM_LAYERS, config_of, make_checkpoint, name_architecture
from tests.matrix.reference import Recorded, logprobs_after, record
from vllm_scope import Read, SpecError, scope
from vllm_scope.request.sites import INNER_SITES, MODEL_SITES, SITES

PROMPTS = [list(range(3, 90)), [7] * 5, list(range(400, 380, -1))]
TOLERANCE = 1e-4
#: vLLM and Hugging Face may see different numbers of tokens in one step.
CHUNKED = {"block_size": 32, "max_num_batched_tokens": 32}
#: Without images and sounds; vLLM then asks for no processor.
TEXT_ONLY = {"language_model_only": True}
#: vLLM's operators in PyTorch, which it also takes where it compiles. In eager mode on a CPU one of
#: its kernels gives other numbers for DeepSeek's attention.
NATIVE = {"compilation_config": {"custom_ops": ["none"]}}


def compare(architecture: str, chunked: bool) -> dict[str, Any]:
    """The line of one architecture.

    Args:
        chunked: prompts in chunks of 32 tokens, and again behind a warm cache. Models with states
            have block sizes of their own, and take whole prompts.

    Returns:
        status: "no reference", "refused", "differs", "canary only" or "verified"; and what the
            status needs.

    Raises:
        Exception: what vLLM raises if it cannot run the model here.
    """
    import transformers

    reference = reference_of(architecture)
    try:
        config = config_of(reference)
    except Exception as error:  # whatever a configuration class refuses
        return {"status": "no reference", "reason": sentence(error)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            make_checkpoint(reference, path)
            model = (
                getattr(transformers, reference)
                .from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
                .eval()
            )
            record(model, NUM_LAYERS, PROMPTS[1])
        except Exception as error:
            return {"status": "no reference", "reason": sentence(error)}
        name_architecture(path, architecture)
        # vLLM's Transformers backend compiles the model's class, for the whole process.
        model.base_model.do_not_compile = True
        options = TEXT_ONLY if architecture in multimodal() else {}
        latent = getattr(config.get_text_config(), "kv_lora_rank", None) is not None
        if latent:
            os.environ["VLLM_MLA_DISABLE"] = "1"
            options = options | NATIVE
        report = _describe(path, options)
        unread = None if report.sites else report.reason
        if unread is None:
            served = [s for s in SITES if _everywhere(s, report.sites[s].layers)]
            why = {s: one.reason for s, one in report.sites.items() if s not in served}
            outputs, cached = _generate(path, served, chunked, **options)
        else:  # numbers may prove where the stream is, in a compiled model
            served, why = ["embed", "resid_pre", "resid_post"], {}
            try:
                outputs, cached = _generate(path, served, chunked, enforce_eager=False, **options)
            except SpecError as error:
                return {"status": "refused", "reason": str(error)}
            except Exception as error:  # vLLM serves it in eager mode, where reads are refused
                why_not = f"{unread}. Compiled, the tiny model does not run: {sentence(error)}"
                return {"status": "refused", "reason": why_not}
    expected = [
        record(model, NUM_LAYERS, [*prompt, *output.outputs[0].token_ids][:-1])
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    found = {site: _site(site, [o.scope for o in outputs], expected) for site in served}
    line: dict[str, Any] = {
        "model_type": config.model_type, "reference": reference, "chunked": chunked,
        "sites": found, "why_not": why,
        "logprob_gap": _logprob_gap(outputs, [right.logprobs for right in expected]),
    }  # fmt: skip
    if latent:
        line["latent"] = "off"
    if cached:
        line["cached_tokens"] = max(output.num_cached_tokens or 0 for output in cached)
        line["warm"] = max(
            row_error(output.scope["resid_post", k], right.streams[k + 1][-7:])
            for prompt, output in zip(PROMPTS, cached, strict=True)
            for right in [record(model, NUM_LAYERS, [*prompt, *output.outputs[0].token_ids][:-1])]
            for k in range(NUM_LAYERS)
        )
    errors = [found[site]["error"] for site in ("embed", "resid_post") if site in found]
    worst = max([*errors, line.get("warm", 0.0)])
    # The layers differ, so that the wrong one could not have passed.
    line["step"] = min(
        row_error(before, after)
        for right in expected for before, after in itertools.pairwise(right.streams)
    )  # fmt: skip
    good = worst <= TOLERANCE and line["step"] > 100 * TOLERANCE
    line["status"] = ("verified" if unread is None else "canary only") if good else "differs"
    if unread is not None:
        line["reason"] = unread
    if "resid_post" in found:
        # Rows that are vLLM's own give vLLM's logprobs, also where vLLM is not as Hugging Face is.
        line["self_check"] = _logprob_gap(outputs, [
            logprobs_after(model, NUM_LAYERS, [*prompt, *output.outputs[0].token_ids][:-1],
                           output.scope["resid_post", NUM_LAYERS - 1])
            for prompt, output in zip(PROMPTS, outputs, strict=True)
        ])  # fmt: skip
    return line


def _describe(path: Path, options: dict[str, Any]) -> Any:
    from vllm_scope.engine.describe import describe_model

    with inside_this_process():
        options = {"dtype": "float32", "max_model_len": 512, **MEMORY} | options
        return describe_model(str(path), options)


def _everywhere(site: str, layers: tuple[int, ...]) -> bool:
    return len(layers) == (1 if site in MODEL_SITES else NUM_LAYERS)


def _generate(
    path: Path, sites: list[str], chunked: bool, **options: Any
) -> tuple[list[Any], list[Any]]:
    from vllm import SamplingParams

    def ask(llm: Any, *reads: Read) -> list[Any]:
        params = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=5,
            extra_args=scope(*reads),
        )  # fmt: skip
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found: list[Any] = llm.generate(prompts, params, use_tqdm=False)
        return found

    options |= {"dtype": "float32", "additional_config": {"scope": {"sites": sites}}}
    options |= CHUNKED if chunked else {}
    with without_llvmlite(), local_engine(path, **options) as llm:
        outputs = ask(llm, *map(Read, sites))
        cached = ask(llm, Read("resid_post", tokens="generated")) if chunked else []
    return outputs, cached


def _site(site: str, results: list[Any], expected: list[Recorded]) -> dict[str, Any]:
    """The worst error of a site's rows, and the module of Hugging Face that they equal."""
    layers = [0] if site in MODEL_SITES else range(NUM_LAYERS)
    for result in results:
        if (result.status, result.dropped) != ("complete", 0):
            return {"error": float("inf"), "module": f"{result.status}: {result.error}"}
    pairs = [(result, right, k) for result, right in zip(results, expected, strict=True)
             for k in layers]  # fmt: skip

    def rows(result: Any, k: int) -> torch.Tensor:
        found: torch.Tensor = result[site, k].flatten(1)
        return found

    if site in ("embed", "resid_pre", "resid_post"):
        after = 1 if site == "resid_post" else 0
        error = max(row_error(rows(o, k), right.streams[k + after]) for o, right, k in pairs)
        return {"error": error, "module": f"hidden_states[{'k + 1' if after else 'k'}]"}
    names = set.intersection(*(
        set(right.outer if site not in (*INNER_SITES, "resid_mid") else right.inner[k])
        for _, right, k in pairs
    ))  # fmt: skip
    best = {"error": float("inf"), "module": "none"}
    for name in sorted(names, key=lambda name: (len(name), name)):
        error = 0.0
        for o, right, k in pairs:
            other = (right.outer if site == "ln_final" else right.inner[k])[name]
            mine = rows(o, k)
            same = mine.shape == other.shape and bool(torch.isfinite(other).all())
            error = max(error, row_error(mine, other) if same else float("inf"))
            if error > 10 * TOLERANCE and error >= best["error"]:
                break
        if error < best["error"]:
            best = {"error": error, "module": name}
        if error <= TOLERANCE:
            break
    return best


def _logprob_gap(outputs: list[Any], logprobs: list[torch.Tensor]) -> float:
    """The largest difference of a log-probability that vLLM gave."""
    return max(
        abs(one.logprob - float(right[len(prompt) - 1 + i, token]))
        for prompt, output, right in zip(PROMPTS, outputs, logprobs, strict=True)
        for i, step in enumerate(output.outputs[0].logprobs)
        for token, one in step.items()
    )


def sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]
