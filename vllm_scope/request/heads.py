"""Heads: what is computed from rows before the rows leave the device.

Owns:  CodecChoice (what a caller names), Head and its kinds: Encoding (the codec of a read), Bank
       (the probes at one place), Strongest (the strongest features of an SAE), Likeliest (the
       likeliest tokens by the model's own unembedding), Told (numbers that taps compute while they
       edit), Scored (the probes at one place that taps compute) and Summed (rows that are added to
       sums on the device).
Runs:  CodecChoice everywhere, without torch. A Head is made where the model's sizes are known,
       and travels with the bytes that it makes.
From:  actions, resolve.   To: codecs.packed, worker.probe_bank, layout (the size of a head's
       values).

Promise: a head works on each row by itself, and makes a fixed number of bytes from it. The codec
can be made again from an Encoding. A Bank has a digest of its weights, not the weights. A Strongest
has the name of an SAE that the workers hold. A Likeliest has a count, and the name of the lens if
one maps the rows first.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Self

from vllm_scope.errors import SpecError, shown

#: Codecs that a read may name -> their options: the rowwise codecs of codecs.CODECS. Listed here
#: again, because codecs imports torch, which a caller may lack.
READ_CODECS: dict[str, tuple[str, ...]] = {
    "none": (),
    "fp16": (),
    "fp8": (),
    "int8": (),
    "full8": (),
    "rp8": ("k", "seed"),
    "topk8": ("k",),
}


#: The key under which the workers hold one map of a lens: the lens's name, and the map's boundary.
#: (The key of a held SAE is its name.)
LensKey = tuple[str, int]
#: The key of the model's own lens, which maps no rows.
LENS: LensKey = ("", -1)


@dataclass(frozen=True)
class CodecChoice:
    """The name of a codec, and the options that the caller gave."""

    name: str
    options: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def parse(value: object, where: str) -> CodecChoice | None:
        """The CodecChoice of a name, or of an object with a name and options.

        Returns:
            None if `value` is None or names the codec "none".

        Raises:
            SpecError: an unknown name or option, or an option that is not a whole number.
        """
        if value is None or isinstance(value, CodecChoice):
            return value
        body = {"name": value} if isinstance(value, str) else value
        if not isinstance(body, Mapping) or not isinstance(body.get("name"), str):
            raise SpecError(
                f"{where} is {shown(value)}; it must be a name, or an object with a name and "
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
    raise SpecError(f"{where} is {shown(value)}; it must be a whole number of at most 64 bits.")


@dataclass(frozen=True)
class Head:
    """A description of what is computed from each row.

    Attributes:
        text: equal for heads that compute the same from a row.
        row_bytes: how many bytes the head makes from a row, without the padding of the last slot.
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


@dataclass(frozen=True)
class Bank(Head):
    """The probes of one request at one place, of one stage of a cascade: float32 numbers, side by
    side."""

    #: `text` begins with this word. (The text of an Encoding is a JSON object.)
    start: ClassVar[str] = "probes"

    @classmethod
    def of(
        cls, digests: Iterable[bytes], num_values: int, group: int = 0, after: str | None = None
    ) -> Self:
        """The bank of some nets.

        Args:
            digests: the digests of the nets, in order; for a Told, those of gates and edits.
            num_values: how many numbers the nets make from a row, together.
            group: Place.group, because two sites may share a boundary.
            after: as in Probe.
        """
        # This word sorts after every digest, so that banks of one stage stand side by side in a
        # layout.
        stage = "" if after is None else f"then {after} "
        digest = hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()
        return cls(f"{cls.start} {group} {stage}{digest}", 4 * num_values)

    @property
    def nameless(self) -> Bank:
        """This bank without its digest. A front-end does not have the weights of steering modules,
        so it finds the numbers of its request by their place and their count."""
        return type(self)(self.text.rpartition(" ")[0], self.row_bytes)


@dataclass(frozen=True)
class Told(Bank):
    """Numbers that taps compute and write to the arena: float32, side by side. On their way
    out of the arena the numbers are only copied. The numbers of a plain Told are the gates' values
    and the edits' doses at one place.
    """

    start: ClassVar[str] = "told"


@dataclass(frozen=True)
class Scored(Told):
    """A Bank of few linear nets. Taps compute its numbers, so no row is copied for it."""

    start: ClassVar[str] = "scored"


@dataclass(frozen=True)
class Strongest(Bank):
    """The strongest features of an SAE that the workers hold: int32 indices, then as many float32
    values, descending. If fewer features are active, the remaining values are 0."""

    start: ClassVar[str] = "strongest"

    @staticmethod
    def of_sae(name: str, count: int, group: int = 0) -> Strongest:
        """The `count` strongest features of the SAE with this name; group as in Bank.of."""
        return Strongest(f"{Strongest.start} {group} {count} {name}", 8 * count)

    @property
    def nameless(self) -> Self:
        """This bank itself: its text has no digest."""
        return self

    @property
    def count(self) -> int:
        return self.row_bytes // 8

    @property
    def sae(self) -> str:
        """The name of the SAE."""
        return self.text.split(" ", 3)[3]

    @property
    def maker(self) -> str | LensKey:
        """The key under which the workers hold the pair maker."""
        return self.sae


@dataclass(frozen=True)
class Likeliest(Strongest):
    """The likeliest tokens by the model's own final norm and unembedding, of rows that a lens may
    have mapped: int32 token ids, then as many float32 log-probabilities, descending. If the
    vocabulary has fewer tokens, the remaining ids are -1."""

    start: ClassVar[str] = "likeliest"

    @staticmethod
    def of_lens(count: int, group: int = 0, key: LensKey = LENS) -> Likeliest:
        """The `count` likeliest tokens; group as in Bank.of."""
        named = "" if key == LENS else f" {key[1]} {key[0]}"
        return Likeliest(f"{Likeliest.start} {group} {count}{named}", 8 * count)

    @property
    def sae(self) -> str:
        """Empty: the tokens come from no SAE."""
        return ""

    @property
    def maker(self) -> LensKey:
        _, _, _, *named = self.text.split(" ", 4)
        return (named[1], int(named[0])) if named else LENS


@dataclass(frozen=True)
class Summed(Head):
    """Rows that the worker adds to sums which it keeps (worker.summing). The rows do not leave the
    device.

    Attributes:
        number: index of the action among the request's Moments.
    """

    number: int = 0

    @staticmethod
    def of(number: int) -> Summed:
        return Summed(f"summed {number}", 0, number)


@lru_cache(maxsize=4096)
def known_head(text: str, row_bytes: int) -> Head:
    """The head with these attributes, which came from another process of the engine."""
    kinds = Bank, Told, Scored, Strongest, Likeliest
    banks = (kind for kind in kinds if text.startswith(f"{kind.start} "))
    kind: type[Head] = next(banks, Encoding)
    return kind(text, row_bytes)
