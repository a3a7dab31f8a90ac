"""One engine in a process of its own; standard input and output carry lines of JSON.

Input:  one object with LLM's arguments, then one object for each measurement (`Workload`).
Output: after each object, one line that starts with RESULT.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

#: The number of groups of prompts. Prompts of one group have the same beginning.
GROUPS = 8


@dataclass(frozen=True)
class Workload:
    """`batch` requests. Each has `prompt` tokens and generates `generate` tokens.

    Attributes:
        layers: every request reads `resid_post` of these layers at every token. With None, no
            request reads.
        edits: with "own", each request adds its own vector in the middle layer. With "one", all
            requests add the same vector. "gated" is like "own", and each edit has its own gate.
        probes: number of probes that score every token, in the middle layer.
        named: True: the probes' weights are steering modules that the engine holds.
        features: layers whose SAEs' 32 strongest features are read, at every token.
        unembedded: layers whose 10 likeliest tokens a LensTopK delivers, at every token.
        summed: layers whose rows are added to sums on the device, with their covariance.
        monitored: number of layers that the server-wide monitor reads; 0 for no monitor.
        shared: number of tokens with which all prompts of a group begin, in addition to `prompt`.
            There are GROUPS groups, the same in all measurements.
        lens: True: requests read through vllm-lens.
        first: True: measure the time until every request has its first token.
        clients: 0, or the number of clients that share the requests. A client sends its next
            request after its previous request has ended. The figure is the mean time from sending a
            request to its first token. Requests generate `generate` tokens on average.
        salt: makes the prompts different, so that a run does not hit another run's cache.
        keep: a file to which the rows are written, for benchmarks.values; "" for no file.
    """

    name: str
    batch: int
    prompt: int
    generate: int
    layers: list[int] | None = None
    edits: str | None = None
    probes: int = 0
    named: bool = False
    features: list[int] | None = None
    unembedded: list[int] | None = None
    summed: list[int] | None = None
    monitored: int = 0
    shared: int = 0
    lens: bool = False
    first: bool = False
    clients: int = 0
    salt: int = 0
    keep: str = ""

    @property
    def tokens(self) -> int:
        """The count that is divided by the measured seconds.

        By default, this is the number of generated tokens, or of prompt tokens if `generate` is 1.
        With `first`, it is the number of first tokens. With `clients`, it is 1, because the
        measured seconds are a mean time.
        """
        if self.clients:
            return 1
        if self.first:
            return self.batch
        prompt = self.prompt + self.shared
        return self.batch * (prompt if self.generate == 1 else self.generate)

    def prompts(self, vocab: int) -> list[list[int]]:
        """The token ids of each request."""
        import numpy as np

        def tokens(seed: tuple[int, ...], size: int) -> list[int]:
            found: list[int] = np.random.default_rng(seed).integers(5, vocab, size).tolist()
            return found

        return [
            tokens((0, i % GROUPS), self.shared) + tokens((1, self.salt, i), self.prompt)
            for i in range(self.batch)
        ]


def extra_args(work: Workload, config: Any) -> list[dict[str, Any] | None]:
    """The extra_args of each request."""
    if work.lens:
        return [{"output_residual_stream": work.layers}] * work.batch
    asked = work.layers is not None or work.edits is not None or work.probes
    if not (asked or work.features or work.unembedded or work.summed):
        return [None] * work.batch
    from vllm_scope import Add, Features, Gate, LensTopK, Moments, Probe, Read, scope

    middle, vector = middle_of(config), partial(vector_of, config)
    actions: list[Any] = []
    if work.layers is not None:
        actions.append(Read("resid_post", layers=work.layers))
    for i in range(work.probes):
        weight = f"probe-{i}" if work.named else vector(i)
        actions.append(Probe(weight, layer=middle, name=f"p{i}"))
    actions += [Features(f"sae-{layer}") for layer in work.features or ()]
    if work.unembedded:
        actions.append(LensTopK(layers=work.unembedded))
    if work.summed:
        actions.append(Moments(layers=work.summed))
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
    """Register the weights of the probes that requests name."""
    from vllm_scope.vectors import SteeringModule, to_bytes

    config = llm.llm_engine.vllm_config.model_config
    known = llm.collective_rpc("scope_modules")[0]
    for i in range(num_probes):
        if f"probe-{i}" in known:
            continue
        module = SteeringModule({("resid_post", middle_of(config)): vector_of(config, i)})
        llm.collective_rpc("scope_register", args=(f"probe-{i}", to_bytes(module)))


def set_monitor(llm: Any, num_layers: int) -> None:
    """Set a linear probe over `num_layers` layers as a monitor, or no monitor for 0 layers."""
    if os.environ["VLLM_SCOPE"] == "0":
        return
    from vllm_scope import set_monitors

    config = llm.llm_engine.vllm_config.model_config
    total = config.get_total_num_hidden_layers()
    layers = [(2 * i + 1) * total // (2 * num_layers) for i in range(num_layers)]
    weight = [vector_of(config, layer).tolist() for layer in layers]
    probe = {"weight": weight, "layers": layers, "aggregate": "max", "threshold": 1e6}
    set_monitors(llm, {"eight": probe} if num_layers else {})


def middle_of(config: Any) -> int:
    return int(config.get_total_num_hidden_layers()) // 2


def vector_of(config: Any, seed: int) -> Any:
    """float32 [hidden_size]."""
    return drawn(config.get_hidden_size(), seed)


def drawn(size: int, seed: int) -> Any:
    """float32 [size]. The edit of the n-th request has the seed 1000 + n."""
    import numpy as np

    return np.random.default_rng(seed).normal(size=size).astype(np.float32) / size


def delivered(work: Workload, outputs: list[Any]) -> int:
    """Bytes in the caller's results. Fails if rows are missing."""
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
    features = sum(len(found) for r in results for found in r.features.values())
    tokens = sum(
        one.token_ids.numel() for r in results for x in r.lens.values() for one in x.values()
    )
    return rows * size + 4 * scores + 8 * (features + tokens)


