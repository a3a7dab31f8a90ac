"""The codec of a read, which makes rows smaller before they leave the device.

Owns:  CodecChoice (what a caller names), Encoding (the codec on one engine).
Runs:  CodecChoice everywhere, without torch. An Encoding is made where the model's sizes are
       known, and travels with the rows.
From:  actions.   To: codecs.packed, layout (the size of an encoded row).

Promise: the codec can be made again from an Encoding. It encodes and decodes each row by itself,
in a fixed number of bytes.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_scope.errors import SpecError, shown

#: Codecs that a read may name -> their options: the row-wise ones of codecs.CODECS. Repeated here
#: because a caller may have no torch.
READ_CODECS: dict[str, tuple[str, ...]] = {
    "none": (),
    "fp16": (),
    "fp8": (),
    "int8": (),
    "full8": (),
    "rp8": ("k", "seed"),
    "topk8": ("k",),
}


@dataclass(frozen=True)
class CodecChoice:
    """The name of a codec, and the options that the caller gave."""

    name: str
    options: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def parse(value: object, where: str) -> CodecChoice | None:
        """The choice of a name, or of an object with a name and options.

        Returns:
            None for no codec.

        Raises:
            SpecError: an unknown name or option, or an option that is not a whole number.
        """
        if value is None or isinstance(value, CodecChoice):
            return value
        body = {"name": value} if isinstance(value, str) else value
        if not isinstance(body, Mapping) or not isinstance(body.get("name"), str):
            raise SpecError(
                f"{where} is {shown(value)}; it is a name, or an object with a name and "
                "options, such as {'name': 'rp8', 'k': 128}."
            )
        name = body["name"]
        if name not in READ_CODECS:
            files = ", which sinks that write files can compress them with" * (name == "zstd")
            raise SpecError(
                f"{where} is {shown(name)}{files}; rows can be read as {', '.join(READ_CODECS)}."
            )
        options = []
        for option in sorted(set(body) - {"name"}, key=str):
            if option not in READ_CODECS[name]:
                takes = ", ".join(READ_CODECS[name]) or "no options"
                raise SpecError(f"{where} has {shown(option)}; codec {name!r} takes {takes}.")
            options.append((option, _whole(body[option], f"{where}.{option}")))
        return None if name == "none" else CodecChoice(name, tuple(options))

    def to_json(self) -> str | dict[str, object]:
        return {"name": self.name, **dict(self.options)} if self.options else self.name


def _whole(value: object, where: str) -> int:
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
            if abs(number) >> 63 == 0:
                return number
    raise SpecError(f"{where} is {shown(value)}; it is a whole number of at most 64 bits.")


@dataclass(frozen=True)
class Encoding:
    """The codec of some rows, as data.

    Attributes:
        text: the codec's metadata (`codecs.Codec.metadata`), as JSON.
        row_bytes: size of one encoded row, without the padding of its last slot.
    """

    text: str
    row_bytes: int

    @cached_property
    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found
