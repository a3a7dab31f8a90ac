"""Heads: computations on rows, before the rows leave the device.

Owns:  CodecChoice (a codec's name and options), Head, and the kinds of heads:
       Encoding (the codec of a read), Bank (the nets at one `Place`),
       Strongest (the strongest features of an SAE), Likeliest (the likeliest next tokens),
       `Told` (numbers that taps compute), Scored (a Bank that taps compute),
       Summed (rows that the worker adds to sums on the device).
Runs:  in every process, without torch. Only a process that knows the model's sizes can make a Head.
       Workers send the Head together with the bytes that it describes.
From:  actions, resolve.   To: codecs.packed, worker.probe_bank, layout (sizes of heads' values).

A net is the function by which a probe computes numbers from a row (nets.py). A tap is the op in the
compiled graph that reads rows. Taps write to device memory that is called the arena.

Promise: a head makes a fixed number of bytes from each row, and uses no other row. An Encoding
contains all options of its codec. A Bank contains a digest of its weights, and not the weights. A
Strongest contains the number of features, and the name of an SAE that the workers have loaded. A
Likeliest contains the number of tokens, and the key of the lens map, if a lens maps the rows first
(LensKey).
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

#: The codecs that a read can name, and the names of each codec's options. These are the codecs of
#: codecs.CODECS that encode each row independently of other rows. The names are repeated here,
#: because `codecs` imports torch, and torch can be missing in a caller's process.
READ_CODECS: dict[str, tuple[str, ...]] = {
    "none": (),
    "fp16": (),
    "fp8": (),
    "int8": (),
    "full8": (),
    "rp8": ("k", "seed"),
    "topk8": ("k",),
}


#: The key under which the workers store one map of a lens: (name of the lens, boundary of the map).
#: A boundary is the number of a place in the model (sites.py).
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
        """Make a CodecChoice from a codec's name, or from an object with a name and options.

        Returns:
            None if `value` is None or names the codec "none".

        Raises:
            SpecError: a wrong type, an unknown name or option, or an option that is not a whole
                number of at most 64 bits.
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
            files = ", a codec for files only" * (name == "zstd")
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
    """A description of a computation on each row.

    Attributes:
        text: identifies the computation. Heads with equal texts compute the same bytes from a row.
        row_bytes: number of bytes that the head makes from a row, without padding.
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
    """The nets of one request at one `Place` and in one stage of a cascade. The result has the
    numbers of all nets, as float32, one after another."""

    #: The `text` of a Bank begins with this word. (The text of an Encoding is a JSON object.)
    start: ClassVar[str] = "probes"

    @classmethod
    def of(
        cls, digests: Iterable[bytes], num_values: int, group: int = 0, after: str | None = None
    ) -> Self:
        """The bank of some nets.

        Args:
            digests: the digests of the nets, in order. For a `Told`, the digests of its gates and
                edits.
            num_values: the number of float32 numbers that all nets together make from a row.
            group: `Place.group`. The two sites at one boundary have different groups.
            after: the same as `Probe.after`.
        """
        # The heads in a layout are sorted by their texts, and "then" sorts after every digest.
        # Therefore the banks of one group and stage are adjacent.
        stage = "" if after is None else f"then {after} "
        digest = hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()
        return cls(f"{cls.start} {group} {stage}{digest}", 4 * num_values)

    @property
    def nameless(self) -> Bank:
        """This bank without the digest. The digest of a probe with a steering module's vector is
        not known in a front-end, because front-ends do not have these vectors. Therefore a
        front-end finds a bank's numbers by its `Place`, its stage, and the count of its numbers."""
        return type(self)(self.text.rpartition(" ")[0], self.row_bytes)


@dataclass(frozen=True)
class Told(Bank):
    """Numbers that taps compute and write to the arena, as float32, one after another. The worker
    delivers these numbers as the taps wrote them. A `Told` that is not a Scored has the values
    of gates and the doses of edits at one `Place`.
    """

    start: ClassVar[str] = "told"


@dataclass(frozen=True)
class Scored(Told):
    """A Bank of a few linear nets, whose numbers taps compute. Taps copy no row for such a Bank."""

    start: ClassVar[str] = "scored"


@dataclass(frozen=True)
class Strongest(Bank):
    """The strongest features of an SAE that the workers have loaded. For each row, the result is
    `count` int32 indices, and then `count` float32 values in descending order. If fewer features
    are active, the remaining values are 0."""

    start: ClassVar[str] = "strongest"

    @staticmethod
    def of_sae(name: str, count: int, group: int = 0) -> Strongest:
        """The `count` strongest features of this SAE. `group` is the same argument as in
        Bank.of."""
        return Strongest(f"{Strongest.start} {group} {count} {name}", 8 * count)

    @property
    def nameless(self) -> Self:
        """This object itself. The text of a Strongest contains no digest."""
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
        """The key under which the workers store the SAE or lens that computes the (index, value)
        pairs."""
        return self.sae


@dataclass(frozen=True)
class Likeliest(Strongest):
    """The likeliest tokens of a row by the model's own final norm and unembedding. A named lens can
    map the row first. For each row, the result is `count` int32 token ids, and then `count` float32
    log-probabilities in descending order. If the vocabulary has fewer tokens, the remaining ids are
    -1."""

    start: ClassVar[str] = "likeliest"

    @staticmethod
    def of_lens(count: int, group: int = 0, key: LensKey = LENS) -> Likeliest:
        """The `count` likeliest tokens. `group` is the same argument as in Bank.of."""
        named = "" if key == LENS else f" {key[1]} {key[0]}"
        return Likeliest(f"{Likeliest.start} {group} {count}{named}", 8 * count)

    @property
    def sae(self) -> str:
        """An empty string, because a lens has no SAE."""
        return ""

    @property
    def maker(self) -> LensKey:
        _, _, _, *named = self.text.split(" ", 4)
        return (named[1], int(named[0])) if named else LENS


@dataclass(frozen=True)
class Summed(Head):
    """Rows that the worker adds to sums (worker.summing). The rows do not leave the device.

    Attributes:
        number: index of the action among the request's Moments.
    """

    number: int = 0

    @staticmethod
    def of(number: int) -> Summed:
        return Summed(f"summed {number}", 0, number)


@lru_cache(maxsize=4096)
def known_head(text: str, row_bytes: int) -> Head:
    """The Head with these attributes. Another process of the engine has sent the attributes."""
    kinds = Bank, Told, Scored, Strongest, Likeliest
    banks = (kind for kind in kinds if text.startswith(f"{kind.start} "))
    kind: type[Head] = next(banks, Encoding)
    return kind(text, row_bytes)