def measure(llm: Any, work: Workload) -> dict[str, Any]:
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
    set_monitor(llm, work.monitored)
    prompts = [{"prompt_token_ids": ids} for ids in work.prompts(config.get_vocab_size())]
    started = time.perf_counter()
    if work.clients:
        for i, one in enumerate(params):
            one.max_tokens = work.generate // 2 + i * 7919 % work.generate
        times, outputs = first_tokens(llm.llm_engine, prompts, params, work.clients)
        # The clients' first requests are left out, because all are sent at the same time.
        seconds = statistics.fmean(came - sent for sent, came in times[work.clients :])
    elif work.first:
        times, outputs = first_tokens(llm.llm_engine, prompts, params, work.batch)
        seconds = max(came for _, came in times) - times[0][0]
    else:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
    found: dict[str, Any] = {"seconds": seconds, "tokens": work.tokens}
    found["cached"] = sum(output.num_cached_tokens or 0 for output in outputs)
    if work.monitored:
        assert all(output.scope.status == "complete" for output in outputs)
    if any(p.extra_args for p in params):
        found["gigabytes"] = delivered(work, outputs) / 1e9
    if work.keep:
        keep(work, [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs], rows(outputs))
    return found


def first_tokens(
    engine: Any, prompts: list[Any], params: list[Any], clients: int
) -> tuple[list[tuple[float, float]], list[Any]]:
    """Let clients share requests. When a client's request has ended, the client sends the next one.

    Returns:
        for each request, the times in seconds when it was sent and when its first token arrived;
        and the finished outputs.
    """
    waiting = iter(enumerate(zip(prompts, params, strict=True)))
    sent: dict[str, float] = {}
    came: dict[str, float] = {}
    ended = []

    def send() -> None:
        following = next(waiting, None)
        if following is not None:
            i, (prompt, param) = following
            sent[f"{i}"] = time.perf_counter()
            engine.add_request(f"{i}", {"type": "token", **prompt}, param)

    for _ in range(clients):
        send()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids and output.request_id not in came:
                came[output.request_id] = time.perf_counter()
            if output.finished:
                ended.append(output)
                send()
    assert came.keys() == sent.keys(), f"no token of {sent.keys() - came.keys()}"
    return [(at, came[name]) for name, at in sent.items()], ended


def rows(outputs: list[Any]) -> list[Any]:
    """The rows of each request, [num_layers, num_positions, hidden_size]."""
    import torch

    if hasattr(outputs[0], "activations"):
        return [output.activations["residual_stream"] for output in outputs]
    return [torch.stack([o.scope[stream] for stream in sorted(o.scope.keys())]) for o in outputs]


def keep(work: Workload, token_ids: list[list[int]], rows: list[Any]) -> None:
    import torch

    torch.save({"token_ids": token_ids, "rows": rows}, work.keep)


def serve(
    load: Callable[[dict[str, Any]], Any], measure: Callable[[Any, Workload], dict[str, Any]]
) -> None:
    """Load the model of the first line. Then measure the workload of each further line."""
    # vLLM logs to standard output. Therefore file descriptor 1 becomes a copy of standard error.
    # Results are written to `out`, which is the earlier standard output.
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
