"""Checked actions as bytes, for the messages between the processes of one engine.

Owns:  Packed, `pack`, `unpack`.
Runs:  in front-ends and EngineCore (`pack`), in EngineCore and workers (`unpack`). No torch.
From:  spec (actions), resolve (resolved actions).   To: ticket, core.news.

Promise: equal actions have equal digests. The body of a Packed does not contain vectors. Therefore
EngineCore can send a worker only those vectors that the worker does not have (core.news). The body
also does not contain the layers and numbers of Add, Ablate, Clamp and Replace, or the numbers of
gates. Therefore specs that differ only in these values, such as cells of a sweep, have equal bodies
(outline.py). `unpack` does not check the actions again: they were checked when they were made, and
a caller cannot send packed bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from vllm_scope.request.actions import (
    Ablate,
    Action,
    Add,
    Clamp,
    EncoderRows,
    FeatureRows,
    Features,
    Gate,
    HeldSae,
    Hysteresis,
    Latch,
    LensTopK,
    Module,
    Moments,
    Pid,
    Policy,
    Probe,
    Read,
    Replace,
    ScaleFeature,
    SetFeature,
)
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import (
    Bank,
    CodecChoice,
    Encoding,
    Likeliest,
    Scored,
    Strongest,
    Told,
)
from vllm_scope.request.nets import AttentionPool, Ema, Mlp, Net, RollingMean
from vllm_scope.request.resolved import (
    Cell,
    ResolvedEdit,
    ResolvedFeatures,
    ResolvedGate,
    ResolvedMoments,
    ResolvedProbe,
    ResolvedRead,
)
from vllm_scope.request.selectors import Except, Positions, Span, TokenIds, Union, Word
from vllm_scope.request.sites import Place

#: A packed object is a list: the index of the object's class in _CLASSES, and then the object's
#: fields.
_CLASSES: tuple[type[Any], ...] = (
    Read, Probe, Add, Ablate, Clamp, Replace, Module, CodecChoice,
    ResolvedRead, ResolvedProbe, ResolvedEdit, Encoding,
    Word, Positions, Span, TokenIds, Union, Except,
    Mlp, AttentionPool, Ema, RollingMean, Net, Bank, Cell,
    Told, Gate, ResolvedGate, FeatureRows, SetFeature, ScaleFeature,
    Latch, Hysteresis, Pid, Features, EncoderRows, HeldSae, ResolvedFeatures, Strongest, Policy,
    LensTopK, Likeliest,
    Moments, ResolvedMoments, Scored,
)  # fmt: skip
_NUMBER_OF = {cls: number for number, cls in enumerate(_CLASSES)}
#: The classes of edits whose `layers` are not in the body. `layer` is not packed, because `layer`
#: can be computed from `layers`.
_PLACED = (Add, Ablate, Clamp, Replace)
#: The classes of objects whose float numbers are not in the body.
_NUMBERED = (*_PLACED, Gate)
_FIELDS = [
    tuple(each.name for each in fields(cls) if cls not in _PLACED or each.name != "layer")
    for cls in _CLASSES
]
#: A list that begins with one of these markers is not an object of _CLASSES. In this order, the
#: markers stand for: a tuple of objects, a tuple of plain values, the index of an Array, a `Place`,
#: resolved edits (in groups that differ only in streams), the index of an edit's layers, the index
#: of a number.
_TUPLE, _PLAIN, _ARRAY, _PLACE, _EDITS, _LAYERS, _NUMBER = -1, -2, -3, -4, -5, -6, -7
_PLAIN_TYPES = {int, float, str, bool, type(None)}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """Packed actions, without their vectors.

    Attributes:
        digest: a digest of the body, the vectors, the layers and the numbers.
        body: the actions in msgpack, without the values in `arrays`, `layers` and `numbers`.
        arrays: the digests of the Arrays. In place of an Array, the body has an index into this
            list.
        layers: the layers of each Add, Ablate, Clamp and Replace that names layers, in the order of
            the edits.
        numbers: the distinct numbers (0.0 and -0.0 are distinct). In place of a number, the body
            has an index into this list.
    """

    digest: bytes
    body: bytes
    arrays: list[bytes]
    layers: list[tuple[int, ...]] = []
    numbers: list[float] = []

    @staticmethod
    def of(
        body: bytes, arrays: list[bytes], layers: list[tuple[int, ...]], numbers: list[float]
    ) -> Packed:
        digest = hashlib.blake2b(body, digest_size=16)
        digest.update(_encode((arrays, layers, numbers)))
        return Packed(digest.digest(), body, arrays, layers, numbers)


@dataclass(frozen=True)
class _Apart:
    """Collects the parts that `pack` leaves out of a body. `arrays` has the Arrays by digest, and
    `indices` has the index of each Array by digest. `layers` has the layers of the edits. `numbers`
    has the index of each number, by the text of the number."""

    arrays: dict[bytes, Array] = field(default_factory=dict)
    indices: dict[bytes, int] = field(default_factory=dict)
    layers: list[tuple[int, ...]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def index_of(self, array: Array) -> int:
        self.arrays[array.digest] = array
        return self.indices.setdefault(array.digest, len(self.indices))

    def of_layers(self, layers: tuple[int, ...]) -> int:
        self.layers.append(layers)
        return len(self.layers) - 1

    def of_number(self, number: float) -> int:
        return self.numbers.setdefault(repr(number), len(self.numbers))


class _Kept(NamedTuple):
    """The parts that `pack` left out of a body, for `unpack`. The body has their indices."""

    arrays: list[Array]
    layers: list[tuple[int, ...]]
    numbers: list[float]


def pack(actions: tuple[object, ...]) -> tuple[Packed, dict[bytes, Array]]:
    """Pack actions. Returns the Packed (without Arrays), and the Arrays by digest."""
    apart = _Apart()
    body = _encode(_taken_apart(actions, apart))
    numbers = list(map(float, apart.numbers))
    return Packed.of(body, list(apart.arrays), apart.layers, numbers), apart.arrays


def have_one_body(one: Action, other: Action) -> bool:
    """True if two edits differ only in their layer and their vector (or rows). Each edit must have
    one layer and no gate, and must not name a module."""
    if type(one) is not type(other) or not isinstance(one, _PLACED) or one.gate is not None:
        return False
    vector = one.fields[0]
    own = all(
        isinstance(getattr(x, vector), Array) and isinstance(x.layers, tuple) and len(x.layers) == 1
        for x in (one, other)
    )
    names = _FIELDS[_NUMBER_OF[type(one)]]
    return own and all(
        name in ("layers", vector) or getattr(one, name) == getattr(other, name) for name in names
    )


def unpack(packed: Packed, arrays: Mapping[bytes, Array]) -> tuple[Any, ...]:
    """The actions that `pack` was given.

    Raises:
        KeyError: an Array is not among `arrays`.
    """
    kept = _Kept([arrays[digest] for digest in packed.arrays], packed.layers, packed.numbers)
    found: tuple[Any, ...] = _put_together(_decode(packed.body), kept)
    return found


def _taken_apart(value: object, apart: _Apart) -> object:
    cls = type(value)
    if cls in _PLAIN_TYPES:  # most values are of these types
        return value
    if isinstance(value, Place):
        return [_PLACE, *value]
    if isinstance(value, tuple):
        if set(map(type, value)) <= _PLAIN_TYPES:
            return [_PLAIN, *value]
        if type(value[0]) is ResolvedEdit:
            groups = [list(some) for _, some in groupby(value, _without_stream)]
            return [
                _EDITS,
                *(
                    [_taken_apart(some[0], apart), [list(e.stream) for e in some]]
                    for some in groups
                ),
            ]
        return [_TUPLE, *(_taken_apart(one, apart) for one in value)]
    if isinstance(value, Array):
        return [_ARRAY, apart.index_of(value)]
    number = _NUMBER_OF.get(cls)
    if number is None:
        return value
    numbered, placed = cls in _NUMBERED, cls in _PLACED
    found: list[object] = [number]
    for name in _FIELDS[number]:
        part = getattr(value, name)
        if numbered and type(part) is float:
            part = [_NUMBER, apart.of_number(part)]
        elif placed and name == "layers" and type(part) is tuple:
            part = [_LAYERS, apart.of_layers(part)]
        elif type(part) not in _PLAIN_TYPES:
            part = _taken_apart(part, apart)
        found.append(part)
    return found


_EDIT_FIELDS = tuple(each.name for each in fields(ResolvedEdit) if each.name != "stream")


def _without_stream(edit: ResolvedEdit) -> tuple[object, ...]:
    return tuple(edit.__dict__[name] for name in _EDIT_FIELDS)


def _edits_of(group: Any, kept: _Kept) -> list[ResolvedEdit]:
    """The resolved edits of one action, one for each stream. They are made without their
    constructor, to save time, because there can be thousands."""
    first, streams = group
    content = _put_together(first, kept).__dict__
    found = []
    for site, layer in streams:
        one = object.__new__(ResolvedEdit)
        one.__dict__.update(content, stream=Place(site, layer))
        found.append(one)
    return found


def _put_together(value: Any, kept: _Kept) -> Any:
    if type(value) is not list:
        return value
    number = value[0]
    # The most frequent markers are first.
    if number == _PLACE:
        return Place(value[1], value[2])
    if number == _PLAIN:
        return tuple(value[1:])
    if number == _ARRAY:
        return kept.arrays[value[1]]
    if number == _LAYERS:
        return kept.layers[value[1]]
    if number == _NUMBER:
        return kept.numbers[value[1]]
    if number == _EDITS:
        return tuple(edit for group in value[1:] for edit in _edits_of(group, kept))
    rest = [_put_together(one, kept) if type(one) is list else one for one in value[1:]]
    if number == _TUPLE:
        return tuple(rest)
    cls = _CLASSES[number]
    found = object.__new__(cls)
    found.__dict__.update(zip(_FIELDS[number], rest, strict=True))
    if cls in _PLACED:
        layers: Any = found.layers
        found.__dict__["layer"] = layers[0] if len(layers) == 1 else layers
    return found
