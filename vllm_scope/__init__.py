"""vllm-scope: read and edit what a transformer computes, while stock vLLM serves it.

    from vllm_scope import Read, scope
    params = SamplingParams(extra_args=scope(Read("resid_post", layers=[2, 5])))
    out = llm.generate(prompts, params)[0]
    out.scope["resid_post", 5]            # Tensor [positions, hidden_size]

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm_scope.errors import (
    CapacityError,
    CompatError,
    ConfigError,
    FileError,
    ScopeError,
    SpecError,
)
from vllm_scope.request.actions import (
    Ablate,
    Add,
    Clamp,
    Gate,
    Probe,
    Read,
    Replace,
    ScaleFeature,
    SetFeature,
)
from vllm_scope.request.nets import AttentionPool, Ema, Mlp, RollingMean
from vllm_scope.request.schema import spec_schema
from vllm_scope.request.selectors import Except, Positions, TokenIds, Union
from vllm_scope.request.spec import Spec, scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm import LLM

    from vllm_scope.files import Capture

__version__ = "0.1.0"

__all__ = [
    "Ablate",
    "Add",
    "AttentionPool",
    "CapacityError",
    "Clamp",
    "CompatError",
    "ConfigError",
    "Ema",
    "Except",
    "FileError",
    "Gate",
    "Mlp",
    "Positions",
    "Probe",
    "Read",
    "Replace",
    "RollingMean",
    "ScaleFeature",
    "ScopeError",
    "SetFeature",
    "Spec",
    "SpecError",
    "TokenIds",
    "Union",
    "__version__",
    "open",
    "scope",
    "set_monitors",
    "spec_schema",
]


def set_monitors(llm: LLM, monitors: Mapping[str, object]) -> None:
    """Replace the probes that an `LLM` adds to every request, for requests from now on.

    Args:
        llm: vllm.LLM. A server has `PUT /v1/scope/monitors` for it.
        monitors: name -> the fields of a probe with a threshold, as in JSON (docs/probes.md); empty
            for none.

    Raises:
        SpecError: one of them is malformed, or this engine cannot have it. All stay as they were.
    """
    from vllm_scope.engine.monitors import set_on

    set_on(llm.llm_engine, monitors)


def open(path: str | os.PathLike[str]) -> Capture:
    """Captured requests below a folder, a file or a URL; see `vllm_scope.files`.

    Raises:
        FileError: there is nothing, or a file of ours is damaged.
    """
    from vllm_scope.files import open as open_files

    return open_files(path)
