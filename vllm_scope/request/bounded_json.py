"""Counts the items of a caller's JSON text, and then parses the text.

Owns:  `decode`, `decode_counted`, `is_unicode`.
Runs:  in every process. No torch.
To:    spec, compat, server.

Promise: a text with too many items is refused before it is parsed, after a few passes over its
characters. Therefore MOST_NODES and MOST_ITEMS limit the number of Python objects that the parser
makes.
"""

from __future__ import annotations

import msgspec

from vllm_scope.errors import SpecError

#: The largest number of nodes (lists, objects, fields) in one text. The parsing of one node takes
#: 300 ns or more.
MOST_NODES = 1 << 14
#: The largest number of items in all lists of one text, enough for 64 vectors of 4,096 numbers.
MOST_ITEMS = 1 << 18
#: All bytes except the four that are counted: `[` begins a list, `{` an object, `:` a field's
#: value, and `,` a further item or field. These characters are also counted inside strings.
_NOT_COUNTED = bytes(set(range(256)) - set(b"[{:,"))
PACKED = "Send vectors as base64 ({dtype, shape, data}), or name a steering module."


def is_unicode(text: str) -> bool:
    """False for a text that contains half of a surrogate pair, which JSON can contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode(text: str, where: str, most_items: int = MOST_ITEMS) -> object:
    """Parse a JSON text, and return the value.

    Args:
        where: the name of the text in error messages.
        most_items: limit of the items in all lists of the text.

    Raises:
        SpecError: the text is not JSON, or has more than MOST_NODES nodes, or has more than
            `most_items` + MOST_NODES commas (each further item or field begins with a comma).
    """
    return decode_counted(text, where, most_items)[0]


def decode_counted(text: str, where: str, most_items: int = MOST_ITEMS) -> tuple[object, int]:
    """The result of `decode`, and the number of commas, which is about the number of items.

    Base64 text contains no comma. Therefore the numbers of a vector in base64 are not counted.
    """
    # It is faster to remove all other bytes in one pass than to count each of the four bytes.
    counted = text.encode("utf-8", "surrogatepass").translate(None, _NOT_COUNTED)
    num_items = counted.count(b",")
    num_nodes = len(counted) - num_items
    if num_nodes > MOST_NODES:
        raise SpecError(
            f"{where} has {num_nodes:,} lists, objects and fields; at most {MOST_NODES:,}."
        )
    if num_items > most_items + MOST_NODES:
        raise SpecError(f"{where} has {num_items:,} items; at most {most_items:,}. {PACKED}")
    try:
        return msgspec.json.decode(text), num_items
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise SpecError(f"{where} is not JSON: {error}.") from None
