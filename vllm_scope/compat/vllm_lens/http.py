"""vllm-lens over HTTP: `activations` in answers, and GET /v1/activations/{handle}.

Owns:  HTTP, what the server is told of this face.
Runs:  in each API server process.

A response has `activations`, of its first choice. Where there are several choices (n > 1,
several prompts), each has its own too. With `activations_transport: "binary"` a tensor
is a handle: its bytes are in the server's files of results, for who asked alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from vllm_scope.compat import KEYS
from vllm_scope.compat.vllm_lens.model import NO_HOOKS
from vllm_scope.compat.vllm_lens.wire import PLAIN, described, serialize_tensor
from vllm_scope.errors import FileError, ScopeError, SpecError, shown
from vllm_scope.files.tensors import Header, read_header
from vllm_scope.server.access import RefusalError, Route, errors, state_of
from vllm_scope.server.answer import MAX_INLINE_BYTES
from vllm_scope.server.faces import HttpFace, Keep, Reply

#: In the metadata of a kept file: what JSON said of its tensor.
_DESCRIBED = "activations"


class LensReply(Reply):
    """`activations`, encoded as the request wants."""

    def __init__(self, keep: Keep | None) -> None:
        self._keep, self._num_bytes = keep, 0
        self._first: dict[str, Any] = {}

    def choice(self, number: int, of: int, completion: Any) -> dict[str, Any]:
        activations = getattr(completion, "activations", None)
        if activations is None:
            return {}
        found = {"activations": {name: self._entry(activations, name) for name in activations}}
        if number == 0:
            self._first = found
        return found if of > 1 else {}

    def whole(self) -> dict[str, Any]:
        return self._first

    def _entry(self, activations: Mapping[str, Any], name: str) -> dict[str, Any]:
        try:
            tensor = activations[name]
            if not isinstance(tensor, Tensor):
                return {PLAIN: tensor}
            if self._keep is None:
                if self._num_bytes + tensor.nbytes > MAX_INLINE_BYTES:
                    return {"error": _too_large(self._num_bytes + tensor.nbytes)}
                self._num_bytes += tensor.nbytes
                return serialize_tensor(tensor)
            body = described(tensor)
            kept = self._keep({name: tensor}, {_DESCRIBED: json.dumps(body)})
        except ScopeError as error:
            return {"error": str(error)}
        return {"handle": kept.id, "nbytes": tensor.nbytes, "transport": "binary"} | body


def _too_large(num_bytes: int) -> str:
    return (
        f"{num_bytes:,} bytes are too many for JSON, which takes {MAX_INLINE_BYTES:,} here; ask "
        "with activations_transport='binary', or for fewer layers."
    )


def _begin(values: Mapping[str, Any], keep: Keep) -> Reply:
    transport = values.get("activations_transport", "base64")
    if transport not in ("base64", "binary"):
        raise SpecError(
            f"activations_transport is {shown(transport)}; it is 'binary', or 'base64' for tensors "
            "in the JSON."
        )
    return LensReply(keep if transport == "binary" else None)


_activations = APIRouter(prefix="/v1/activations", tags=["vllm-lens"], route_class=Route)
_hooks = APIRouter(prefix="/v1/hooks", tags=["vllm-lens"], route_class=Route)


@_activations.get(
    "/{handle}",
    summary="The bytes of a tensor of `activations`",
    response_class=StreamingResponse,
    responses=errors(404)
    | {200: {"content": {"application/octet-stream": {}}, "description": "The tensor's bytes."}},
)
async def get_activation(
    request: Request,
    handle: Annotated[str, Path(description="`handle` of a tensor in an answer.")],
    delete: Annotated[bool, Query(description="End it once it was read.")] = False,
) -> StreamingResponse:
    """Little-endian numbers, of the dtype and the shape that the answer said.

    Only who sends the Authorization header of the request that made it can fetch it.
    """
    opened = await run_in_threadpool(_open, request, handle)
    if opened is None:
        raise RefusalError(404, "there is no such handle, or not any more, or it is not yours.")
    state, (file, header) = state_of(request), opened
    body = json.loads(header.metadata[_DESCRIBED])
    headers = {
        "Cache-Control": "no-store, private",
        "X-Content-Type-Options": "nosniff",
        "X-VLLM-Lens-Dtype": body["dtype"],
        "X-VLLM-Lens-Original-Dtype": body["original_dtype"],
        "X-VLLM-Lens-Shape": json.dumps(body["shape"]),
        "X-VLLM-Lens-Compression": "",
    }
    return state.store.sent(file, handle, state.owner_of(request), delete, **headers)


def _open(request: Request, handle: str) -> tuple[BinaryIO, Header] | None:
    """A kept tensor's file, read up to its bytes."""
    state = state_of(request)
    file = state.store.open(handle, state.owner_of(request))
    if file is None:
        return None
    try:
        header = read_header(file, os.fstat(file.fileno()).st_size, "the result")
    except FileError:
        header = None
    if header is None or _DESCRIBED not in header.metadata:
        file.close()
        return None
    return file, header


@_hooks.post("/{rest:path}", include_in_schema=False)
async def no_hooks(rest: str) -> None:
    """Python functions are arbitrary code, and no server runs what strangers send it."""
    raise RefusalError(404, NO_HOOKS)


_KEYS = frozenset(KEYS["vllm_lens"])
HTTP = HttpFace("vllm_lens", _KEYS, _KEYS, _begin, reading=(_activations, _hooks))
