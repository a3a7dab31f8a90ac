"""Tiers of vectors and of clamps, counted before they are built.

Owns:  `bounded`: a tier as objects, no larger than this model can use.
Runs:  in the front-end, for a request on the event loop of an API server.
To:    vectors (of a request) and tiers (of all requests), which parse what passes here.

The parsers refuse values of a wrong type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm_scope.compat.bounds import Room, check_base64, check_vector, few, parsed
from vllm_scope.errors import SpecError
from vllm_scope.request.sites import ALIASES, Sites
from vllm_scope.vectors.hooks import is_packed, layer_of, mapping, site_of

#: Numbers of fields of a packed hook, a vector with a scale, and a clamp. The parsers check names.
_PACKED_FIELDS, _VECTOR_FIELDS, _CLAMP_FIELDS = 7, 3, 5
_DTYPES = {"float32": 4, "float16": 2, "float64": 8, "bfloat16": 2}


def bounded(body: Any, sites: Sites, room: Room, where: str, *, clamps: bool = False) -> Any:
    """A tier as objects: at most one vector for each layer of a hook, or with `clamps` at most as
    many clamps as a request can have edits.

    Raises:
        SpecError: more than that, or vectors that are not of this model's size.
    """
    body = parsed(body, where)
    few(body, len(ALIASES), "hooks", where)
    hooks = mapping(body, where)
    for hook, by_layer in hooks.items():
        site_of(hook, where)
        place = f"{where}[{hook!r}]"
        few(by_layer, max(sites.num_layers, _PACKED_FIELDS), "layers", place)
        if not clamps:
            room.take("edits", 1, place)
        if is_packed(by_layer):
            num_rows = _check_packed(by_layer, sites, None if clamps else sites.num_layers, place)
            room.take("edits", num_rows if clamps else 0, place)
            continue
        few(by_layer, sites.num_layers, "layers", place)
        for layer, entry in mapping(by_layer, place).items():
            if layer_of(layer, place) >= sites.num_layers:
                raise SpecError(
                    f"{place} has layer {layer}; this model has layers 0 to {sites.num_layers - 1}."
                )
            path = f"{place}[{layer!r}]"
            if not clamps:
                _check_entry(entry, sites, room, path, _VECTOR_FIELDS)
            elif isinstance(entry, list | tuple):
                room.take("edits", len(entry), path)
                for i, one in enumerate(entry):
                    _check_entry(one, sites, room, f"{path}[{i}]", _CLAMP_FIELDS)
    return hooks


def _check_entry(entry: Any, sites: Sites, room: Room, path: str, most: int) -> None:
    if isinstance(entry, Mapping):
        few(entry, most, "fields", path)
        if "vector" in entry:
            entry, path = entry["vector"], f"{path}.vector"
    if isinstance(entry, Mapping):  # one vector, with base64
        _check_packed(entry, sites, 1, path)
    check_vector(entry, sites.hidden_size, room, path)


def _check_packed(body: Mapping[Any, Any], sites: Sites, most: int | None, where: str) -> int:
    """The number of rows that a packed hook claims; 0 if the parser will refuse it."""
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
    num_rows: int = math.prod(rows)
    if most is not None and num_rows > most:
        raise SpecError(f"{where}.shape is {shape}; at most {most} rows.")
    check_base64(body.get("data"), num_rows * size * _DTYPES[dtype], where)
    return num_rows
