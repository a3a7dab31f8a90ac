"""Vectors in JSON by hook and layer, in the form of the steering fork of vLLM.

    {"post_block": {"15": [0.1, ...], "20": {"vector": [0.4, ...], "scale": 2.0}}}
    {"post_block": {"dtype": "float32", "shape": [2, 4096], "layer_indices": [15, 20],
                    "data": "<base64>", "scales": [1.0, 2.0]}}

The steering fork of vLLM is RhizoNymph/vllm. A hook is the fork's name of a site, such as
`post_block` for `resid_post`. The value of each hook has one of two forms, which are shown above:
vectors by layer, or the packed form. A module's file has an object of hooks for each tier:
{"vectors": ..., "prefill_vectors": ..., "decode_vectors": ...}. If a module has only the tier
`vectors`, the file can consist of the object of hooks alone.

Owns:  HookVectors, and the parsers of hooks and modules.
Runs:  anywhere, with numpy only.
To:    SteeringModule; compat.steering_http, for requests in the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeGuard

import numpy as np

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.arrays import Array
from vllm_scope.request.sites import ALIASES, SiteLayer
from vllm_scope.vectors.module import SteeringModule, Vector


def tiers(word: str) -> dict[str, str]:
    """The names of the three fields for `word`, such as `vectors`, `prefill_vectors` and
    `decode_vectors`. Maps each name to the selector of the tokens on which the field acts."""
    return {word: "all", f"prefill_{word}": "prompt", f"decode_{word}": "generated"}


#: The field names in a module's file, and the field names in a request, each with its selector.
MODULE_TIERS, REQUEST_TIERS = tiers("vectors"), tiers("steering_vectors")
#: Maps a field name of a request to the field name of a module's file.
_MODULE_NAMES: dict[object, object] = dict(zip(REQUEST_TIERS, MODULE_TIERS, strict=True))
_PACKED = {"dtype", "shape", "data", "layer_indices"}

#: float32 vectors [hidden_size] by (site, layer). The vectors are already multiplied by their
#: scales.
HookVectors = dict[SiteLayer, Vector]


def parse_hooks(body: object, where: str) -> HookVectors:
    """Parse the vectors of one tier from a JSON text or from parsed JSON. If the body is None or an
    empty object, the result is an empty dict.

    Raises:
        SpecError: the body is malformed. The message has the path of the wrong value.
    """
    found: HookVectors = {}
    for hook, by_layer in mapping(parsed(body, where), where).items():
        site, place = site_of(hook, where), f"{where}[{hook!r}]"
        if is_packed(by_layer):
            vectors = _unpacked(by_layer, place)
        else:
            layers = mapping(by_layer, place)
            vectors = [
                (layer_of(layer, place), _scaled(entry, f"{place}[{layer!r}]"))
                for layer, entry in layers.items()
            ]
        sizes = {len(vector) for _, vector in vectors}
        if len(sizes) > 1:
            raise SpecError(f"{place} has vectors of {sorted(sizes)} numbers; sizes must be equal.")
        for layer, vector in vectors:
            if (site, layer) in found:
                raise SpecError(f"{place} has layer {layer} twice.")
            found[site, layer] = vector
    return found


def module_from_json(data: bytes) -> SteeringModule:
    """Make a module from the content of a JSON file.

    Raises:
        SpecError: the content is not JSON, or `parse_module` refuses the content.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise SpecError("the content is not JSON, because it is not UTF-8.") from None
    return parse_module(parsed(text, "the file"), "the file")


def parse_module(body: object, where: str) -> SteeringModule:
    """Make a module from JSON. The JSON is an object with a field for each tier, or only the object
    of hooks of the tier `vectors`.

    Raises:
        SpecError: `parse_hooks` refuses a tier, a field is unknown, one tier has two fields, the
            body has clamps, or all numbers of all vectors are 0.
    """
    fields = mapping(body, where)
    if set(fields) <= set(ALIASES):
        fields = {"vectors": fields}
    # A file can have the field names of a request, because users save requests to files.
    for old, new in _MODULE_NAMES.items():
        if old in fields and new in fields:
            raise SpecError(f"{where} has {new} and {old}, which mean the same; keep one.")
    fields = {_MODULE_NAMES.get(name, name): value for name, value in fields.items()}
    for name in tiers("clamps"):
        if fields.pop(name, None):
            raise SpecError(
                f"{where} has {name}; a steering module can have only vectors. Put clamps into "
                "requests (steering_clamps), or for all requests into /v1/steering/set."
            )
    if unknown := sorted(set(fields) - set(MODULE_TIERS), key=str):
        raise SpecError(
            f"{where} has {shown(unknown[0])}; its fields are {', '.join(MODULE_TIERS)}, or the "
            f"hooks {', '.join(ALIASES)}."
        )
    found = {}
    for name, tokens in MODULE_TIERS.items():
        vectors = parse_hooks(fields.get(name), f"{where}[{name!r}]")
        # A module does not store vectors of zeros, because such vectors have no effect.
        found[tokens] = {stream: v for stream, v in vectors.items() if v.any()}
    everywhere = found.pop("all")
    if not everywhere and not any(found.values()):
        raise SpecError(f"{where} has no vector, or only zeros; at least one number must not be 0.")
    return SteeringModule(everywhere, tiers=found)


