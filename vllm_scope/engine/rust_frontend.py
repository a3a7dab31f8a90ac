"""Refuses requests with a scope that come from vLLM's Rust front-end.

Owns:  the code that refuses these requests, and the warning when the Rust front-end starts.
Runs:  in EngineCore (input thread), and in `vllm serve` (the warning).

`VLLM_USE_RUST_FRONTEND=1 vllm serve` runs no Python code between the HTTP request and EngineCore.
Therefore no code checks a scope, no process receives rows, and a client can send a forged ticket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_scope.engine import wrapping
from vllm_scope.engine.frontend import translators
from vllm_scope.engine.params import TICKET, asks
from vllm_scope.engine.vllm_types import EngineCore, EngineCoreRequest
from vllm_scope.errors import SpecError

T = TypeVar("T")

logger = logging.getLogger("vllm.vllm_scope")

REFUSED = (
    "the request has a scope, and vLLM's Rust front-end, which runs no Python, sent it past "
    "vllm-scope's checks. Start without VLLM_USE_RUST_FRONTEND, or leave the scope out."
)


def serves(vllm_config: Any) -> bool:
    """True if an engine's requests come from vLLM's Rust front-end.

    The value of VLLM_USE_RUST_FRONTEND alone is not enough, because `LLM` ignores this variable. If
    `run_multi_api_server` of `vllm serve` starts the engine, the API server rank is -1. This
    function starts the Rust front-end if the variable is set.
    vllm 0.30 to 0.33, entrypoints/cli/serve.py, run_multi_api_server
    """
    from vllm import envs

    rank = vllm_config.parallel_config._api_process_rank
    return bool(envs.VLLM_USE_RUST_FRONTEND) and rank == -1


def _preprocess(original: Callable[..., T], self: EngineCore, request: EngineCoreRequest) -> T:
    """EngineCore.preprocess_add_request. This wrapper runs before the wrapper of entry.py."""
    params = request.sampling_params
    extra = getattr(params, "extra_args", None) or {}
    asked = asks(params) or translators.has_keys(extra)
    if (asked and TICKET not in extra) or (TICKET in extra and serves(self.vllm_config)):
        # The answer of the Rust front-end does not contain the text of the error. Therefore the
        # text is logged here.
        logger.warning("vllm-scope: request %s is refused: %s", request.request_id, REFUSED)
        raise SpecError(REFUSED)
    return original(self, request)


def _start(original: Callable[..., object], self: object, *args: object, **kwargs: object) -> None:
    """RustFrontendProcessManager.__init__."""
    logger.warning(
        "vllm-scope: VLLM_USE_RUST_FRONTEND is set, and vLLM's Rust front-end runs no Python. "
        "Requests with a scope are refused, and the routes of vllm-scope do not exist. Requests "
        "without a scope are served, and sinks that read every request work."
    )
    original(self, *args, **kwargs)


def wrap() -> None:
    wrapping.wrap("EngineCore.preprocess_add_request", _preprocess)
    wrapping.wrap("RustFrontendProcessManager.__init__", _start)
