"""The keys, results, steering modules and routes of RhizoNymph/vllm, the steering fork of vLLM.

    from vllm_scope.compat.steering_http import LLM, SamplingParams
    params = SamplingParams(
        steering_vectors={"post_block": {15: vector}},                # at every token
        prefill_steering_vectors={"post_block": {15: vector}},        # at the prompt's tokens
        decode_steering_vectors={"pre_attn": {3: {"vector": [...], "scale": 2.0}}},
        steering_clamps={"post_block": {20: [{"vector": direction, "max": 4.0}]}},
        steering_module_ref=("formal", 1.5),
        steering=[{"when": ..., "scope": "this_token", "apply": ...}],  # added on a condition
        sae_clamp_specs=[{"module_name": "gemma", "clamps": ...}],  # for features of an SAE
        capture={"filesystem": {"request_id": "q", "tag": "run", "hooks": {...}}},
    )
    out.capture_results["filesystem"].status

With vLLM's own LLM and SamplingParams, these arguments are keys of `extra_args`.

The fork's hooks are pre_attn, post_attn and post_block. A request can use a hook only if the engine
taps the hook's site (`additional_config={"scope": {"sites": [...]}}`). The vectors of a request
form up to three tiers: the vectors for every token, those for the prompt's tokens, and those for
generated tokens. In the same way, the clamps of a request form up to three tiers. The vectors of a
steering module and of the request's tiers are added together. Clamps apply after all additions.
Clamps of features apply after all other clamps. A token's position decides which tiers apply to the
token. Therefore the same tiers apply if a preempted request computes the token again.

A caller loads steering modules with `load_modules(llm, ["formal=formal.json"])`. At start, the
engine loads the modules in `additional_config={"scope": {"modules": {"formal": "formal.json"}}}`.

engine.py   LLM and SamplingParams with the fork's arguments
keys.py     translates the keys of a request to actions; load_modules
vectors.py  tiers of vectors and of clamps, and the limits of both
gates.py    vectors that a request adds on a condition
features.py clamps on features of sparse autoencoders
capture.py  captures, capture_results, and a reader of the files
http.py     the keys in bodies of requests, capture_results in answers, and /v1/steering
tiers.py    vectors and clamps that /v1/steering sets, as server-wide edits
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
