"""Calls the engine for the operator's routes.

Owns:  EngineCalls (implements server.access.Engine).
Runs:  in the API server, on its event loop.
From:  serving (makes an EngineCalls for each app).   To: engine.frontend.connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from vllm_scope.control.activity import Activity, Ring, State
from vllm_scope.engine.frontend.connection import ask_replicas, connections, refusing
from vllm_scope.engine.http.sweeps import SweepRun, begin
from vllm_scope.engine.moments import drop_moments_of_async, keys_of_async, one_of_async
from vllm_scope.engine.monitors import activity_of, set_on_async, spec_of, told
from vllm_scope.engine.vllm_types import AsyncLLM
from vllm_scope.engine.worker.replies import Module
from vllm_scope.results.inbox import num_bytes_held, num_pending
from vllm_scope.server.changes import NoTurnError
from vllm_scope.server.settings import ServerSettings
from vllm_scope.sweeps.wire import AskedSweep


class EngineCalls:
    """Makes the calls to the engine for the operator's routes.

    EngineCore returns the registry's errors as text. This class raises a SpecError with the same
    text.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def describe(self) -> dict[str, object]:
        every = await self._answers("scope_describe")
        # Each pipeline stage reports only the attention kernels of its own layers.
        kernels = {k: v for one in every for k, v in one["sites"]["kernels"].items()}
        return {**every[0], "sites": {**every[0]["sites"], "kernels": kernels}}

    async def load(self) -> tuple[int, int]:
        replicas = await ask_replicas(self._engine, "scope_counters")
        return _running(replicas), num_pending()

    async def modules(self) -> dict[str, Module]:
        return dict(await self._call("scope_modules"))

    async def register(self, name: str, data: bytes) -> str:
        digest = str(await self._call("scope_register", name, data))
        _doubt_modules(self._engine)
        return digest

    async def unregister(self, name: str) -> bool:
        known = bool(await self._call("scope_unregister", name))
        _doubt_modules(self._engine)
        return known

    async def set_edits(self, text: str | None) -> str | None:
        monitors = await asyncio.to_thread(spec_of, self._engine.vllm_config)
        digest: str | None = await self._call("scope_set_edits", text, monitors)
        return digest

    async def edits(self) -> str | None:
        text: str | None = await self._call("scope_get_edits")
        return text

    async def set_monitors(self, bodies: object) -> None:
        try:
            await set_on_async(self._engine, bodies)
        except OSError as error:
            raise NoTurnError(
                "API servers share monitors through the server's folder of results, which "
                f"cannot be written ({error.strerror or type(error).__name__}). Free disk space "
                "for this folder (VLLM_SCOPE_RESULTS_DIR), and repeat the request."
            ) from None

    async def monitors(self) -> dict[str, dict[str, object]]:
        return told(self._engine.vllm_config)

    async def activity(self, settings: ServerSettings) -> Activity:
        config = self._engine.vllm_config
        found = await asyncio.to_thread(activity_of, config)
        replicas = await ask_replicas(self._engine, "scope_counters")
        rings, sinks = [], dict[str, Counter[str]]()
        for each in chain.from_iterable(replicas):
            rings += [] if each["ring"] is None else [Ring(**each["ring"])]
            for name, counters in each["sinks"].items():
                sinks.setdefault(name, Counter()).update(counters)
        most = settings.rows_of(config.parallel_config._api_process_count)
        state = State(
            _running(replicas), num_pending(), num_bytes_held(), most, rings=rings,
            sinks={name: dict(total) for name, total in sinks.items()},
        )  # fmt: skip
        return Activity(time.time(), found, state)

    async def moments(self, name: str) -> list[tuple[str, int, str]]:
        return await keys_of_async(self._engine, name)

    async def moments_at(self, name: str, site: str, layer: int, label: str) -> bytes:
        found = await one_of_async(self._engine, name, (site, layer, label))
        return await asyncio.to_thread(found.to_bytes)

    async def drop_moments(self, name: str) -> bool:
        return await drop_moments_of_async(self._engine, name)

    async def sweep(self, asked: AskedSweep, settings: ServerSettings) -> SweepRun:
        return await begin(self._engine, asked, settings)

    async def _call(self, name: str, *args: object) -> Any:
        """The answer to a call that EngineCore answers itself (engine.core.entry)."""
        return (await self._answers(name, *args))[0]

    async def _answers(self, name: str, *args: object) -> list[Any]:
        with refusing():
            return list(await self._engine.collective_rpc(name, args=args))


def _running(replicas: Sequence[Sequence[dict[str, Any]]]) -> int:
    """The number of running requests in all replicas.

    Args:
        replicas: the answers to `scope_counters`, by replica and worker.
    """
    # All workers of a replica have the same requests. Different replicas have different requests.
    return sum(max(each["requests"] for each in replies) for replies in replicas)


def _doubt_modules(engine: AsyncLLM) -> None:
    """Record that the names of steering modules have changed. Before the next request that names a
    steering module, the front-end then asks the engine for the names."""
    connection = connections.of(engine.output_processor)
    if connection is not None:
        connection.doubt_modules()
