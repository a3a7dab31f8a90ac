"""Counts vectors and clamps of the steering fork, and then parses these values as edits.

    {hook: {layer: [...] | {"vector": [...], "scale": 2.0}}}              vectors
    {hook: {layer: [{"vector": [...], "min": -2.0, "max": 4.0}, ...]}}    clamps
    {hook: {"dtype", "shape", "layer_indices", "data", ...}}              packed vectors or clamps

A tier is the vectors, or the clamps, for all tokens, for the prompt or for generated tokens.

Owns:  `bounded` (counts the values of a tier), and the translation of tiers to Adds and Clamps.
Runs:  in the front-end. For HTTP requests, the event loop of the API server runs this code.
From:  vllm_scope.vectors.hooks.   To: keys and gates (for one request), tiers and http (for
       all requests).

Promise: the vectors and clamps of a tier are counted before any edit or array is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from vllm_scope.compat.bounds import Room, check_vector, few, few_fields, parsed
from vllm_scope.engine.frontend.translators import called
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import MAX_FLOAT32, Add, Clamp, Edit, Gate
from vllm_scope.request.sites import ALIASES, SiteLayer, Sites
from vllm_scope.vectors.hooks import (
    HookVectors,
    is_packed,
    layer_of,
    mapping,
    number_of,
    one_vector,
    packed_rows,
    parse_hooks,
    per_row,
    site_of,
)

HOOKS = {site: hook for hook, site in ALIASES.items()}
_BOUNDS = {"min", "max", "value"}
#: The most fields that a packed hook, a vector (given as an object) and a clamp can have.
_PACKED_FIELDS, _VECTOR_FIELDS, _CLAMP_FIELDS = 7, 3, 5


# Counting. These functions accept some values of a wrong type, which the parsers refuse later.


def bounded(
    body: object, sites: Sites, room: Room, where: str, *, clamps: bool = False
) -> Mapping[object, object]:
    """Count the vectors or the clamps of a tier, and return the tier's hooks.

    `clamps` is True for a tier of clamps, and False for a tier of vectors. A hook has at most one
    vector for each layer. All vectors of one hook count as one edit of the request. Each clamp
    counts as one edit.

    Raises:
        SpecError: too many vectors or clamps, an unknown hook, a layer that the model lacks, or a
            vector that is not [hidden_size].
    """
    hooks = few_fields(parsed(body, where), len(ALIASES), "hooks", where)
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
        for layer, entry in few_fields(by_layer, sites.num_layers, "layers", place).items():
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


def _check_entry(entry: object, sites: Sites, room: Room, path: str, most: int) -> None:
    if isinstance(entry, Mapping):
        few(entry, most, "fields", path)
        if "vector" in entry:
            entry, path = entry["vector"], f"{path}.vector"
    if isinstance(entry, Mapping):  # one vector, as base64
        _check_packed(entry, sites, 1, path)
    check_vector(entry, sites.hidden_size, room, path)


def _check_packed(body: Mapping[object, object], sites: Sites, most: int | None, where: str) -> int:
    """The number of rows in the `shape` of a packed hook; 0 if the parser will refuse the hook.

    Raises SpecError if the rows have a wrong size, or are more than `most`.
    """
    few(body, _PACKED_FIELDS, "fields", where)
    shape = body.get("shape")
    few(shape, 3, "numbers", f"{where}.shape")
    if not isinstance(shape, list) or not shape or {type(n) for n in shape} != {int}:
        return 0
    *rows, size = shape
    if size != sites.hidden_size:
        raise SpecError(
            f"{where}.shape is {shape}; this model's rows have {sites.hidden_size} numbers."
        )
    num_rows = math.prod(map(int, rows))
    if most is not None and num_rows > most:
        raise SpecError(f"{where}.shape is {shape}; at most {most} rows.")
    return max(num_rows, 0)


# Parsing


def vectors_of(body: object, where: str, sites: Sites, room: Room) -> HookVectors:
    """Count and return the vectors of a tier.

    Args:
        room: counts the vectors and numbers of the request.

    Raises:
        SpecError: a value is wrong. The error names the value's path.
    """
    return parse_hooks(bounded(body, sites, room, where), where)


def stacked(
    vectors: HookVectors, tokens: str, scale: float = 1.0, gate: Gate | None = None
) -> list[Add]:
    """Make one Add for each site of the vectors."""
    by_site: dict[str, dict[int, np.ndarray]] = {}
    for (site, layer), vector in vectors.items():
        by_site.setdefault(site, {})[layer] = vector
    return [
        Add(
            np.stack(list(rows.values())), site=site, layers=list(rows), tokens=tokens,
            scale=scale, gate=gate,
        )
        for site, rows in by_site.items()
    ]  # fmt: skip


def clamps_of(
    body: object, tokens: str, where: str, sites: Sites, room: Room
) -> dict[SiteLayer, list[Clamp]]:
    """The Clamps of a tier, by place. An empty list of clamps gives an empty list of Clamps.

    `tokens` are the tokens of the Clamps. Other arguments and the errors are as in `vectors_of`.
    """
    found: dict[SiteLayer, list[Clamp]] = {}
    for hook, by_layer in bounded(body, sites, room, where, clamps=True).items():
        site, place = site_of(hook, where), f"{where}[{hook!r}]"
        if is_packed(by_layer):
            for i, (number, fields) in enumerate(_unpacked(by_layer, place)):
                clamp = _clamp((site, number), fields, f"{place} row {i}", tokens)
                found.setdefault((site, number), []).append(clamp)
            continue
        for layer, entries in mapping(by_layer, place).items():
            path, stream = f"{place}[{layer!r}]", (site, layer_of(layer, place))
            if not isinstance(entries, list | tuple):
                raise SpecError(f"{path} is {shown(entries)}; it must be a list of clamps.")
            found.setdefault(stream, []).extend(
                _clamp(stream, _fields(entry, f"{path}[{i}]"), f"{path}[{i}]", tokens)
                for i, entry in enumerate(entries)
            )
    return found


def words_of(edit: Edit, key: str) -> dict[str, str]:
    """For error texts: the path of the edit's hook in the request, such as
    `steering_vectors['post_block']`. The keys stand for the edit itself and for its fields."""
    place = f"{key}[{HOOKS[edit.site]!r}]"
    return dict.fromkeys(("", ".layers", ".site", ".tokens", f".{edit.fields[0]}"), place)


def _unpacked(body: Mapping[object, object], place: str) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the layer and the fields of each clamp of a packed hook."""
    rows = packed_rows(body, place, {"bounds", "strengths"})
    bounds = per_row(body.get("bounds"), len(rows), f"{place}.bounds")
    given = body.get("strengths")
    strengths = [1.0] * len(rows) if given is None else given
    strengths = per_row(strengths, len(rows), f"{place}.strengths")
    for i, ((layer, row), pair) in enumerate(zip(rows, bounds, strict=True)):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise SpecError(
                f"{place}.bounds[{i}] is {shown(pair)}; it must be [lo, hi], null for no bound."
            )
        yield layer, {"vector": row, "min": pair[0], "max": pair[1], "strength": strengths[i]}


