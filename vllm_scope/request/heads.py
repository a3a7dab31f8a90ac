"""Heads: what is computed of rows before they leave the device.

Owns:  CodecChoice (what a caller names), Head and its kinds: Encoding (the codec of a read), Bank
       (the probes at one place) and Told (what taps compute while they edit).
Runs:  CodecChoice everywhere, without torch. A Head is made where the model's sizes are known,
       and travels with what it makes.
From:  actions, resolve.   To: codecs.packed, worker.probe_bank, layout (the size of its values).

Promise: a head works on each row by itself, and makes a fixed number of bytes of it. The codec can
be made again from an Encoding. A Bank has a digest of its weights, not the weights.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
class Head:
    """What is made of one row, as data.

    Attributes:
        text: equal for heads that make the same of a row.
        row_bytes: size of what it makes, without the padding of its last slot.
    """

    text: str
    row_bytes: int


@dataclass(frozen=True)
class Encoding(Head):
    """The codec of some rows. `text` is the codec's metadata (`codecs.Codec.metadata`), as JSON."""

    @cached_property
    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found


#: `text` of a Bank begins so, and that of a Told; that of an Encoding is a JSON object.
_BANK, _TOLD = "probes ", "told "


@dataclass(frozen=True)
class Bank(Head):
    """The probes of one request at one place: float32 numbers, side by side."""

    @staticmethod
    def of(digests: Iterable[bytes], num_values: int, group: int = 0) -> Bank:
        """The bank of some nets.

        Args:
            digests: of the nets, in order.
            num_values: how many numbers they make of a row together.
            group: as in Place: two sites may share a boundary and its row.
        """
        return Bank(f"{_BANK}{group} {_digest(digests)}", 4 * num_values)

    @property
    def nameless(self) -> Bank:
        """The same without its digest. A front-end does not have the weights of steering modules,
        so it knows the numbers of its request by the place and their count."""
        return type(self)(self.text.rpartition(" ")[0], self.row_bytes)


@dataclass(frozen=True)
class Told(Bank):
    """What taps themselves tell at one place: values of gates and doses of edits. Float32 numbers,
    side by side, in the arena already."""

    @staticmethod
    def of(digests: Iterable[bytes], num_values: int, group: int = 0) -> Told:
        """As Bank.of; the digests are of gates and edits."""
        return Told(f"{_TOLD}{group} {_digest(digests)}", 4 * num_values)


def _digest(digests: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


@lru_cache(maxsize=4096)
def known_head(text: str, row_bytes: int) -> Head:
    """The head with these attributes, which came from another process of the engine."""
    kinds: dict[str, type[Head]] = {_BANK: Bank, _TOLD: Told}
    kind = next((kind for start, kind in kinds.items() if text.startswith(start)), Encoding)
    return kind(text, row_bytes)
