"""vllm-lens: its keys, SteeringVector, `output.activations`, wire format and client.

    from vllm_scope.compat.vllm_lens import SteeringVector
    params = SamplingParams(max_tokens=8, extra_args={
        "output_residual_stream": [12, 20],
        "apply_steering_vectors": [SteeringVector(torch.randn(1, 4096), [15], scale=4.0)],
    })
    out = llm.generate(prompts, params)[0]
    out.activations["residual_stream"]    # [n_layers, n_prompt + n_generated - 1, hidden]

Rows are read after all steering. Layer k is Hugging Face's `hidden_states[k + 1]`.

Keys in `extra_args`, or over HTTP in `vllm_xargs`, as JSON strings:
    output_residual_stream   Read("resid_post", layers): True for all layers, a list of
                             layers, False or None for nothing
    apply_steering_vectors   an Add for each vector; for 3-D activations one for each position
    apply_hooks              Python functions between the layers; offline, in this process, eager
    output_qk                Read("q", layers) and Read("k", layers), if the engine taps q and k
    activations_transport    "binary": over HTTP, tensors come as files; no effect offline

keys.py        the keys of a request as actions, and Activations
steering.py    SteeringVector
hooks.py       Hook and HookContext, for one request or for all requests
model.py       the pydantic methods of SteeringVector and Hook
attention.py   attention patterns, from queries and keys
wire.py        tensors in JSON
http.py        `activations` in answers, GET /v1/activations/{handle}
client.py      VLLMLensClient

An import of this package, or of the package's client, does not import torch or vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_scope.compat.vllm_lens.attention import attention_patterns, compute_attention_weights
    from vllm_scope.compat.vllm_lens.client import GenerateOutput, VLLMLensClient
    from vllm_scope.compat.vllm_lens.hooks import Hook, HookContext
    from vllm_scope.compat.vllm_lens.http import HTTP
    from vllm_scope.compat.vllm_lens.keys import Activations, translate
    from vllm_scope.compat.vllm_lens.steering import SteeringVector
    from vllm_scope.compat.vllm_lens.wire import (
        decode_activations,
        deserialize_tensor,
        serialize_activations,
        serialize_tensor,
    )

__all__ = [
    "HTTP", "Activations", "GenerateOutput", "Hook", "HookContext", "SteeringVector",
    "VLLMLensClient", "attention_patterns", "compute_attention_weights", "decode_activations",
    "deserialize_tensor", "serialize_activations", "serialize_tensor", "translate",
]  # fmt: skip

#: Exported name -> its module; all other names are in `wire`.
_MODULES = {
    "HTTP": "http", "Activations": "keys", "translate": "keys", "SteeringVector": "steering",
    "GenerateOutput": "client", "VLLMLensClient": "client", "Hook": "hooks", "HookContext": "hooks",
    "attention_patterns": "attention", "compute_attention_weights": "attention",
}  # fmt: skip
#: Exports of vllm-lens that do not exist here.
_MISSING = ("serialize_hook_results", "deserialize_hook_results")


def __getattr__(name: str) -> object:
    if name in _MISSING:
        raise ImportError(
            f"{name} is not needed: hooks and their saved values stay in one process."
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'wire')}")
    if name == "Hook":
        module.attach()
    found: object = getattr(module, name)
    return found
