"""Our environment variables, known to vLLM.

vLLM warns of every VLLM_* that it does not know, and with `--fail-on-environ-validation`
refuses to start. A misspelt one of ours is still one that it does not know.
"""

from __future__ import annotations

from typing import Any

from vllm_scope.engine.seams import wrap_function, wrap_method

VARIABLES = (
    "VLLM_SCOPE", "VLLM_SCOPE_ADMIN_KEY", "VLLM_SCOPE_INLINE_KIB", "VLLM_SCOPE_MAX_BODY_MIB",
    "VLLM_SCOPE_RESULTS_DIR", "VLLM_SCOPE_RESULTS_MIB", "VLLM_SCOPE_RESULTS_TTL_S",
    "VLLM_SCOPE_ROWS_MIB", "VLLM_SCOPE_RUN", "VLLM_SCOPE_URL", "VLLM_SCOPE_WRITE_TIMEOUT_S",
    "VLLM_ACT_CAPTURE", "VLLM_ACT_MODE", "VLLM_ACT_OUTDIR", "VLLM_ACT_RETURN", "VLLM_ACT_RP_K",
    "VLLM_ACT_RP_SEED", "VLLM_ACT_TOPK_K",
)  # fmt: skip


def _validate(original: Any, hard_fail: bool) -> None:
    from vllm.envs import environment_variables as known

    ours = [name for name in VARIABLES if name not in known]
    # Not for longer: what stands there is part of the compile cache's key, written beside it.
    known.update(dict.fromkeys(ours, lambda: None))
    try:
        original(hard_fail)
    finally:
        for name in ours:
            del known[name]


def wrap() -> None:
    from vllm import envs
    from vllm.platforms.interface import Platform

    if hasattr(envs, "validate_environ"):  # vLLM 0.30; a platform's method since then
        wrap_function([envs], "validate_environ", ["hard_fail"], _validate)
        return
    wrap_method(
        Platform, "validate_environ", ["hard_fail"],
        lambda original, _platform, hard_fail: _validate(original, hard_fail),
    )  # fmt: skip
