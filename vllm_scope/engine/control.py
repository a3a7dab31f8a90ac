"""Lets a Controller read and change the server-wide edits of an engine.

Owns:  `edits_of` (the ServerEdits of an engine), `configured` (the controller of a server), `flush`
       (sets the edits that wait for the caller's thread).
Runs:  in the front-end.
From:  controller.   To: engine.core.entry (remote calls), monitors (observations).

The caller's thread is the thread that uses an LLM. Only this thread can use the LLM's socket to
EngineCore. If another thread changes the server-wide edits, the change waits until the caller's
thread adds the next request. The change then applies to this request and to all later requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vllm_scope.control.controller import (
    Controller,
    Observation,
    ServerEdits,
    find_edits_by,
)
from vllm_scope.engine import monitors
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.frontend.connection import connections
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.vllm_types import LLMEngine, VllmConfig
from vllm_scope.errors import ConfigError, shown
from vllm_scope.request.spec import Spec
from vllm_scope.sinks.options import installed

logger = logging.getLogger("vllm.vllm_scope")
TIMEOUT_S = 60.0
#: The group of the entry points of controllers. Each entry point names a function without arguments
#: that returns a Controller.
GROUP = "vllm_scope.controller"


class _Listening:
    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config

    def listen(self, tell: Callable[[Observation], None] | None) -> None:
        monitors.listen(self._vllm_config, tell)


class _OfLlm(_Listening):
    """The server-wide edits of an LLM."""

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine.vllm_config)
        self._engine, self._owner = engine, threading.get_ident()
        if _waiting.of(engine) is None:  # an earlier deque stays: edits can still wait in it
            _waiting.put(engine, deque(maxlen=1))

    def get(self) -> str | None:
        flush(self._engine)
        text: str | None = self._engine.collective_rpc("scope_get_edits")[0]
        return text

    def set(self, text: str | None) -> None:
        waiting = _waiting.of(self._engine)
        assert waiting is not None
        if threading.get_ident() == self._owner:
            waiting.clear()
            _set(self._engine, text)
            return
        # If the edits are not valid, this check raises an error. The controller gets the error at
        # once, and counts a failure. EngineCore checks the edits again later.
        connection = connections.of(self._engine.output_processor)
        if connection is not None and text is not None:
            connection.resolve(Spec.from_json(text))
        waiting.append(text)


class _OfAsync(_Listening):
    """The server-wide edits of an AsyncLLM, for use on any thread except the event loop's
    thread."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.vllm_config)
        self._engine, self._loop = engine, asyncio.get_running_loop()

    def get(self) -> str | None:
        text: str | None = self._call("scope_get_edits")
        return text

    def set(self, text: str | None) -> None:
        self._call("scope_set_edits", text, monitors.spec_of(self._engine.vllm_config))

    @property
    def on_its_loop(self) -> bool:
        """True on the thread of the engine's event loop. On this thread, a wait for the event loop
        would never end."""
        with suppress(RuntimeError):
            return asyncio.get_running_loop() is self._loop
        return False

    def _call(self, name: str, *args: object) -> Any:
        call = self._engine.collective_rpc(name, args=args)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(TIMEOUT_S)[0]


#: Maps an LLMEngine to a deque. If edits wait for the caller's thread, the deque holds the newest
#: edits, as the JSON text of a spec. The value None removes all edits.
_waiting: Beside[deque[str | None]] = Beside()


def configured(vllm_config: VllmConfig) -> Controller | None:
    """Make the controller that a server's configuration names. None if the configuration names no
    controller.

    Raises:
        ConfigError: there is no entry point of this name; or the entry point's function does not
            return a Controller; or there are several API servers. (Each API server would see only
            some of the requests.)
    """
    config = config_of(vllm_config)
    if config is None or config.controller is None:
        return None
    name, points = config.controller, installed(GROUP)
    if name not in points:
        raise ConfigError(
            f"there is no controller {shown(name)}; installed are {', '.join(points) or 'none'}. "
            f"A function in an entry point of the group {GROUP!r} makes a controller."
        )
    if vllm_config.parallel_config._api_process_count != 1:
        raise ConfigError(
            "a controller needs --api-server-count 1: it sees one process's requests."
        )
    made = points[name].load()()
    if not isinstance(made, Controller):
        raise ConfigError(
            f"the controller {shown(name)} is {shown(made)}; it must be a Controller."
        )
    return made


def edits_of(engine: Any) -> ServerEdits:
    """The server-wide edits of an LLM or an AsyncLLM."""
    if hasattr(engine, "llm_engine"):
        return _OfLlm(engine.llm_engine)
    return _OfAsync(engine)


find_edits_by(edits_of)


def _set(engine: LLMEngine, text: str | None) -> None:
    """Set the server-wide edits. Only the caller's thread calls this function."""
    args = text, monitors.spec_of(engine.vllm_config)
    engine.collective_rpc("scope_set_edits", args=args)


def flush(engine: LLMEngine) -> None:
    """Set the edits that wait for the caller's thread. If EngineCore refuses the edits, this
    function logs a warning, and no request fails."""
    waiting = _waiting.of(engine)
    if not waiting:
        return
    try:
        _set(engine, waiting.pop())
    except Exception as error:
        logger.warning("vllm-scope: a controller's edits are refused: %s", error)
