"""Runs sweeps: sends their requests to an engine, and receives the answers.

Owns:  `run` and `run_async`; `follow`, which a server calls to run a sweep.
Runs:  in the front-end process, on the caller's thread or event loop.
From:  sweeping (the requests).   To: requests (adds the requests to the engine).

Promise: a sweep that ends early, for any reason, leaves no request in the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal

from vllm_scope.engine.frontend.connection import connect_async, connect_sync, needs_connection
from vllm_scope.engine.frontend.outputs import drop
from vllm_scope.engine.frontend.requests import prepared_as
from vllm_scope.engine.frontend.sweeping import PREFIX, Request, Sweeping
from vllm_scope.engine.heap import frozen_heap, seldom
from vllm_scope.engine.vllm_types import AsyncLLM, LLMEngine, RequestOutput
from vllm_scope.errors import ScopeError, SpecError, naming, shown
from vllm_scope.sweeps.plan import Cell, Plan
from vllm_scope.sweeps.sweep import Sweep
from vllm_scope.sweeps.table import SweepTable

OnCell = Callable[[Cell], object]
Progress = bool | Literal["map"]

#: Maps a task to a request. The task waits for the answer to this request.
_Tasks = dict["asyncio.Task[RequestOutput | ScopeError]", Request]


@contextmanager
def showing(plan: Plan, progress: Progress) -> Iterator[Callable[[], object]]:
    """Show the progress of a sweep as a progress bar or as a map of the cells, or show nothing.
    Yields a function that the caller must call after each cell.

    Raises:
        SpecError: `progress` is not True, False or "map".
        ConfigError: `progress` is "map", and anywidget is not installed.
    """
    if progress not in (True, False, "map"):
        raise SpecError(f'progress is {shown(progress)}; it must be True, False or "map".')
    if progress == "map":
        from vllm_scope.views.widget import shown_live

        with shown_live(plan.table.picture) as changed:
            yield changed
    elif progress:
        from tqdm.auto import tqdm  # installed, because vLLM depends on tqdm

        with tqdm(total=plan.num_cells, desc="Sweep", unit=" cells") as bar:
            yield bar.update
    else:
        yield lambda: None


def run(
    engine: LLMEngine, prompts: object, sweep: Sweep, on_cell: OnCell | None, progress: Progress,
    share: float,
) -> SweepTable:  # fmt: skip
    """The implementation of vllm_scope.sweep, which documents the arguments."""
    if engine.has_unfinished_requests():
        raise ScopeError(
            "this LLM has requests that run; let them end before the sweep, or use sweep_async."
        )
    if needs_connection(engine):
        connect_sync(engine)
    sweeping = Sweeping(engine, prompts, sweep, share, alone=True)
    running: dict[str, Request] = {}
    names = _names()
    with showing(sweeping.plan, progress) as count, frozen_heap():
        tell = partial(_tell, on_cell, count)
        try:
            while running or not sweeping.over:
                for request in sweeping.due(_num_jobs(running.values()), tell):
                    name = next(names)
                    with naming(request.jobs[0].name), prepared_as(request.prepared):
                        engine.add_request(name, request.prompt, request.params)
                    running[name] = request
                for output in engine.step() if running else ():
                    for cell in sweeping.take(running.pop(output.request_id), output):
                        tell(cell)
        finally:
            if running:
                drop(engine, running)
    return sweeping.plan.table


async def run_async(
    engine: AsyncLLM, prompts: object, sweep: Sweep, on_cell: OnCell | None, progress: Progress,
    share: float,
) -> SweepTable:  # fmt: skip
    """The implementation of vllm_scope.sweep_async, which documents the arguments."""
    if needs_connection(engine):
        await connect_async(engine)
    sweeping = Sweeping(engine, prompts, sweep, share)
    with showing(sweeping.plan, progress) as count:
        await follow(engine, sweeping, partial(_tell, on_cell, count))
    return sweeping.plan.table


async def follow(
    engine: AsyncLLM, sweeping: Sweeping, tell: Callable[[Cell | None], object]
) -> None:
    """Run a sweep to its end. If the sweep is cancelled, or `tell` raises an error, the sweep's
    requests are cancelled.

    Args:
        tell: called with each cell that arrives, and with None for each answer that is not a cell.
    """
    running: _Tasks = {}
    names = _names()
    seldom.begin()
    # The error of a cancelled task keeps this frame alive. Therefore this function stores no task
    # and no output in a local variable, so that both can be freed.
    try:
        while running or not sweeping.over:
            for request in sweeping.due(_num_jobs(running.values()), tell):
                running[asyncio.create_task(_answer(engine, next(names), request))] = request
                await asyncio.sleep(0)  # lets other requests run
            if running:
                _take(sweeping, running, await _first_done(running), tell)
            elif not sweeping.over:
                await asyncio.sleep(sweeping.pause)
    finally:
        seldom.end()
        await _end(running)


async def _first_done(running: _Tasks) -> set[asyncio.Task[RequestOutput | ScopeError]]:
    return (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]


def _take(
    sweeping: Sweeping, running: _Tasks, done: set[asyncio.Task[RequestOutput | ScopeError]],
    tell: Callable[[Cell | None], object],
) -> None:  # fmt: skip
    for task in done:
        for cell in sweeping.take(running.pop(task), task.result()):
            tell(cell)


async def _end(running: _Tasks) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in running:
        with suppress(asyncio.CancelledError):
            task.exception()  # so that the task drops its error and the error's frames
    running.clear()


async def _answer(engine: AsyncLLM, name: str, request: Request) -> RequestOutput | ScopeError:
    """The answer to a request, or the error if the request was refused or its edit overflowed."""
    try:
        with prepared_as(request.prepared):
            outputs = engine.generate(request.prompt, request.params, name)
            (output,) = [output async for output in outputs]
    except ScopeError as error:
        return error
    return output


def _num_jobs(running: Iterable[Request]) -> int:
    return sum(len(request.jobs) for request in running)


def _names() -> Iterator[str]:
    """Yields the ids for the requests of one sweep."""
    prefix = f"{PREFIX}{secrets.token_hex(4)}"
    return (f"{prefix}-{i}" for i in itertools.count())


def _tell(on_cell: OnCell | None, count: Callable[[], object], cell: Cell | None) -> None:
    if cell is not None:
        count()
        if on_cell is not None:
            on_cell(cell)
