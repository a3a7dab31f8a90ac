"""Makes this package's environment variables known to vLLM.

vLLM warns about each environment variable VLLM_* that vLLM does not know. With the option
`--fail-on-environ-validation`, vLLM does not start if an unknown variable is set. If a user
misspells the name of one of our variables, vLLM still warns about the misspelt name.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_scope.engine import wrapping

VARIABLES = (
    "VLLM_SCOPE", "VLLM_SCOPE_ADMIN_KEY", "VLLM_SCOPE_INLINE_KIB", "VLLM_SCOPE_MAX_BODY_MIB",
    "VLLM_SCOPE_RESULTS_DIR", "VLLM_SCOPE_RESULTS_MIB", "VLLM_SCOPE_RESULTS_TTL_S",
    "VLLM_SCOPE_REUSE_MIB", "VLLM_SCOPE_ROWS_MIB", "VLLM_SCOPE_RUN", "VLLM_SCOPE_SWEEP_CELLS",
    "VLLM_SCOPE_SWEEP_SHARE", "VLLM_SCOPE_URL", "VLLM_SCOPE_WRITE_TIMEOUT_S",
    "VLLM_ACT_CAPTURE", "VLLM_ACT_MODE", "VLLM_ACT_OUTDIR", "VLLM_ACT_RETURN", "VLLM_ACT_RP_K",
    "VLLM_ACT_RP_SEED", "VLLM_ACT_TOPK_K",
)  # fmt: skip


def _validate(original: Callable[[bool], object], hard_fail: bool) -> None:
    from vllm.envs import environment_variables as known

    ours = [name for name in VARIABLES if name not in known]
    # The key of vLLM's compile cache depends on `known`. Therefore our names are removed after the
    # check.
    known.update(dict.fromkeys(ours, lambda: None))
    try:
        original(hard_fail)
    finally:
        for name in ours:
            del known[name]


def wrap() -> None:
    if wrapping.exists("validate_environ"):  # vLLM 0.30
        wrapping.wrap("validate_environ", _validate)
        return
    wrapping.wrap(
        "Platform.validate_environ",
        lambda original, _platform, hard_fail: _validate(original, hard_fail),
    )
