"""One engine in a process of its own; standard input and output carry lines of JSON.

Input:  one object with LLM's arguments, then one per measurement (`Workload`).
Output: after each, one line that starts with RESULT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """`batch` requests of `prompt` tokens that generate `generate` each.

    Attributes:
        layers: whose `resid_post` every token of every request reads; None reads
            nothing.
        salt: makes the prompts different, so that no run hits another's cache.
    """

    name: str
    batch: int
    prompt: int
    generate: int
    layers: list[int] | None = None
    salt: int = 0

    @property
    def tokens(self) -> int:
        """What throughput counts: generated tokens, or the prompt's where none are."""
        return self.batch * (self.prompt if self.generate == 1 else self.generate)


def measure(llm: Any, work: Workload, vocab: int) -> dict[str, Any]:
    import numpy as np
    from vllm import SamplingParams

    extra = None
    if work.layers is not None:
        from vllm_scope import Read, scope

        extra = scope(Read("resid_post", layers=work.layers))
    params = SamplingParams(
        temperature=0, max_tokens=work.generate, ignore_eos=True, detokenize=False,
        extra_args=extra,
    )  # fmt: skip
    rng = np.random.default_rng(work.salt)
    prompts = [
        {"prompt_token_ids": rng.integers(5, vocab, work.prompt).tolist()}
        for _ in range(work.batch)
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    found: dict[str, Any] = {"seconds": seconds, "tokens": work.tokens, "rows": 0}
    if work.layers is not None:
        # Delivered means: the caller holds tensors, and all of them.
        results = [output.scope for output in outputs]
        assert all(r.status == "complete" for r in results), [r.status for r in results]
        found["rows"] = sum(r.delivered for r in results)
        one = results[0]["resid_post", work.layers[-1]]
        found["gigabytes"] = found["rows"] * one.shape[1] * one.element_size() / 1e9
    return found


def main() -> None:
    # vLLM logs to standard output; results go where only they go.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(body: dict[str, Any]) -> None:
        out.write("RESULT" + json.dumps(body) + "\n")
        out.flush()

    options = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    from vllm import LLM

    llm = LLM(**options)
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    say({"start_seconds": time.perf_counter() - started})
    for line in sys.stdin:
        say(measure(llm, Workload(**json.loads(line)), vocab))


def encode(work: Workload) -> str:
    return json.dumps(asdict(work))


if __name__ == "__main__":
    main()
