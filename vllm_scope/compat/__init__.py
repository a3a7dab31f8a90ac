"""Keys, classes and routes of other systems, whose users need to change only an import.

vllm_lens/      the extra_args, SteeringVector, output.activations and client of vllm-lens
steering_http/  the steering fork's keys, capture_results, steering modules and /v1/steering
probe_hook.py   LLM, AsyncLLM and SamplingParams of vllm-probe-hook
hidden_states.py    the options and the hidden states of vllm-probe-hook
act_capture.py  VLLM_ACT_* variables and the .npz files of the Activation Capture System
inspect.py      a model provider for the evaluation framework Inspect
own_loop.py     the engine of the model provider, on a separate event loop
inspect_scoring.py  a solver and a scorer for Inspect
bounds.py       limits of the values of a face's keys

`out.scope.as_cache()` returns the rows under TransformerLens's names.

Each face is a file or a folder of this folder, and uses the public API of vllm-scope. docs/faces.md
lists how each face differs from the other system. A user who sends a face's keys in `extra_args`
imports nothing: the package imports the face when the first request uses such a key. An API server
imports the faces of OVER_HTTP when it starts.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from vllm_scope.request.sites import Sites

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_scope.engine.frontend.translators import Translation

#: Maps each face to the keys of `extra_args` that the face accepts.
KEYS: dict[str, tuple[str, ...]] = {
    "vllm_lens": (
        "output_residual_stream", "apply_steering_vectors", "output_qk", "apply_hooks",
        "activations_transport",
    ),
    "probe_hook": ("probe_hook",),
    "steering_http": (
        "steering_vectors", "prefill_steering_vectors", "decode_steering_vectors",
        "steering_clamps", "prefill_steering_clamps", "decode_steering_clamps",
        "steering_module_ref", "steering_name", "steering", "capture", "capture_wait",
        "sae_clamp_specs", "sae_full_reconstruction_specs", "patch", "patch_vectors",
    ),
    "act_capture": (),
}  # fmt: skip

#: The keys with which a request changes rows.
EDITING: frozenset[str] = frozenset({
    "apply_steering_vectors", "apply_hooks",
    "steering_vectors", "prefill_steering_vectors", "decode_steering_vectors",
    "steering_clamps", "prefill_steering_clamps", "decode_steering_clamps",
    "steering_module_ref", "steering_name", "steering",
    "sae_clamp_specs", "sae_full_reconstruction_specs", "patch", "patch_vectors",
})  # fmt: skip
#: The attribute of an engine's VllmConfig that holds the hooks of all requests.
PERSISTENT = "scope_persistent_hooks"
#: The Python modules of this package whose attribute HTTP is an HttpFace.
OVER_HTTP: tuple[str, ...] = ("vllm_lens.http", "steering_http.http")


def register() -> None:
    """Register the translator of each face's keys in this process."""
    from vllm_scope.engine.frontend import translators

    everywhere = {"act_capture": _captures_all, "vllm_lens": _hooks_all}
    for face, keys in KEYS.items():
        translators.register(face, keys, partial(_translate, face), everywhere.get(face))


def register_http() -> None:
    """Register the faces of OVER_HTTP with the server, in this API server process."""
    from vllm_scope.server import faces

    for module in OVER_HTTP:
        faces.register(importlib.import_module(f"vllm_scope.compat.{module}").HTTP)


def _translate(face: str, values: Mapping[str, object], sites: Sites) -> Translation:
    module = importlib.import_module(f"vllm_scope.compat.{face}")
    found: Translation = module.translate(values, sites)
    return found


def _captures_all(vllm_config: VllmConfig) -> Mapping[str, object] | None:
    """The values with which each request uses the face act_capture.

    The face has no keys. The result is {} if VLLM_ACT_CAPTURE or the worker class turns capture on.
    Otherwise the result is None, and requests do not use the face.
    """
    on = os.environ.get("VLLM_ACT_CAPTURE", "0").lower() in ("1", "true", "on", "yes")
    on = on or str(vllm_config.parallel_config.worker_cls).endswith(".WorkerCapture")
    return {} if on else None


def _hooks_all(vllm_config: VllmConfig) -> Mapping[str, object] | None:
    """The values with which each request uses the face vllm_lens.

    The result maps PERSISTENT to the hooks that `llm.register_hooks` received. The result is None
    if there are no such hooks.
    """
    found = vllm_config.__dict__.get(PERSISTENT)
    return {PERSISTENT: found} if found else None
