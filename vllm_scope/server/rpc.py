"""vLLM's development routes, at which what is ours needs the operator's key.

Owns:  `names_ours` and `whole_body`, for `/collective_rpc`, which calls any method of workers.
From:  limits.Door.

vLLM has the routes where VLLM_SERVER_DEV_MODE is set, and asks for no API key there.
`/server_info` shows `additional_config`, which has the options of sinks, tokens among them.
Source: vllm 0.32, entrypoints/serve/dev/rpc/api_router.py and dev/server_info/api_router.py.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

PATH = "/collective_rpc"
INFO = "/server_info"
#: Of its bodies, which are kept whole until it is known what they call.
MAX_BYTES = 64 << 20
#: Lists, objects and items in them of a body that is parsed.
MOST_ITEMS = 1 << 16
REFUSAL = (
    "the body names a method of vllm-scope, or may do so and is too long to tell, which needs the "
    "operator's key (VLLM_SCOPE_ADMIN_KEY) in the header X-Scope-Admin-Key; /v1/scope has what "
    "others may ask."
)
INFO_REFUSAL = (
    "/server_info shows the options of vllm-scope's sinks, which needs the operator's key "
    "(VLLM_SCOPE_ADMIN_KEY) in the header X-Scope-Admin-Key; /v1/scope has what others may ask."
)
#: What our remote methods' names begin with.
_OURS = "scope_"

Receive = Callable[[], Awaitable[dict[str, Any]]]


async def whole_body(receive: Receive) -> tuple[bytes, Receive]:
    """A request's body, and what gives it again to the one who asks next."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    body = b"".join(pieces)
    again = [{"type": "http.request", "body": body, "more_body": False}]
    if message["type"] != "http.request":
        again = [message]

    async def replayed() -> dict[str, Any]:
        return again.pop() if again else await receive()

    return body, replayed


def names_ours(body: bytes) -> bool:
    """Whether a body names one of our methods, itself or for a method that calls others; also
    True where a body that may do so is too long to look through.

    Read as vLLM reads it: of two fields of one name the last one holds, in any encoding.
    """
    # A name is plain, has an escape, or each of its letters has a null byte beside it.
    if not any(mark in body for mark in (_OURS.encode(), b"\\", b"\0")):
        return False
    # To parse is one call, which other threads wait for.
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_ITEMS:
        return True
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return False  # vLLM's route refuses it
    left = [found]
    while left:
        value = left.pop()
        if isinstance(value, str) and value.startswith(_OURS):
            return True
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
    return False
