"""One engine in a process of its own; standard input and output carry lines of JSON.

Input:  one object with LLM's arguments, then one per measurement (`Workload`).
Output: after each, one line that starts with RESULT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Workload:
    """`batch` requests of `prompt` tokens that generate `generate` each.

    Attributes:
        layers: whose `resid_post` every token of every request reads; None reads
            nothing.
        edits: "own": each request adds a vector of its own in the middle layer;
            "one": all add the same one; "gated": as "own", each with a gate of its own.
        probes: how many probes score every token, in the middle layer.
        named: the probes' weights are steering modules that the engine holds.
        lens: read through vllm-lens instead.
        salt: makes the prompts different, so that no run hits another's cache.
    """

    name: str
    batch: int
    prompt: int
    generate: int
    layers: list[int] | None = None
    edits: str | None = None
    probes: int = 0
    named: bool = False
    lens: bool = False
    salt: int = 0

    @property
    def tokens(self) -> int:
        """What throughput counts: generated tokens, or the prompt's where none are."""
        return self.batch * (self.prompt if self.generate == 1 else self.generate)


def extra_args(work: Workload, config: Any) -> list[dict[str, Any] | None]:
    """What each request asks for."""
    if work.lens:
        return [{"output_residual_stream": work.layers}] * work.batch
    if work.layers is None and work.edits is None and not work.probes:
        return [None] * work.batch
    from vllm_scope import Add, Gate, Probe, Read, scope

    middle, vector = middle_of(config), partial(vector_of, config)
    actions: list[Any] = []
    if work.layers is not None:
        actions.append(Read("resid_post", layers=work.layers))
    for i in range(work.probes):
        weight = f"probe-{i}" if work.named else vector(i)
        actions.append(Probe(weight, layer=middle, name=f"p{i}"))
    if work.edits in ("own", "gated"):
        gates: list[Gate | None] = [None] * work.batch
        if work.edits == "gated":
            gates = [Gate(vector(2000 + i), middle - 1, kind="sigmoid") for i in range(work.batch)]
        own = [Add(vector(1000 + i), layer=middle, gate=gate) for i, gate in enumerate(gates)]
        return [scope(*actions, edit) for edit in own]
    if work.edits == "one":
        actions.append(Add(vector(1000), layer=middle))
    return [scope(*actions)] * work.batch


def register(llm: Any, num_probes: int) -> None:
    """Let the engine hold the probes that requests name."""
    from vllm_scope.vectors import SteeringModule, to_bytes

    config = llm.llm_engine.vllm_config.model_config
    known = llm.collective_rpc("scope_modules")[0]
    for i in range(num_probes):
        if f"probe-{i}" in known:
            continue
        module = SteeringModule({("resid_post", middle_of(config)): vector_of(config, i)})
        llm.collective_rpc("scope_register", args=(f"probe-{i}", to_bytes(module)))


def middle_of(config: Any) -> int:
    return int(config.get_total_num_hidden_layers()) // 2


def vector_of(config: Any, seed: int) -> Any:
    """float32 [hidden_size]."""
    import numpy as np

    size = config.get_hidden_size()
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) / size


def delivered(work: Workload, outputs: list[Any]) -> int:
    """Bytes that the caller holds; fails where some are missing."""
    if work.lens:
        streams = [output.activations["residual_stream"] for output in outputs]
        tokens = work.prompt + work.generate - 1
        assert all(s.shape[:2] == (len(work.layers or []), tokens) for s in streams)
        return sum(s.numel() * s.element_size() for s in streams)
    results = [output.scope for output in outputs]
    assert all(r.status == "complete" for r in results), [r.status for r in results]
    rows = sum(len(r.positions(*s)) for r in results for s in r.keys())
    scores = sum(len(s) for r in results for s in r.scores.values())
    size = 0
    if rows:
        one = results[0][results[0].keys()[0]]
        size = one.shape[1] * one.element_size()
    return rows * size + 4 * scores


def measure(llm: Any, work: Workload) -> dict[str, Any]:
    import numpy as np
    from vllm import SamplingParams

    config = llm.llm_engine.vllm_config.model_config
    params = [
        SamplingParams(
            temperature=0, max_tokens=work.generate, ignore_eos=True, detokenize=False,
            extra_args=extra,
        )
        for extra in extra_args(work, config)
    ]  # fmt: skip
    if work.named:
        register(llm, work.probes)
    rng = np.random.default_rng(work.salt)
    vocab = config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": rng.integers(5, vocab, work.prompt).tolist()}
        for _ in range(work.batch)
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    found: dict[str, Any] = {"seconds": seconds, "tokens": work.tokens}
    if any(p.extra_args for p in params):
        found["gigabytes"] = delivered(work, outputs) / 1e9
    return found


def serve(
    load: Callable[[dict[str, Any]], Any], measure: Callable[[Any, Workload], dict[str, Any]]
) -> None:
    """Load what the first line asks for, then measure on it what the others ask for."""
    # vLLM logs to standard output; results go where only they go.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(body: dict[str, Any]) -> None:
        out.write("RESULT" + json.dumps(body) + "\n")
        out.flush()

    options = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    loaded = load(options)
    say({"start_seconds": time.perf_counter() - started})
    for line in sys.stdin:
        say(measure(loaded, Workload(**json.loads(line))))


def load(options: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(**options)


def encode(work: Workload) -> str:
    return json.dumps(asdict(work))


if __name__ == "__main__":
    serve(load, measure)
