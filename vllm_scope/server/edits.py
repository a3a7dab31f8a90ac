"""Server-wide edits as an operator sends them, and as they are shown.

Owns:  `checked` and `shown`.
Runs:  in a thread of an API server process: both look through all of a text.

Promise: a text is counted before it is parsed, and what is shown of it takes a bounded answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_scope import errors
from vllm_scope.errors import SpecError
from vllm_scope.request.bounded_json import decode

#: Beyond this, vectors are shown by dtype and shape alone.
MOST_SHOWN_BYTES = 8 << 20
#: Items of a list that is shown whole all the same.
_MOST_ITEMS = 64


class _Edits(msgspec.Struct):
    edits: msgspec.Raw


class _Shown(msgspec.Struct):
    edits: Any
    digest: str | None


def checked(body: bytes) -> str:
    """What the engine is told of a body.

    Raises:
        SpecError: it is no JSON object with a list of edits and nothing else, or says more than
            may be parsed.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"the body is not UTF-8: {error.reason} at {error.start}.") from None
    found = decode(text, "the body")
    edits = found.get("edits") if isinstance(found, dict) else None
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise SpecError(
            f"the body is {errors.shown(found)}; it is an object with the field 'edits', a list of "
            "edits as in a spec."
        )
    for name in found:
        if name != "edits":
            raise SpecError(f"the body has {errors.shown(name)}; it has 'edits' alone.")
    return text


def shown(text: str | None, digest: str | None = None) -> bytes:
    """JSON of the edits that hold, which the engine has let in.

    Args:
        text: None where there are none.
    """
    edits: Any = []
    if text is not None:
        edits = msgspec.json.decode(text, type=_Edits).edits
        if len(text) > MOST_SHOWN_BYTES:
            edits = [_short(edit) for edit in msgspec.json.decode(edits)]
    return msgspec.json.encode(_Shown(edits, digest))


def _short(edit: dict[str, Any]) -> dict[str, Any]:
    """Without its numbers."""
    found = {}
    for name, value in edit.items():
        if isinstance(value, list) and len(value) > _MOST_ITEMS:
            value = {"shape": [len(value)]}
        elif isinstance(value, dict):
            value = {key: one for key, one in value.items() if key != "data"}
        found[name] = value
    return found
