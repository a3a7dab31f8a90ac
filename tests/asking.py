"""Requests of token ids, as the tests of rows make them, and what is true of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import vllm

from tests.checkpoints import check_completion

rejects_drafts = pytest.mark.skipif(
    vllm.__version__.startswith("0.30."),
    reason="without Triton this vLLM's sampler rejects no drafts, of plain requests neither",
)


def params(spec: dict[str, Any] | None = None, **options: Any) -> Any:
    """Greedy SamplingParams with a spec, as `scope(...)` makes it; 12 tokens, whatever they are."""
    from vllm import SamplingParams

    defaults = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**(defaults | options), extra_args=spec)


def prompts(*ids: Iterable[int]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": list(some)} for some in ids]


def run(llm: Any, ids: Sequence[Iterable[int]], parameters: Any) -> list[Any]:
    return llm.generate(prompts(*ids), parameters, use_tqdm=False)


def check(outputs: Iterable[Any], ref: Any) -> None:
    """Every completion's rows are complete and equal the reference's."""
    for output in outputs:
        for completion in output.outputs:
            ids = list(completion.token_ids)
            check_completion(completion.scope, output.prompt_token_ids, ids, ref)


def counters(llm: Any) -> dict[str, Any]:
    """Of its first worker."""
    return llm.collective_rpc("scope_counters")[0]
