"""Tiers of vectors and of clamps, counted before they are built.

Owns:  `bounded_vectors` and `bounded_clamps`: a tier's object, no larger than this model can use.
Runs:  in the front-end, for a request on the event loop of an API server.
To:    vectors (of a request) and tiers (of all requests), which parse what is let pass here.

What is of a wrong type is left to the parsers: they refuse it where they find it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_scope.compat.bounds import Room, check_base64, check_vector, few, parsed
from vllm_scope.errors import SpecError
from vllm_scope.request.sites import ALIASES, Sites
from vllm_scope.vectors.hooks import is_packed, layer_of, mapping, site_of

#: What a packed hook, a vector with a scale, and a clamp may have; the parsers know the names.
_PACKED_FIELDS, _VECTOR_FIELDS, _CLAMP_FIELDS = 7, 3, 5
_DTYPES = {"float32": 4, "float16": 2, "float64": 8, "bfloat16": 2}


def bounded_vectors(body: Any, sites: Sites, room: Room, where: str) -> Any:
    """A tier of vectors as objects; at most one vector for each layer of a hook.

    Raises:
        SpecError: more than that, or vectors that are not of this model's size.
    """
    hooks = _hooks(body, where)
    for by_layer, place in _places(hooks, sites, where):
        room.take("edits", 1, place)
        if is_packed(by_layer):
            _check_packed(by_layer, sites, sites.num_layers, place)
            continue
        for entry, path in _layers(by_layer, sites, place):
            _check_entry(entry, sites, room, path, _VECTOR_FIELDS)
    return hooks


def bounded_clamps(body: Any, sites: Sites, room: Room, where: str) -> Any:
    """A tier of clamps as objects; at most as many as a request can have edits.

    Raises:
        SpecError: more than that, or directions that are not of this model's size.
    """
    hooks = _hooks(body, where)
    for by_layer, place in _places(hooks, sites, where):
        if is_packed(by_layer):
            room.take("edits", _check_packed(by_layer, sites, None, place), place)
            continue
        for entries, path in _layers(by_layer, sites, place):
            if not isinstance(entries, list | tuple):
                continue
            room.take("edits", len(entries), path)
            for i, entry in enumerate(entries):
                _check_entry(entry, sites, room, f"{path}[{i}]", _CLAMP_FIELDS)
    return hooks


def _hooks(body: Any, where: str) -> dict[Any, Any]:
    body = parsed(body, where)
    few(body, len(ALIASES), "hooks", where)
    return mapping(body, where)


def _places(hooks: Mapping[Any, Any], sites: Sites, where: str) -> Iterator[tuple[Any, str]]:
    """What each hook has, and its path."""
    for hook, by_layer in hooks.items():
        site_of(hook, where)
        place = f"{where}[{hook!r}]"
        few(by_layer, max(sites.num_layers, _PACKED_FIELDS), "layers", place)
        yield by_layer, place


def _layers(by_layer: Any, sites: Sites, place: str) -> Iterator[tuple[Any, str]]:
    """What each layer has, and its path."""
    few(by_layer, sites.num_layers, "layers", place)
    for layer, entry in mapping(by_layer, place).items():
        if layer_of(layer, place) >= sites.num_layers:
            raise SpecError(
                f"{place} has layer {layer}; this model has layers 0 to {sites.num_layers - 1}."
            )
        yield entry, f"{place}[{layer!r}]"


def _check_entry(entry: Any, sites: Sites, room: Room, path: str, most: int) -> None:
    if isinstance(entry, Mapping):
        few(entry, most, "fields", path)
        if "vector" in entry:
            entry, path = entry["vector"], f"{path}.vector"
    if isinstance(entry, Mapping):  # one vector, with base64
        _check_packed(entry, sites, 1, path)
    check_vector(entry, sites.hidden_size, room, path)


def _check_packed(body: Mapping[Any, Any], sites: Sites, most: int | None, where: str) -> int:
    """How many rows numbers with base64 say that they have; 0 where the parser will refuse them."""
    few(body, _PACKED_FIELDS, "fields", where)
    shape, dtype = body.get("shape"), body.get("dtype")
    few(shape, 3, "numbers", f"{where}.shape")
    plain = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    if not shape or not plain or not isinstance(dtype, str) or dtype not in _DTYPES:
        return 0
    *rows, size = shape
    if size != sites.hidden_size:
        raise SpecError(
            f"{where}.shape is {shape}; this model's rows have {sites.hidden_size} numbers."
        )
    num_rows = math.prod(rows)
    if most is not None and num_rows > most:
        raise SpecError(f"{where}.shape is {shape}; at most {most} rows.")
    check_base64(body.get("data"), num_rows * size * _DTYPES[dtype], where)
    return num_rows
