"""The routes of vllm-scope in an app: `/v1/scope`, the operator's page, and the routes of compat.

Owns:  `attach`, which adds the routes, their guards and the middleware to an app.
From:  reading, operating, sweeps and pages (routers), faces (the routers of compat).
Runs:  in each API server process, after vLLM's authentication. If vLLM has an API key, every route
       below /v1 needs the key.

Promise: the operator's routes exist only if VLLM_SCOPE_ADMIN_KEY is set. Only these routes change
the engine. A request to one of these routes, except the operator's page, must have this key in the
header `X-Scope-Admin-Key`. Some routes of faces also accept this key as the bearer token.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from starlette.types import ASGIApp

from vllm_scope.errors import shown
from vllm_scope.request.media import BINARY
from vllm_scope.server import faces, operating, pages, reading, sweeps
from vllm_scope.server.access import (
    Engine,
    RefusalError,
    ScopeState,
    admin,
    admin_or_bearer,
    errors,
    refusal,
    refused,
)
from vllm_scope.server.changes import Changes
from vllm_scope.server.limits import Door
from vllm_scope.server.settings import MAX_OPERATOR_BYTES, ServerSettings
from vllm_scope.server.store import Store
from vllm_scope.transport.folders import RUN

_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


def attach(app: FastAPI, engine: Callable[[], Engine | None]) -> None:
    """Add the routes and the middleware to an app.

    Args:
        engine: a function that returns the app's engine, or None if there is no engine with taps
            (yet).

    Raises:
        ConfigError: a setting in the environment is wrong; the server does not start.
        PermissionError: the store's folder belongs to other users, or other users can use it.
    """
    settings = ServerSettings.from_environment()
    run = os.environ.get(RUN) or secrets.token_hex(16)
    store = Store(settings.results_dir, run, settings.results_bytes, settings.results_ttl_s)
    app.state.scope = ScopeState(settings, store, engine, Changes(store.folder))
    limits = dict.fromkeys(_COMPLETIONS, settings.body_bytes)
    open_to_all = [reading.router, sweeps.router]
    changing = [(operating.router, admin), (pages.data, admin)]
    for face in faces.registered():
        open_to_all += face.reading
        changing += [(r, admin_or_bearer if face.bearer else admin) for r in face.changing]
    routers = [*open_to_all, *(router for router, _ in changing)]
    prefixes = [router.prefix for router in routers]
    limits |= dict.fromkeys(prefixes, MAX_OPERATOR_BYTES)
    app.add_middleware(Door, limits=limits, settings=settings, timed=prefixes)
    app.add_exception_handler(RefusalError, refused)
    # vLLM adds its error handlers later. An app has only one handler for each type of error.
    # Therefore the handler of vllm-scope must wrap vLLM's handler.
    app.build_middleware_stack = partial(_built, app, app.build_middleware_stack)  # type: ignore[method-assign]
    app.openapi = partial(_described, app.openapi)  # type: ignore[method-assign]
    for router in open_to_all:
        app.include_router(router, responses=errors(400, 404))
    if settings.admin_key is None:
        return
    app.include_router(pages.page)
    for router, guard in changing:
        app.include_router(
            router, dependencies=[Depends(guard)], responses=errors(400, 401, 403, 413, 503)
        )


def _described(original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The app's OpenAPI description, to which the media type of binary answers is added."""
    found = original()
    for path in _COMPLETIONS:
        answers = found["paths"].get(path, {}).get("post", {}).get("responses", {})
        if "200" in answers:
            binary = {"schema": {"type": "string", "format": "binary"}}
            answers["200"].setdefault("content", {}).setdefault(BINARY, binary)
    return found


_Handler = Callable[[Request, Any], Awaitable[Response]]


def _built(app: FastAPI, original: Callable[[], ASGIApp]) -> ASGIApp:
    """Wrap the handler that vLLM has added by now, then create the middleware stack."""
    theirs: Any = app.exception_handlers.get(
        RequestValidationError, request_validation_exception_handler
    )
    app.add_exception_handler(RequestValidationError, partial(_invalid, theirs))
    return original()


async def _invalid(theirs: _Handler, request: Request, error: Any) -> Response:
    """The answer to a request whose body does not fit vLLM's types. If the scope is not a text, the
    answer is one sentence, because vLLM's answer would have one error for each type that the field
    can have. In all other cases, the answer is vLLM's own answer."""
    for each in error.errors():
        where = each.get("loc", ())
        if ("vllm_xargs", "scope") in pairwise(where) and not isinstance(each["input"], str):
            return refusal(
                400,
                f"vllm_xargs['scope'] is {shown(each['input'])}; it must be a string, the spec as "
                "JSON text: json.dumps(spec) in Python, JSON.stringify(spec) in JavaScript.",
            )
    return await theirs(request, error)
