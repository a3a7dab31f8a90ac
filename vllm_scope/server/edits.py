"""Server-wide edits: the check of an operator's body, and the JSON that shows the edits.

Owns:  `decoded` (for any body), `checked` and `shown` (for edits), `monitors` (for monitors).
Runs:  in a thread of an API server process, because each function reads a whole text.

Promise: the items of a text are counted before the text is parsed. The result of `shown` has a
bounded size.
"""

from __future__ import annotations

import msgspec

from vllm_scope import errors
from vllm_scope.errors import SpecError
from vllm_scope.request.bounded_json import MOST_ITEMS, decode

#: If the edits take more bytes, `shown` gives only the dtype and the shape of each vector.
MOST_SHOWN_BYTES = 8 << 20
#: `shown` always gives a list of at most this many items.
_SHORT_LIST = 64


class _Edits(msgspec.Struct):
    edits: msgspec.Raw


class _Shown(msgspec.Struct):
    edits: object
    digest: str | None


def decoded(body: bytes, most_items: int = MOST_ITEMS) -> tuple[str, object]:
    """A request's body as text, and the value of the body's JSON.

    Raises:
        SpecError: the body is not UTF-8 or not JSON, or has more nodes or items than
            `bounded_json.decode` accepts.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"the body is not UTF-8: {error.reason} at {error.start}.") from None
    return text, decode(text, "the body", most_items)


def checked(body: bytes) -> str:
    """The text of a body that has a list of edits.

    Raises:
        SpecError: as `decoded`, or the body is not an object whose only field is `edits`, a list.
    """
    text, found = decoded(body)
    given = found if isinstance(found, dict) else {}
    edits = given.get("edits")
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise SpecError(
            f"the body is {errors.shown(found)}; it must be an object with the field 'edits', a "
            "list of edits as in a spec."
        )
    for name in given:
        if name != "edits":
            raise SpecError(f"the body has {errors.shown(name)}; its only field is 'edits'.")
    return text


def monitors(body: bytes) -> object:
    """The monitors of a body, by name.

    Raises:
        SpecError: as `decoded`, or the body is not an object whose only field is `monitors`.
    """
    _, found = decoded(body)
    if not isinstance(found, dict) or set(found) != {"monitors"}:
        raise SpecError(
            f"the body is {errors.shown(found)}; it must be an object with the field 'monitors', "
            "which has each monitor under its name."
        )
    return found["monitors"]


def shown(text: str | None, digest: str | None = None) -> bytes:
    """JSON of the engine's server-wide edits.

    Args:
        text: the text that `checked` returned; None if there are no edits.
    """
    edits: object = []
    if text is not None:
        edits = msgspec.json.decode(text, type=_Edits).edits
        if len(text) > MOST_SHOWN_BYTES:
            edits = [_short(edit) for edit in msgspec.json.decode(edits)]
    return msgspec.json.encode(_Shown(edits, digest))


def _short(edit: dict[str, object]) -> dict[str, object]:
    """An edit without the numbers of its vectors, except for lists of at most _SHORT_LIST items."""
    found: dict[str, object] = {}
    for name, value in edit.items():
        if isinstance(value, list) and len(value) > _SHORT_LIST:
            value = {"shape": [len(value)]}
        elif isinstance(value, dict):
            value = {key: one for key, one in value.items() if key != "data"}
        found[name] = value
    return found
