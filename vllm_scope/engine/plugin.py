"""The `vllm.general_plugins` entry point.

Runs:  `register` in the front-end, in EngineCore and in every worker process, maybe
       more than once. Light and idempotent.

Promise: with VLLM_SCOPE=0, nothing at all. Otherwise a vLLM of another version, or one whose
seams moved, is refused with a sentence that names the version or the seam.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm_scope.config import KEY, ScopeConfig
from vllm_scope.engine.seams import check_version, wrap_function, wrap_method
from vllm_scope.sinks.options import without_secrets

logger = logging.getLogger("vllm.vllm_scope")

_registered = False


def enabled() -> bool:
    """False where VLLM_SCOPE is 0, false, off or no."""
    return os.environ.get("VLLM_SCOPE", "1").lower() not in ("0", "false", "off", "no")


def register() -> None:
    """Wrap vLLM's seams, once per process."""
    global _registered
    if _registered or not enabled():
        return
    _registered = True
    import vllm

    check_version(vllm.__version__)
    from vllm_scope import compat as faces
    from vllm_scope.engine import environment, refusals
    from vllm_scope.engine.core import clearing, scheduler
    from vllm_scope.engine.core import entry as core
    from vllm_scope.engine.frontend import outputs
    from vllm_scope.engine.frontend import requests as frontend
    from vllm_scope.engine.http import serving as http
    from vllm_scope.engine.worker import attach, faults

    environment.wrap()
    wrap_engine_args()
    wrap_log()
    frontend.wrap()
    outputs.wrap()
    core.wrap()
    scheduler.wrap()
    faults.wrap()
    clearing.wrap()
    refusals.wrap()
    attach.wrap()
    http.wrap()
    faces.register()


def wrap_engine_args() -> None:
    """Put the configuration, with defaults, where workers and the compile key see it."""
    from vllm.engine.arg_utils import EngineArgs

    def create_engine_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        additional = dict(self.additional_config or {})
        additional[KEY] = ScopeConfig.parse(additional.get(KEY, {})).with_graph_key()
        self.additional_config = additional
        return original(self, *args, **kwargs)

    wrap_method(EngineArgs, "create_engine_config", [], create_engine_config)


def startup_module() -> Any:
    """Where vLLM logs an engine's arguments."""
    try:
        from vllm.entrypoints.common import startup  # since vLLM 0.33
    except ImportError:
        from vllm.entrypoints.serve.utils import api_utils as startup
    return startup


def wrap_log() -> None:
    """Keep what sinks are given, tokens among it, out of the log of the engine's arguments."""

    def redact(original: Any, args: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = original(args)
        additional = found.get("additional_config")
        if not isinstance(additional, dict) or KEY not in additional:
            return found
        shown = {**additional, KEY: without_secrets(additional[KEY])}
        return {**found, "additional_config": shown}

    wrap_function([startup_module()], "redact_sensitive_args", ["args"], redact)
