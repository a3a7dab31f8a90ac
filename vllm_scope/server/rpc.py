"""Checks requests to vLLM's development routes: vllm-scope's methods need the operator's key.

Owns:  `names_ours` and `whole_body`, for `/collective_rpc`, which calls methods of workers.
From:  limits.Door.

vLLM has development routes if VLLM_SERVER_DEV_MODE is set. vLLM requires no API key for its
development routes. `/server_info` shows `additional_config`, which can contain secrets in the
options of sinks.
Source: vllm 0.32, entrypoints/serve/dev/rpc/api_router.py and dev/server_info/api_router.py.
"""

from __future__ import annotations

import json

from starlette.types import Message, Receive

PATH = "/collective_rpc"
INFO = "/server_info"
#: A body with more bytes than this is refused, because the server keeps the whole body in memory
#: until the body was checked.
MAX_BYTES = 64 << 20
#: A body with more lists, objects and items than this is not parsed.
MOST_ITEMS = 1 << 16
REFUSAL = (
    "the body names a method of vllm-scope, or is too long to be checked; it needs the operator's "
    "key (VLLM_SCOPE_ADMIN_KEY) in the header X-Scope-Admin-Key. Without this key, use the routes "
    "of /v1/scope."
)
INFO_REFUSAL = (
    "/server_info shows the options of vllm-scope's sinks; it needs the operator's key "
    "(VLLM_SCOPE_ADMIN_KEY) in the header X-Scope-Admin-Key. Without this key, use GET /v1/scope."
)
#: Prefix of the names of vllm-scope's methods.
_OURS = "scope_"


async def whole_body(receive: Receive) -> tuple[bytes, Receive]:
    """A request's body, and an ASGI `receive` that returns the body again."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    body = b"".join(message.get("body", b"") for message in messages)
    messages.reverse()

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return body, replayed


def names_ours(body: bytes) -> bool:
    """True if any string value in a body begins like the names of vllm-scope's methods. All values
    are checked, because some methods of workers call a method whose name is one of their arguments.
    Also True if the body has more than MOST_ITEMS items.

    As in vLLM, the body can have any encoding that `json.loads` accepts. If two fields have the
    same name, the last field counts.
    """
    # The name of a method can be plain text, can contain an escape, or can be in UTF-16 or UTF-32
    # (with null bytes).
    if not any(mark in body for mark in (_OURS.encode(), b"\\", b"\0")):
        return False
    # The parser holds the GIL during its whole call. Therefore only a small body is parsed.
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_ITEMS:
        return True
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return False  # vLLM's route refuses the body
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
