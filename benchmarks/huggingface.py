"""Hugging Face's model in a process of its own, with `output_hidden_states`.

This module reads and writes the same lines of JSON as `benchmarks.engine`. All prompts of a
workload have the same length, so a batch needs no padding. Delivered rows are on the host, as with
vllm-scope.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.engine import Workload, serve


def measure(model: Any, work: Workload) -> dict[str, Any]:
    import torch

    torch.manual_seed(work.salt)
    ids = torch.randint(5, model.config.vocab_size, (work.batch, work.prompt), device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    size = 0
    # One batch of prompts at a time, because the logits of all prompts do not fit into memory.
    for some in ids.split(max(1, (1 << 14) // work.prompt)):
        cache, step = None, some
        for _ in range(work.generate):
            out = model(
                step, past_key_values=cache, use_cache=True, logits_to_keep=1,
                output_hidden_states=work.layers is not None,
            )  # fmt: skip
            cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
            if work.layers is not None:
                rows = [out.hidden_states[layer + 1].cpu() for layer in work.layers]
                size += sum(r.numel() * r.element_size() for r in rows)
        step.cpu()
    found = {"seconds": time.perf_counter() - started, "tokens": work.tokens}
    return found | ({"gigabytes": size / 1e9} if size else {})


def load(options: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_grad_enabled(False)
    with torch.device("cuda"):
        config = AutoConfig.from_pretrained(options["model"])
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


if __name__ == "__main__":
    serve(load, measure)
