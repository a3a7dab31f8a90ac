"""Runs the sweeps of an API server, and divides the share of a step among the sweeps.

Owns:  SweepRun (implements server.access.RunningSweep), and `begin`.
Runs:  in each API server process, on the event loop. Another thread plans each sweep.
From:  calls.   To: engine.frontend.sweeping, sweep_runs.

The share is the part of a step that all sweeps of one process can use together. It is
VLLM_SCOPE_SWEEP_SHARE, divided by the number of API server processes.

Promise: each API key that has sweeps gets an equal part of the share. The part of an API key is
divided equally among the sweeps of this key. Even a sweep with a very small part is allowed to have
one cell in the engine.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Final

from vllm_scope.engine.beside import Beside
from vllm_scope.engine.frontend.connection import connect_async, needs_connection
from vllm_scope.engine.frontend.sweep_bounds import NoTokenizer
from vllm_scope.engine.frontend.sweep_runs import follow
from vllm_scope.engine.frontend.sweeping import Sweeping
from vllm_scope.engine.vllm_types import AsyncLLM
from vllm_scope.errors import CapacityError
from vllm_scope.results.budget import asking, most_of_one
from vllm_scope.results.inbox import limit
from vllm_scope.server.answer import current
from vllm_scope.server.settings import ServerSettings
from vllm_scope.sweeps.plan import Cell
from vllm_scope.sweeps.wire import AskedSweep

#: The largest number of sweeps that run at the same time in one API server process.
MOST_SWEEPS: Final = 16


class Room:
    """The running sweeps, by API key."""

    def __init__(self) -> None:
        self._of: defaultdict[str, list[SweepRun]] = defaultdict(list)

    def enter(self, run: SweepRun) -> None:
        """Add a sweep. Raises CapacityError if too many sweeps are running already."""
        own, every = self._of.get(run.owner, []), sum(map(len, self._of.values()))
        if every >= MOST_SWEEPS or len(own) >= most_of_one(MOST_SWEEPS):
            raise CapacityError(
                f"this server runs {every} sweeps, {len(own)} of this key; it runs at most "
                f"{MOST_SWEEPS}, {most_of_one(MOST_SWEEPS)} of one key. Repeat the request later."
            )
        self._of[run.owner].append(run)

    def leave(self, run: SweepRun) -> None:
        """Remove a sweep. Does nothing for a sweep that was removed already."""
        runs = self._of.get(run.owner, [])
        if run in runs:
            runs.remove(run)
            if not runs:
                del self._of[run.owner]
            self.divide()

    def divide(self) -> None:
        """Set the part of the process's share that each sweep can use."""
        for runs in self._of.values():
            for run in runs:
                run.take_part(1 / len(self._of) / len(runs))


#: The keys of both tables are vLLM's OutputProcessors. `_rooms` has the sweeps of the same engine
#: in this process. `_tokenizers` has a tokenizer that another thread can use.
_rooms: Beside[Room] = Beside()
_tokenizers: Beside[Any] = Beside()


class SweepRun:
    """The sweep of one HTTP request.

    Args:
        share: the part of a step that all sweeps of this process can use together.
    """

    def __init__(self, engine: AsyncLLM, room: Room, owner: str, share: float) -> None:
        self.owner = owner
        self._engine, self._room, self._share = engine, room, share
        self._sweeping: Sweeping | None = None

    async def plan(self, asked: AskedSweep, most_cells: int) -> None:
        """Plan the sweep. Raises SpecError if the engine cannot run the sweep, or if the sweep has
        more than `most_cells` cells."""
        if needs_connection(self._engine):
            await connect_async(self._engine)
        self._sweeping = await asyncio.to_thread(
            Sweeping, self._engine, asked.prompts, asked.sweep, self._share,
            tokenizer=await _tokenizer_of(self._engine), most_cells=most_cells,
        )  # fmt: skip
        self._room.divide()
        self.table, self.num_cells = self._sweeping.plan.table, self._sweeping.plan.num_cells

    def take_part(self, part: float) -> None:
        if self._sweeping is not None:
            self._sweeping.take_share(part * self._share)

    async def run(self, tell: Callable[[Cell], object]) -> None:
        """Run the sweep to its end (RunningSweep.run). Calls `tell` with each cell."""
        assert self._sweeping is not None
        current.set(None)  # the wrappers in `serving` must not treat cells as HTTP requests
        try:
            await follow(self._engine, self._sweeping, lambda cell: cell is not None and tell(cell))
        finally:
            self.close()

    def close(self) -> None:
        self._room.leave(self)


async def begin(engine: AsyncLLM, asked: AskedSweep, settings: ServerSettings) -> SweepRun:
    """Add a sweep to the running sweeps, plan the sweep, and return the sweep's SweepRun.

    Raises:
        SpecError: the engine cannot run the sweep. CapacityError: too many sweeps are running.
    """
    num_processes = max(1, engine.vllm_config.parallel_config._api_process_count)
    limit(settings.rows_of(num_processes))
    processor = engine.output_processor
    room = _rooms.of(processor) or _rooms.put(processor, Room())
    run = SweepRun(engine, room, asking.get().owner, settings.sweep_share / num_processes)
    room.enter(run)
    try:
        await run.plan(asked, settings.sweep_cells)
    except BaseException:
        run.close()
        raise
    return run


async def _tokenizer_of(engine: AsyncLLM) -> Any:
    """A copy of the engine's tokenizer, or a NoTokenizer. A sweep cannot use the engine's own
    tokenizer, because other threads of vLLM change its truncation setting for their requests."""
    known = _tokenizers.of(engine.output_processor)
    if known is None:
        made = await asyncio.to_thread(partial(deepcopy, engine.tokenizer))
        known = _tokenizers.put(engine.output_processor, made or NoTokenizer())
    return known
