"""How a read's rows are made smaller before they leave the device.

Owns:  CodecChoice (what a caller names), Encoding (what that is on one engine).
Runs:  CodecChoice everywhere, without torch; an Encoding is made where the model's
       sizes are known, and travels with the rows.
From:  actions.   To: spec, program (how large an encoded row is), codecs.packed.

Promise: an Encoding that exists is of a codec that can be made again from it, whose
rows can be encoded and decoded one by one, in a fixed number of bytes each.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_scope.errors import ConfigError, SpecError, shown

#: Codecs that a read may name -> their options. Those of codecs.CODECS whose rows can
#: be told apart; here too, because callers may have no torch.
READ_CODECS: dict[str, tuple[str, ...]] = {
    "none": (),
    "fp16": (),
    "fp8": (),
    "int8": (),
    "full8": (),
    "rp8": ("k", "seed"),
    "topk8": ("k",),
}
#: Numbers of the projection of one read's rp8: a worker makes it when the request
#: comes, which takes it 0.2 s and 32 MiB at most.
MAX_PROJECTION = 1 << 23


@dataclass(frozen=True)
class CodecChoice:
    """A codec by its name, and the options that were given."""

    name: str
    options: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def parse(value: object, where: str) -> CodecChoice | None:
        """The choice that a name, or an object with a name and options, makes.

        Returns:
            None for no codec.

        Raises:
            SpecError: an unknown name or option, or an option that is no whole number.
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

    def to_json(self) -> str | dict[str, Any]:
        return {"name": self.name, **dict(self.options)} if self.options else self.name

    def encoding(self, hidden_size: int, dtype: str, where: str) -> Encoding:
        """What it is for one engine's rows.

        Raises:
            SpecError: an option does not fit rows of this size.
        """
        import torch

        from vllm_scope.codecs import make_codec
        from vllm_scope.codecs.packed import Packing

        try:
            codec = make_codec(self.name, hidden_size, getattr(torch, dtype), **dict(self.options))
        except ConfigError as error:
            raise SpecError(f"{where}: {error}") from None
        metadata = codec.metadata()
        if self.name == "rp8" and hidden_size * metadata["k"] > MAX_PROJECTION:
            raise SpecError(
                f"{where}.k is {metadata['k']}; for rows of {hidden_size} values a read takes "
                f"at most {MAX_PROJECTION // hidden_size}."
            )
        return Encoding(json.dumps(metadata, sort_keys=True), Packing(codec).num_bytes)


def _whole(value: object, where: str) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise SpecError(f"{where} is {shown(value)}; it is a whole number.")


@dataclass(frozen=True)
class Encoding:
    """The codec of some rows, by value.

    Attributes:
        text: its metadata (`codecs.Codec.metadata`), as JSON.
        row_bytes: of one encoded row, without what fills its last slot.
    """

    text: str
    row_bytes: int

    @cached_property
    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found
