"""Runs the steering experiments with a vLLM engine: edits and reads.

Owns:  VllmModel, and the translation of an experiment's Edit into an action.
From:  an `LLM` whose vllm-scope taps embed and resid_post.
To:    steering.py, which calls VllmModel's `generate`, `read` and `token_ids`.

Each prompt of a batch has its own edits, so one `generate` call can steer prompts in both
directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from examples.steering import Edit, Edits
from vllm_scope import Ablate, Add, Read, Replace, scope
from vllm_scope.analysis.rows import Result
from vllm_scope.request.actions import Action

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

#: Every continuation of a review has fewer tokens.
MAX_TOKENS = 48


def as_action(edit: Edit) -> Action:
    """The edit as an action of vllm_scope.

    Raises:
        ValueError: the edit has the kind "set", but names no positions.
    """
    site, layer = edit.stream
    # The embedding has no layers.
    place: dict[str, Any] = {"site": site, "layer": None if site == "embed" else layer}
    if edit.kind == "set":
        if edit.positions is None:
            raise ValueError("the edit has the kind 'set' and positions=None; name its positions.")
        rows = edit.vector.expand(len(edit.positions), -1)
        return Replace(rows, positions=edit.positions, **place)
    tokens = "all" if edit.positions is None else edit.positions
    if edit.kind == "add":
        return Add(edit.vector, scale=edit.scale, tokens=tokens, **place)
    return Ablate(edit.vector, tokens=tokens, **place)


class VllmModel:
    """The functions that `examples.steering` needs, for an engine."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def token_ids(self, text: str) -> list[int]:
        return self._llm.get_tokenizer()(text).input_ids

    def generate(self, prompts: Sequence[str], edits: Sequence[Edits]) -> list[str]:
        actions = [[as_action(edit) for edit in each] for each in edits]
        return [output.outputs[0].text for output in self._run(prompts, actions, MAX_TOKENS)]

    def read(self, prompts: Sequence[str], edits: Sequence[Edits]) -> list[Result]:
        reads = [Read("embed", tokens="prompt"), Read("resid_post", layers="all", tokens="prompt")]
        actions = [[*reads, *(as_action(edit) for edit in each)] for each in edits]
        return [output.scope for output in self._run(prompts, actions, 1)]

    def _run(
        self, prompts: Sequence[str], actions: Sequence[Sequence[Action]], max_tokens: int
    ) -> list[RequestOutput]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=0, max_tokens=max_tokens, extra_args=scope(*each) if each else None
            )
            for each in actions
        ]
        return self._llm.generate(list(prompts), params, use_tqdm=False)
