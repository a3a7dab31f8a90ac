"""vllm-lens's HTTP interface: `activations` in answers, and GET /v1/activations/{handle}.

Owns:  HTTP (the registration of this face with the server).
Runs:  in each API server process.

A response has the `activations` of its first choice. If there are several choices (n > 1, or
several prompts), each choice also has its own `activations`. With `activations_transport:
"binary"`, the answer has a handle for each tensor, and a file of the server has the tensor's bytes.
Only a client with the request's API key can fetch this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, BinaryIO

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
from vllm_scope.server.faces import FirstReply, HttpFace, Keep, Reply

if TYPE_CHECKING:
    from vllm import CompletionOutput

#: A kept file has metadata. Under this key, the metadata has the dtype and shape of the tensor.
_DESCRIBED = "activations"


class LensReply(FirstReply):
    """The field `activations`. Maps each tensor's name to the tensor's JSON, a handle or an error.

    Args:
        keep: a function that keeps a tensor as a file, or None if the JSON has the tensors.
    """

    name = "activations"

    def __init__(self, keep: Keep | None) -> None:
        super().__init__()
        self._keep, self._num_bytes = keep, 0

    def value(self, completion: CompletionOutput) -> dict[str, object] | None:
        found = getattr(completion, "activations", None)
        return None if found is None else {name: self._entry(found, name) for name in found}

    def _entry(self, activations: Mapping[str, object], name: str) -> dict[str, object]:
        try:
            tensor = activations[name]
            if not isinstance(tensor, Tensor):
                return {PLAIN: tensor}
            if self._keep is None:
                num_bytes = self._num_bytes + tensor.nbytes
                if num_bytes > MAX_INLINE_BYTES:
                    raise ScopeError(
                        f"{num_bytes:,} bytes are too many for JSON, which takes "
                        f"{MAX_INLINE_BYTES:,} here; ask with activations_transport='binary', or "
                        "for fewer layers."
                    )
                self._num_bytes = num_bytes
                return serialize_tensor(tensor)
            body = described(tensor)
            kept = self._keep({name: tensor}, {_DESCRIBED: json.dumps(body)})
        except ScopeError as error:
            return {"error": str(error)}
        return {"handle": kept.id, "nbytes": tensor.nbytes, "transport": "binary", **body}


def _begin(values: Mapping[str, object], keep: Keep) -> Reply:
    transport = values.get("activations_transport", "base64")
    if transport not in ("base64", "binary"):
        raise SpecError(
            f"activations_transport is {shown(transport)}; it must be 'binary', or 'base64' for "
            "tensors in the JSON."
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
    delete: Annotated[bool, Query(description="Delete the tensor after this answer.")] = False,
) -> StreamingResponse:
    """The tensor's numbers, little-endian. The answer with the handle has the dtype and shape.

    Send the same Authorization header as in the request whose answer has the handle.
    """
    opened = await run_in_threadpool(_open, request, handle)
    if opened is None:
        raise RefusalError(
            404, "your key has no handle with this id: the handle was deleted, or the id is wrong."
        )
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
    """Open the file of a kept tensor at the tensor's first byte.

    None if the file is missing, or is not the file of a tensor of `activations`.
    """
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
    """Refuse every POST below /v1/hooks, because Python functions are arbitrary code."""
    raise RefusalError(404, NO_HOOKS)


_KEYS = frozenset(KEYS["vllm_lens"])
HTTP = HttpFace("vllm_lens", _KEYS, _KEYS, _begin, reading=(_activations, _hooks))
