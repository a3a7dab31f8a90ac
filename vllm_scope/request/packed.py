"""Checked actions as bytes, between the processes of one engine.

Owns:  Packed, `pack`, `unpack`.
Runs:  in front-ends and EngineCore (`pack`), in EngineCore and workers (`unpack`). No torch.
From:  spec, resolve (whose actions are packed).   To: ticket, core.news.

Promise: equal actions have equal digests. Vectors are kept apart from the rest, so that a
worker gets a vector only if it does not hold it (core.news). `unpack` does not check the actions
again: they were checked when they were made, and packed bytes never come from a caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from itertools import groupby
from typing import Any

import msgspec

from vllm_scope.request.actions import (
    Ablate,
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
from vllm_scope.request.heads import Bank, CodecChoice, Encoding, Likeliest, Strongest, Told
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

#: A packed object is a list: the number of its class, then its fields.
_CLASSES: tuple[type[Any], ...] = (
    Read, Probe, Add, Ablate, Clamp, Replace, Module, CodecChoice,
    ResolvedRead, ResolvedProbe, ResolvedEdit, Encoding,
    Word, Positions, Span, TokenIds, Union, Except,
    Mlp, AttentionPool, Ema, RollingMean, Net, Bank, Cell,
    Told, Gate, ResolvedGate, FeatureRows, SetFeature, ScaleFeature,
    Latch, Hysteresis, Pid, Features, EncoderRows, HeldSae, ResolvedFeatures, Strongest, Policy,
    LensTopK, Likeliest,
    Moments, ResolvedMoments,
)  # fmt: skip
_NUMBER_OF = {cls: number for number, cls in enumerate(_CLASSES)}
_FIELDS = [tuple(field.name for field in fields(cls)) for cls in _CLASSES]
#: Stand in place of a class's number: for a tuple of objects, a tuple of plain values, an Array
#: (by its digest), a Place, edits that differ in their streams only.
_TUPLE, _PLAIN, _ARRAY, _PLACE, _EDITS = -1, -2, -3, -4, -5
_PLAIN_TYPES = {int, float, str, bool, type(None)}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """Reads, probes and edits, without their vectors.

    Attributes:
        digest: of everything, vectors included.
        body: msgpack.
        arrays: digests of the Arrays that the body names.
    """

    digest: bytes
    body: bytes
    arrays: list[bytes]


def pack(actions: tuple[object, ...]) -> tuple[Packed, dict[bytes, Array]]:
    """The actions without their Arrays, and the Arrays by digest."""
    arrays: dict[bytes, Array] = {}
    body = _encode(_taken_apart(actions, arrays))
    # The body contains the digests of the Arrays, so this digest covers the Arrays too.
    digest = hashlib.blake2b(body, digest_size=16).digest()
    return Packed(digest, body, list(arrays)), arrays


def unpack(packed: Packed, arrays: Mapping[bytes, Array]) -> tuple[Any, ...]:
    """The actions that `pack` was given.

    Raises:
        KeyError: an Array is not among `arrays`.
    """
    found: tuple[Any, ...] = _put_together(_decode(packed.body), arrays)
    return found


def _taken_apart(value: object, arrays: dict[bytes, Array]) -> object:
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
                    [_taken_apart(some[0], arrays), [list(e.stream) for e in some]]
                    for some in groups
                ),
            ]
        return [_TUPLE, *(_taken_apart(one, arrays) for one in value)]
    if isinstance(value, Array):
        arrays[value.digest] = value
        return [_ARRAY, value.digest]
    number = _NUMBER_OF.get(type(value))
    if number is None:
        return value
    return [number, *(_taken_apart(getattr(value, name), arrays) for name in _FIELDS[number])]


_EDIT_FIELDS = tuple(field.name for field in fields(ResolvedEdit) if field.name != "stream")


def _without_stream(edit: ResolvedEdit) -> tuple[object, ...]:
    return tuple(edit.__dict__[name] for name in _EDIT_FIELDS)


def _edits_of(group: Any, arrays: Mapping[bytes, Array]) -> list[ResolvedEdit]:
    """The edits of one action at its streams. A request may have thousands of them."""
    first, streams = group
    content = _put_together(first, arrays).__dict__
    found = []
    for site, layer in streams:
        one = object.__new__(ResolvedEdit)
        one.__dict__.update(content, stream=Place(site, layer))
        found.append(one)
    return found


def _put_together(value: Any, arrays: Mapping[bytes, Array]) -> Any:
    if type(value) is not list:
        return value
    number = value[0]
    if number == _EDITS:
        return tuple(edit for group in value[1:] for edit in _edits_of(group, arrays))
    if number == _PLAIN:
        return tuple(value[1:])
    if number == _PLACE:
        return Place(value[1], value[2])
    if number == _ARRAY:
        return arrays[value[1]]
    rest = [_put_together(one, arrays) if type(one) is list else one for one in value[1:]]
    if number == _TUPLE:
        return tuple(rest)
    found = object.__new__(_CLASSES[number])
    found.__dict__.update(zip(_FIELDS[number], rest, strict=True))
    return found
