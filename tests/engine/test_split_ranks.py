"""Two ranks put the heads of a compiled model together: rows and patterns are one rank's. A file of
its own: vLLM remembers its environment once an engine has run in this process."""

from __future__ import annotations

import pytest
import torch

from tests.asking import run
from tests.checkpoints import make_checkpoint, reference
from tests.conftest import process_engine
from tests.engine.test_attention_sites import (
    CONFIG,
    EVERYTHING,
    PROMPTS,
    check,
    check_patterns,
    params,
)

pytestmark = pytest.mark.long


def test_both_ranks_have_the_only_head_of_keys(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    path = make_checkpoint("llama", tmp_path, num_key_value_heads=1)
    ref = reference(path, torch.float32)
    with process_engine(
        path, dtype="float32", tensor_parallel_size=2, skip_tokenizer_init=True,
        max_num_batched_tokens=32, additional_config={"scope": CONFIG},
    ) as llm:  # fmt: skip
        outputs = run(llm, PROMPTS, params(*EVERYTHING))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check(output.scope, prompt, output.outputs[0].token_ids, ref)
        check_patterns(output.scope, prompt, output.outputs[0].token_ids, ref)
    first = outputs[0].scope
    assert (first["q", 0].shape[1:], first["k", 0].shape[1:]) == ((4, 32), (1, 32))