def parsed(body: object, where: str) -> object:
    """Parse a JSON text. A value that is not a text is returned unchanged."""
    if not isinstance(body, str):
        return body
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where} is not JSON: {error}.") from None


def mapping(body: object, where: str) -> dict[object, object]:
    if body is None:
        return {}
    if not isinstance(body, Mapping):
        raise SpecError(f"{where} is {shown(body)}; it must be an object.")
    return dict(body)


def site_of(hook: object, where: str) -> str:
    if not isinstance(hook, str) or hook not in ALIASES:
        raise SpecError(
            f"{where} has {shown(hook)}; hooks are {', '.join(ALIASES)}, of the residual stream."
        )
    return ALIASES[hook]


def layer_of(layer: object, where: str) -> int:
    """A layer's number, from a number or from a string. Keys in JSON are always strings."""
    if isinstance(layer, str) and layer.isascii() and layer.isdecimal() and len(layer) < 9:
        return int(layer)
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or layer < 0:
        raise SpecError(f"{where} has {shown(layer)}; layers are whole numbers from 0.")
    return int(layer)


def number_of(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise SpecError(f"{where} is {shown(value)}; it must be a number.")
    try:
        return float(value)
    except OverflowError:
        raise SpecError(f"{where} is {shown(value)}; it must be finite in float32.") from None


def is_packed(by_layer: object) -> TypeGuard[Mapping[object, object]]:
    return isinstance(by_layer, Mapping) and not _PACKED.isdisjoint(by_layer)


def packed_rows(
    body: Mapping[object, object], where: str, also: set[str]
) -> list[tuple[int, Vector]]:
    """Read vectors in the packed form. Returns pairs (layer, vector) in the order of the body.

    Args:
        also: additional field names that are allowed.
    """
    if unknown := sorted(set(body) - _PACKED - also, key=str):
        allowed = ", ".join(sorted(_PACKED | also))
        raise SpecError(f"{where} has {shown(unknown[0])}; its fields are {allowed}.")
    rows = Array.parse({key: body.get(key) for key in ("dtype", "shape", "data")}, where).numpy
    if rows.ndim != 2:
        raise SpecError(f"{where}.shape is {list(rows.shape)}; it must be [rows, hidden_size].")
    layers = per_row(body.get("layer_indices"), len(rows), f"{where}.layer_indices")
    numbers = [layer_of(layer, f"{where}.layer_indices") for layer in layers]
    return list(zip(numbers, rows, strict=True))


def per_row(values: object, num_rows: int, where: str) -> list[object]:
    if not isinstance(values, list | tuple) or len(values) != num_rows:
        raise SpecError(
            f"{where} is {shown(values)}; it must be a list with one item for each row."
        )
    return list(values)


def _unpacked(body: Mapping[object, object], where: str) -> list[tuple[int, Vector]]:
    rows = packed_rows(body, where, {"scales"})
    if body.get("scales") is None:
        return rows
    scales = per_row(body["scales"], len(rows), f"{where}.scales")
    return [
        (layer, _times(row, scale, f"{where}.scales"))
        for (layer, row), scale in zip(rows, scales, strict=True)
    ]


def _scaled(entry: object, where: str) -> Vector:
    scale: object = 1.0
    if isinstance(entry, Mapping) and "vector" in entry:
        if unknown := sorted(set(entry) - {"vector", "scale"}, key=str):
            raise SpecError(f"{where} has {shown(unknown[0])}; its fields are vector and scale.")
        scale, entry = entry.get("scale", 1.0), entry["vector"]
    return _times(one_vector(entry, where), scale, f"{where}.scale")


def one_vector(value: object, where: str) -> Vector:
    """Parse one vector from JSON. Returns float32 [hidden_size]."""
    found = Array.parse(value, where)
    if len(found.shape) != 1:
        raise SpecError(f"{where} has shape {found.shape}; it must be one vector, [hidden_size].")
    return found.numpy


def _times(vector: Vector, scale: object, where: str) -> Vector:
    with np.errstate(over="ignore", invalid="ignore"):
        product: Vector = vector * np.float32(number_of(scale, where))
    if not np.isfinite(product).all():
        raise SpecError(f"{where} is {shown(scale)}; the vector times this scale is not finite.")
    return product
