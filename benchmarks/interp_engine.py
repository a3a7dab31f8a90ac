"""interp-engine's static backend in a process of its own.

This module reads and writes the same lines of JSON as `benchmarks.engine`. `interp_engine` and the
vLLM that it pins must be on Python's path. A point is a place that interp-engine can read or write.
Points are declared when the engine starts. The option `declared` names the points. By default, the
points are `resid_post` of all layers, to read and to write. A request is one call of
`generate_steered`. As in interp-engine's benchmarks, concurrent requests of one event loop share
batches.

Source: interp_engine 1.14.2, interp_engine/vllm_backend.py, VLLMModel.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from benchmarks.engine import Workload, drawn, keep, serve


class Loaded(NamedTuple):
    """Attributes:
    model: interp_engine's VLLMModel, whose engine belongs to `loop`.
    """

    model: Any
    loop: asyncio.AbstractEventLoop


def load(options: dict[str, Any]) -> Loaded:
    from interp_engine import load_model

    # interp-engine needs the tokenizer, because its test at start compares texts.
    del options["skip_tokenizer_init"]
    declared = options.pop("declared", {"static_points": "auto"})
    own = {"dtype", "max_model_len", "gpu_memory_utilization"} & options.keys()
    named = {name: options.pop(name) for name in own}
    model = load_model(
        options.pop("model"), backend="vllm-static", extra_vllm_kwargs=options, **named, **declared
    )
    loop = asyncio.new_event_loop()
    loop.run_until_complete(model.warmup())
    return Loaded(model, loop)


def measure(loaded: Loaded, work: Workload) -> dict[str, Any]:
    model, loop = loaded
    prompts = work.prompts(model.vocab_size)
    points = [f"resid_post.{layer}" for layer in work.layers or ()]
    steering = [_steering(model, work, i) for i in range(work.batch)]
    if work.keep:
        loop.run_until_complete(_keep(model, work, prompts, points, steering))
        return {}
    captured: list[dict[Any, Any]] = [{} for _ in prompts]
    requests = [
        model.generate_steered(
            ids, _sampling(work), steering_spec=spec, capture_points=points or None, capture_out=out
        )
        for ids, spec, out in zip(prompts, steering, captured, strict=True)
    ]
    started = time.perf_counter()
    loop.run_until_complete(_together(requests))
    found = {"seconds": time.perf_counter() - started, "tokens": work.tokens}
    if not points:
        return found
    tokens = len(prompts[0]) + work.generate - 1
    streams = [rows for out in captured for rows in out.values()]
    assert len(streams) == work.batch * len(points)
    assert all(len(rows) == tokens for rows in streams)
    return found | {"gigabytes": sum(s.numel() * s.element_size() for s in streams) / 1e9}


async def _together(requests: list[Any]) -> list[Any]:
    return await asyncio.gather(*requests)


def _sampling(work: Workload) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0, max_tokens=work.generate, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def _steering(model: Any, work: Workload, number: int) -> Any:
    """The same addition as in `benchmarks.engine`, in the middle layer; None without edits."""
    if work.edits is None:
        return None
    import torch
    from interp_engine import AddSpec, SteeringSpec

    vector = torch.from_numpy(drawn(model.d_model, 1000 + (number if work.edits == "own" else 0)))
    return SteeringSpec.at(f"resid_post.{model.n_layers // 2}", AddSpec(vector=vector, scale=1.0))


async def _keep(
    model: Any, work: Workload, prompts: list[list[int]], points: list[str], steering: list[Any]
) -> None:
    """Write rows to a file. Of interp-engine's methods that capture rows, only `capture_generation`
    returns tokens. This method ends an answer at an end-of-text token."""
    import torch

    answers = await _together(
        [
            model.capture_generation(ids, points, max_tokens=work.generate, steering_spec=spec)
            for ids, spec in zip(prompts, steering, strict=True)
        ]
    )
    token_ids = [
        [*ids, *completion.token_ids] for ids, (completion, _) in zip(prompts, answers, strict=True)
    ]
    rows = [
        torch.stack([rows[point] for point in sorted(rows, key=lambda point: point.layer)])
        for _, rows in answers
    ]
    keep(work, token_ids, rows)


if __name__ == "__main__":
    serve(load, measure)
