"""The keys, SteeringVector, `output.activations`, wire format and client of vllm-lens.

    from vllm_scope.compat.vllm_lens import SteeringVector
    params = SamplingParams(max_tokens=8, extra_args={
        "output_residual_stream": [12, 20],
        "apply_steering_vectors": [SteeringVector(torch.randn(1, 4096), [15], scale=4.0)],
    })
    out = llm.generate(prompts, params)[0]
    out.activations["residual_stream"]    # [n_layers, n_prompt + n_generated - 1, hidden]

The rows are read after all steering of the layer. Layer k has the values of Hugging Face's
`hidden_states[k + 1]`. For the last layer, these are the values before the final norm.

A request can have these keys in `extra_args`. Over HTTP, the keys are in `vllm_xargs`, and their
values are JSON strings.
    output_residual_stream   a Read of "resid_post". True reads all layers, a list reads some
                             layers, and False or None reads nothing
    apply_steering_vectors   an Add for each vector, or for each position of 3-D activations
    apply_hooks              Python functions that change rows between layers. The engine must be
                             eager, and must run in this process
    output_qk                Reads of "q" and "k", if the engine taps these sites
    activations_transport    "binary" lets an HTTP answer send tensors as files

keys.py        translates the keys of a request to actions; Activations
steering.py    SteeringVector, whose vectors a request adds to rows
hooks.py       Hook and HookContext, for one request or for all requests
model.py       the methods that SteeringVector and Hook have in place of pydantic's methods
attention.py   computes attention patterns from queries and keys
wire.py        writes tensors as JSON, and reads this JSON
http.py        `activations` in answers, and GET /v1/activations/{handle}
client.py      VLLMLensClient, a client of a server

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

#: Maps exported names to Python modules. The exported names that are not here are in `wire`.
_MODULES = {
    "HTTP": "http", "Activations": "keys", "translate": "keys", "SteeringVector": "steering",
    "GenerateOutput": "client", "VLLMLensClient": "client", "Hook": "hooks", "HookContext": "hooks",
    "attention_patterns": "attention", "compute_attention_weights": "attention",
}  # fmt: skip
#: Names that vllm-lens exports, and that this package does not have.
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
