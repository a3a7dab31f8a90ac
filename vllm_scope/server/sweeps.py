"""`POST /v1/scope/sweeps`: sends a sweep's cells as they arrive, or the whole table.

Owns:  the route, and SweepAnswer.
Runs:  in each API server process, behind vLLM's authentication.
From:  engine.http.sweeps (which runs the sweep).   To: sweeps.wire (the JSON), routes.

Promise: if the client leaves, all requests of its sweep end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from vllm_scope.server import schemas
from vllm_scope.server.access import (
    MOST_NUMBERS,
    RefusalError,
    Route,
    RunningSweep,
    asked,
    engine_of,
    error_body,
    errors,
    state_of,
    takes,
)
from vllm_scope.server.edits import decoded
from vllm_scope.server.exchange import running
from vllm_scope.sweeps import wire
from vllm_scope.sweeps.plan import Cell
from vllm_scope.sweeps.wire import AskedSweep

logger = logging.getLogger("vllm.vllm_scope")
router = APIRouter(prefix="/v1/scope", tags=["scope"], route_class=Route)


@router.post(
    "/sweeps",
    summary="One edit at every place of a grid, and the effect of each edit on the next token",
    response_model=None,
    responses={
        200: {
            "model": schemas.SweepTable,
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "The table. With `stream`, the answer is events instead: the table "
            "without values, the cells as they arrive, the counts, and `[DONE]`.",
        },
        **errors(413, 429),
    },
    openapi_extra=takes("application/json", schemas.Sweep.model_json_schema()),
)
async def post_sweeps(request: Request) -> Response:
    """Activation patching, ablation or steering at each chosen layer, position and head. Each cell
    has at least one request of its own. docs/http.md lists the fields of the events."""
    engine, state = engine_of(request), state_of(request)
    wanted = await asked(run_in_threadpool(_parsed, await request.body()))
    run = await asked(engine.sweep(wanted, state.settings))
    answer = SweepAnswer(run)
    running(state.owner_of(request)).closing.append(answer.close)
    if wanted.stream:
        return StreamingResponse(answer.events(), media_type="text/event-stream")
    return await answer.whole(request)


def _parsed(body: bytes) -> AskedSweep:
    return AskedSweep.from_json(decoded(body, MOST_NUMBERS)[1])


class _Arrived:
    """Cells that have arrived and were not sent yet. The task refers to this object and not to the
    SweepAnswer, because the SweepAnswer refers to the task. If the two objects referred to each
    other, the error of a cancelled task would keep the task in memory."""

    def __init__(self) -> None:
        self._cells: list[Cell] = []
        self.news = asyncio.Event()

    def tell(self, cell: Cell) -> None:
        self._cells.append(cell)
        self.news.set()

    def ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # asyncio would log an error that no code has read
        self.news.set()

    def take(self) -> list[Cell]:
        found, self._cells = self._cells, []
        return found


class SweepAnswer:
    """Answers a request for a sweep: runs the sweep in a task, and sends the cells."""

    def __init__(self, run: RunningSweep) -> None:
        self._run, self._arrived, self._closing = run, _Arrived(), False
        self._task = asyncio.create_task(run.run(self._arrived.tell))
        self._task.add_done_callback(self._arrived.ended)

    async def close(self) -> None:
        """End the sweep's requests. The Exchange also calls this at the HTTP request's end."""
        if not self._closing:  # a second `cancel` would interrupt the clean-up of the first
            self._closing = True
            self._task.cancel()
        await asyncio.wait({self._task})
        self._run.close()  # a task that was cancelled before its start does not close the sweep

    async def whole(self, request: Request) -> Response:
        """Wait for all cells, then return the table. If the client leaves first, end the sweep, and
        return an answer without a table. Raises RefusalError if the sweep failed with a
        ScopeError."""
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({self._task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not self._task.done():
            await self.close()
            return Response(status_code=499)  # the client has left
        await asked(self._task)
        body = await run_in_threadpool(wire.whole, self._run.table, self._run.num_cells)
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: the table without values, then the cells, then the counts or
        the reason of a failure, then `[DONE]`. An event has all cells that arrived since the last
        event."""
        table = self._run.table
        yield _event({"table": wire.head(table), "num_cells": self._run.num_cells})
        ended = False
        while not ended:
            await self._arrived.news.wait()
            self._arrived.news.clear()
            ended = self._task.done()
            if cells := self._arrived.take():
                yield _event({"cells": [wire.cell(table, one) for one in cells]})
        try:
            await asked(self._task)
        except RefusalError as error:
            yield _event(error_body(error.status, str(error)))
        except Exception:
            logger.exception("vllm-scope: a sweep failed")
            yield _event(error_body(500, "the sweep failed; the server's log has the reason."))
        else:
            yield _event(wire.end(table, self._run.num_cells))
        yield b"data: [DONE]\n\n"


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _gone(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
