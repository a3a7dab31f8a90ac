"""The operator's page: a live display of what monitors have found.

Owns:  the routes of the page and of the page's data.
Runs:  in each API server process. The routes exist only if VLLM_SCOPE_ADMIN_KEY is set.
From:  control.activity, views.monitors.   To: routes.

Promise: the page contains no data of the server. A browser cannot send a key when it opens an
address, therefore the page needs no key. The page's data needs the operator's key, and vLLM's API
key if vLLM has one, like the other routes of `/v1/scope/monitors`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from vllm_scope.control.activity import Activity
from vllm_scope.server import schemas
from vllm_scope.server.access import Route, asked, engine_of, state_of
from vllm_scope.views.document import live_page
from vllm_scope.views.monitors import monitor_page

#: Seconds from an answer to the page's next request for data, and seconds for which the page waits
#: for an answer.
_EVERY_S, _TIMEOUT_S = 2.0, 30.0

#: The path of the page is outside of /v1, because vLLM requires an API key below /v1.
page = APIRouter(tags=["scope operator"], route_class=Route)
data = APIRouter(prefix="/v1/scope/monitors", tags=["scope operator"], route_class=Route)


@page.get("/scope/monitors", summary="The operator's page", response_class=HTMLResponse)
async def get_page() -> Response:
    """The page asks the user for the keys, then shows the data of `/v1/scope/monitors/view`."""
    html, headers = live_page("Monitors", "../v1/scope/monitors/view", _EVERY_S, _TIMEOUT_S)
    return HTMLResponse(html, headers=headers)


@data.get("/activity", summary="What monitors have found")
async def get_activity(request: Request) -> Activity:
    """The findings of each monitor since the monitor was set. The findings are counts, a histogram
    of the requests' largest values, counts for each five seconds of the last ten minutes, the last
    verdicts, and the outcomes of the calls of the monitor's webhook. The answer also has the
    plugin's use of memory, files and rings."""
    state = state_of(request)
    found = await asked(engine_of(request).activity(state.settings))
    of_files = replace(
        found.state, results=len(state.store), results_bytes=state.store.num_bytes,
        results_most_bytes=state.settings.results_bytes,
    )  # fmt: skip
    return replace(found, state=of_files)


@data.get("/view", summary="The data of the operator's page", response_model=schemas.ViewData)
async def get_view(request: Request) -> Response:
    """The data of `/v1/scope/monitors/activity` as parts of a view, which
    `vllm_scope/views/scope.js` draws."""
    # The JSON of 64 monitors takes up to 0.2 s of CPU time.
    text = await asyncio.to_thread(_view, await get_activity(request))
    return Response(text, media_type="application/json")


def _view(activity: Activity) -> str:
    """The JSON of the page's data. The function runs in a thread."""
    return json.dumps(monitor_page(activity).data(), allow_nan=False)
