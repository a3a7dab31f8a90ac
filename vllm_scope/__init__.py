"""vllm-scope: read and edit what a transformer computes, while stock vLLM serves it.

    from vllm_scope import Read, scope
    params = SamplingParams(extra_args=scope(Read("resid_post", layers=[2, 5])))
    out = llm.generate(prompts, params)[0]
    out.scope["resid_post", 5]            # Tensor [positions, hidden_size]

Importing this package imports neither torch nor vLLM.
"""

from vllm_scope.actions import Ablate, Add, Clamp, Probe, Read, Replace
from vllm_scope.errors import CapacityError, CompatError, ConfigError, ScopeError, SpecError
from vllm_scope.selectors import Except, TokenIds, Union
from vllm_scope.spec import Spec, scope

__version__ = "0.1.0"

__all__ = [
    "Ablate",
    "Add",
    "CapacityError",
    "Clamp",
    "CompatError",
    "ConfigError",
    "Except",
    "Probe",
    "Read",
    "Replace",
    "ScopeError",
    "Spec",
    "SpecError",
    "TokenIds",
    "Union",
    "__version__",
    "scope",
]
