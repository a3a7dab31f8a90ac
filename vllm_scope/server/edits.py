"""Server-wide edits: the check of an operator's body, and the JSON that shows the edits.

Owns:  `decoded` (for any body), `checked` and `shown` (for edits), `monitors` (for monitors).
Runs:  in a thread of an API server process, because the work takes time if a body is long.

Promise: the items in the JSON of a body are counted before the JSON is parsed. The result of
`shown` has a bounded size.
"""

from __future__ import annotations

import msgspec

from vllm_scope import errors
from vllm_scope.errors import SpecError
from vllm_scope.request.bounded_json import MOST_ITEMS, decode

#: If the text of the edits is longer than this, `shown` leaves out the numbers of long vectors.
MOST_SHOWN_BYTES = 8 << 20
#: A list of at most this many items is always in the result of `shown`.
_SHORT_LIST = 64


class _Edits(msgspec.Struct):
    edits: msgspec.Raw


class _Shown(msgspec.Struct):
    edits: object
    digest: str | None


def decoded(body: bytes, most_items: int = MOST_ITEMS) -> tuple[str, object]:
    """Returns a request's body as text, and the parsed JSON of the body.

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
    """Check that a body has a list of edits, and return the body as text.

    Raises:
        SpecError: `decoded` refuses the body, or the body is not an object whose only field is
            `edits`, a list of objects.
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
    """The field `monitors` of a body, which has each monitor under its name.

    Raises:
        SpecError: `decoded` refuses the body, or the body is not an object whose only field is
            `monitors`.
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
    """A copy of an edit that leaves out vectors in base64. The shape stands for each list that has
    more than _SHORT_LIST items."""
    found: dict[str, object] = {}
    for name, value in edit.items():
        if isinstance(value, list) and len(value) > _SHORT_LIST:
            value = {"shape": [len(value)]}
        elif isinstance(value, dict):
            value = {key: one for key, one in value.items() if key != "data"}
        found[name] = value
    return found
