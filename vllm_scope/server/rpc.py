"""vLLM's development routes, whose use for vllm-scope needs the operator's key.

Owns:  `names_ours` and `whole_body`, for `/collective_rpc`, which calls any method of workers.
From:  limits.Door.

vLLM has these routes if VLLM_SERVER_DEV_MODE is set, and asks for no API key on them.
`/server_info` shows `additional_config` with the options of sinks, which may hold tokens.
Source: vllm 0.32, entrypoints/serve/dev/rpc/api_router.py and dev/server_info/api_router.py.
"""

from __future__ import annotations

import json

from starlette.types import Message, Receive

PATH = "/collective_rpc"
INFO = "/server_info"
#: A longer body is refused. A body is kept whole until its method is known.
MAX_BYTES = 64 << 20
#: The largest number of lists and objects, with their items, in a body that is parsed.
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
#: Prefix of our remote methods' names.
_OURS = "scope_"


async def whole_body(receive: Receive) -> tuple[bytes, Receive]:
    """A request's body, and a `receive` that gives the body again."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    body = b"".join(message.get("body", b"") for message in messages)
    messages.reverse()

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return body, replayed


def names_ours(body: bytes) -> bool:
    """True if a body names one of our methods in any string, because some methods call others.
    Also True if the body may name one and is too long to look through.

    The body is parsed as vLLM parses it: in any encoding, and the last of two equal fields counts.
    """
    # A name is plain text, or has an escape, or is in UTF-16 or UTF-32, which have null bytes.
    if not any(mark in body for mark in (_OURS.encode(), b"\\", b"\0")):
        return False
    # The parser holds the GIL during its whole call, so only a small body is parsed.
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
