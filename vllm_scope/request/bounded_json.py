"""JSON that strangers wrote: counted before it is parsed.

Owns:  `decode`.
Runs:  everywhere. No torch.
To:    spec, faces, server.

Promise: to refuse a text costs a few passes over its characters, at the speed of memory. To
parse what passes makes no more Python objects than MOST_NODES and MOST_ITEMS allow.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_scope.errors import SpecError

#: Lists, objects and fields in one text. Each takes Python 300 ns and more.
MOST_NODES = 1 << 14
#: Numbers and other items in the lists of one text: 64 vectors of 4,096 numbers.
MOST_ITEMS = 1 << 18
PACKED = "Send vectors as base64 ({dtype, shape, data}), or name a steering module."


def num_items(text: str) -> int:
    """Items of lists and fields of objects, roughly; base64 has no comma."""
    return text.count(",")


def decode(text: str, where: str, most_items: int = MOST_ITEMS) -> Any:
    """What a JSON text says.

    Args:
        where: the text's name for its sender.
        most_items: in its lists, in all.

    Raises:
        SpecError: it is no JSON, or says more than MOST_NODES and `most_items`.
    """
    num_nodes = text.count("[") + text.count("{") + text.count(":")
    if num_nodes > MOST_NODES:
        raise SpecError(
            f"{where} has {num_nodes:,} lists, objects and fields; at most {MOST_NODES:,}."
        )
    if num_items(text) > most_items + MOST_NODES:
        raise SpecError(f"{where} has {num_items(text):,} items; at most {most_items:,}. {PACKED}")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise SpecError(f"{where} is not JSON: {error}.") from None
