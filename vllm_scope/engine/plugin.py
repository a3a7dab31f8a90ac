"""The entry point of the group `vllm.general_plugins`, by which vLLM loads this package.

Runs:  `register` in the front-end, in EngineCore and in every worker process. A process can call
       `register` several times, but only the first call has an effect.

Promise: with VLLM_SCOPE=0, no symbol of vLLM is wrapped. Otherwise, if the version of vLLM is not
supported, or a symbol does not fit its wrapper, `register` raises an error. The error names the
version or the symbol.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vllm_scope.config import KEY, ScopeConfig
from vllm_scope.engine import wrapping
from vllm_scope.engine.vllm_types import EngineArgs, VllmConfig
from vllm_scope.request.sites import Sites
from vllm_scope.results.allocator import reuse_bytes
from vllm_scope.sinks.options import without_secrets

logger = logging.getLogger("vllm.vllm_scope")

_registered = False
#: The function that `create_engine_config` calls with an engine's sites. `checking_sites` sets it.
_check_sites: ContextVar[Callable[[Sites], object] | None] = ContextVar(
    "vllm_scope_check_sites", default=None
)


def enabled() -> bool:
    """False if the environment variable VLLM_SCOPE is 0, false, off or no."""
    return os.environ.get("VLLM_SCOPE", "1").lower() not in ("0", "false", "off", "no")


def register() -> None:
    """Wrap vLLM's symbols. Later calls in the same process do nothing."""
    global _registered
    if _registered or not enabled():
        return
    _registered = True
    import vllm

    wrapping.check_version(vllm.__version__)
    from vllm_scope import compat as faces
    from vllm_scope.engine import environment, monitors, refusals, rust_frontend
    from vllm_scope.engine.core import clearing, scheduler, scores
    from vllm_scope.engine.core import entry as core
    from vllm_scope.engine.core import outputs as core_outputs
    from vllm_scope.engine.frontend import outputs
    from vllm_scope.engine.frontend import requests as frontend
    from vllm_scope.engine.http import serving as http
    from vllm_scope.engine.worker import attach

    environment.wrap()
    wrap_engine_args()
    wrap_log()
    frontend.wrap()
    outputs.wrap()
    core.wrap()
    rust_frontend.wrap()
    scheduler.wrap()
    core_outputs.wrap()
    scores.wrap()
    clearing.wrap()
    refusals.wrap()
    attach.wrap()
    http.wrap()
    faces.register()
    monitors.register()


@contextmanager
def checking_sites(check: Callable[[Sites], object]) -> Iterator[None]:
    """In the `with` block, `check` is called with the sites of each engine that is configured. If
    `check` raises an error, the engine does not start."""
    token = _check_sites.set(check)
    try:
        yield
    finally:
        _check_sites.reset(token)


def wrap_engine_args() -> None:
    """Wrap EngineArgs.create_engine_config. The wrapper stores all options of this package in
    additional_config. The workers read the options there, and the key of vLLM's compile cache
    depends on these options. Before vLLM starts a process, the wrapper raises an error if a file is
    missing, or if the model lacks a site or layer."""
    from vllm_scope.engine.frontend import requests
    from vllm_scope.engine.model import sites_of

    def create_engine_config(
        original: Callable[..., VllmConfig], self: EngineArgs, *args: object, **kwargs: object
    ) -> VllmConfig:
        reuse_bytes()  # raises if VLLM_SCOPE_REUSE_MIB is not a number, before a process starts
        if "vllm.entrypoints.llm" in sys.modules:
            requests.wrap_llm()  # an LLM makes its configuration before it adds requests
        additional = dict(self.additional_config or {})
        parsed = ScopeConfig.parse(additional.get(KEY, {}))
        parsed.check_files()
        config = parsed.with_graph_key()
        additional[KEY] = config
        self.additional_config = additional
        found = original(self, *args, **kwargs)
        # The user sees an error of this call. A later error would only be in a worker's log.
        sites = sites_of(found, ScopeConfig.parse(config))
        if (check := _check_sites.get()) is not None:
            check(sites)
        return found

    wrapping.wrap("EngineArgs.create_engine_config", create_engine_config)


def wrap_log() -> None:
    """Wrap the function that prepares vLLM's arguments for the log. The options of sinks, policies
    and monitors can contain secrets. The wrapper hides the secrets (`without_secrets`)."""

    def redact(
        original: Callable[..., dict[str, object]], args: dict[str, object]
    ) -> dict[str, object]:
        found = original(args)
        additional = found.get("additional_config")
        if not isinstance(additional, dict) or KEY not in additional:
            return found
        shown = {**additional, KEY: without_secrets(additional[KEY])}
        return {**found, "additional_config": shown}

    wrapping.wrap("redact_sensitive_args", redact)