def _fields(entry: object, where: str) -> dict[str, object]:
    allowed = {"vector", "strength", *_BOUNDS}
    if not isinstance(entry, Mapping) or entry.get("vector") is None or not set(entry) <= allowed:
        raise SpecError(
            f"{where} is {shown(entry)}; a clamp is {{vector, min, max, strength}}, or value in "
            "place of min and max."
        )
    fields = {key: value for key, value in entry.items() if value is not None}
    bounds = _BOUNDS & set(fields)
    if not bounds or ("value" in bounds and len(bounds) > 1):
        raise SpecError(
            f"{where} has {', '.join(sorted(bounds)) or 'no bound'}; a clamp has min, max or both, "
            "or value alone."
        )
    if "value" in fields:
        fields["min"] = fields["max"] = fields.pop("value")
    return fields


def _clamp(stream: SiteLayer, fields: Mapping[str, object], where: str, tokens: str) -> Clamp:
    lo, hi = (
        none if fields.get(name) is None else number_of(fields[name], f"{where}.{name}")
        for name, none in (("min", -MAX_FLOAT32), ("max", MAX_FLOAT32))
    )
    strength = number_of(fields.get("strength", 1.0), f"{where}.strength")
    direction = one_vector(fields["vector"], f"{where}.vector")
    words = {".direction": ".vector", ".lo": ".min", ".hi": ".max", ".strength": ".strength"}
    with called({f"Clamp{ours}": f"{where}{theirs}" for ours, theirs in words.items()}):
        return Clamp(
            direction, lo=lo, hi=hi, site=stream[0], layer=stream[1], tokens=tokens,
            strength=strength,
        )  # fmt: skip
