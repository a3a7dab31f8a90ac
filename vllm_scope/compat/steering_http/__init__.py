"""The steering fork of vLLM (RhizoNymph/vllm): its keys, results, modules and routes.

    from vllm_scope.compat.steering_http import LLM, SamplingParams
    params = SamplingParams(
        steering_vectors={"post_block": {15: vector}},                # every token
        prefill_steering_vectors={"post_block": {15: vector}},        # the prompt's
        decode_steering_vectors={"pre_attn": {3: {"vector": [...], "scale": 2.0}}},
        steering_clamps={"post_block": {20: [{"vector": direction, "max": 4.0}]}},
        steering_module_ref=("formal", 1.5),
        steering=[{"when": ..., "scope": "this_token", "apply": ...}],  # on a condition
        sae_clamp_specs=[{"module_name": "gemma", "clamps": ...}],  # features of an SAE
        capture={"filesystem": {"request_id": "q", "tag": "run", "hooks": {...}}},
    )
    out.capture_results["filesystem"].status

With vLLM's own LLM and SamplingParams the same fields are keys of `extra_args`.

Hooks are pre_attn, post_attn and post_block. A request can use a hook only if the engine taps it
(`additional_config={"scope": {"sites": [...]}}`). A tier is the vectors, or the clamps, for every
token, for the prompt's tokens, or for generated tokens. The vectors of a module and of the
request's tiers are added together. Clamps apply after all additions. Clamps of features apply after
all other clamps. A token's position decides the token's tiers. Therefore a token that is computed
again after a preemption keeps its tiers.

Steering modules are loaded with `load_modules(llm, ["formal=formal.json"])`, or at start
with `additional_config={"scope": {"modules": {"formal": "formal.json"}}}`.

engine.py   LLM, SamplingParams
keys.py     the keys of a request as actions; load_modules
vectors.py  tiers of vectors and of clamps, and their bounds
gates.py    vectors that are added on a condition
features.py clamps on features of sparse autoencoders
capture.py  captures, capture_results, and a reader of the files
http.py     the keys in bodies of requests, capture_results in answers, /v1/steering
tiers.py    the vectors set over /v1/steering, as server-wide edits
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_scope.compat.steering_http.capture import (
    CaptureEntry,
    CaptureResult,
    FilesystemCaptureRequest,
    read_request,
)
from vllm_scope.compat.steering_http.keys import load_modules, translate

if TYPE_CHECKING:
    from vllm_scope.compat.steering_http.engine import LLM, SamplingParams

__all__ = [
    "LLM", "CaptureEntry", "CaptureResult", "FilesystemCaptureRequest", "SamplingParams",
    "load_modules", "read_request", "translate",
]  # fmt: skip


def __getattr__(name: str) -> object:
    # LLM and SamplingParams import vLLM, which `read_request` does not need.
    if name not in ("LLM", "SamplingParams"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_scope.compat.steering_http import engine

    found: object = getattr(engine, name)
    return found
