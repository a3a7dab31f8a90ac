"""Vectors and clamps of the steering fork, as edits.

    {hook: {layer: [...] | {"vector": [...], "scale": 2.0}}}              vectors
    {hook: {layer: [{"vector": [...], "min": -2.0, "max": 4.0}, ...]}}    clamps
    {hook: {"dtype", "shape", "layer_indices", "data", ...}}              either, packed

Owns:  tiers of vectors and of clamps as Adds and Clamps.
Runs:  in the front-end.
From:  vllm_scope.vectors.hooks.   To: keys (of a request), routes (of all requests).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vllm_scope.compat.bounds import Room
from vllm_scope.compat.steering_http.bounded import bounded
from vllm_scope.engine.frontend.translators import called
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import MAX_FLOAT32, Add, Clamp, Edit
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


def adds_of(body: Any, tokens: Any, where: str, sites: Sites, room: Room) -> list[Add]:
    """One Add for each hook of a tier.

    Args:
        room: counts the request's vectors.

    Raises:
        SpecError: a wrong value, with its path.
    """
    return stacked(parse_hooks(bounded(body, sites, room, where), where), tokens)


def stacked(vectors: HookVectors, tokens: Any) -> list[Add]:
    """One Add for each site."""
    by_site: dict[str, dict[int, np.ndarray]] = {}
    for (site, layer), vector in vectors.items():
        by_site.setdefault(site, {})[layer] = vector
    return [
        Add(np.stack(list(rows.values())), site=site, layers=list(rows), tokens=tokens)
        for site, rows in by_site.items()
    ]


def clamps_of(body: Any, tokens: Any, where: str, sites: Sites, room: Room) -> list[Clamp]:
    """One Clamp for each direction, a layer's in their order. Arguments and errors as `adds_of`."""
    hooks = bounded(body, sites, room, where, clamps=True)
    return [_clamp(*entry, tokens) for entry in _clamp_entries(hooks, where)]


def words_of(edit: Edit, key: str) -> dict[str, str]:
    """The names of an edit and its fields in errors: path of the action -> path in the tier."""
    place = f"{key}[{HOOKS[edit.site]!r}]"
    return dict.fromkeys(("", ".layers", ".site", ".tokens", f".{edit.fields[0]}"), place)


def _clamp_entries(
    hooks: Mapping[Any, Any], where: str
) -> Iterator[tuple[SiteLayer, dict[str, Any], str]]:
    """(site, layer), an entry's fields, and its path."""
    for hook, by_layer in hooks.items():
        site, place = site_of(hook, where), f"{where}[{hook!r}]"
        if is_packed(by_layer):
            rows = packed_rows(by_layer, place, {"bounds", "strengths"})
            bounds = per_row(by_layer.get("bounds"), len(rows), f"{place}.bounds")
            strengths = by_layer.get("strengths")
            strengths = [1.0] * len(rows) if strengths is None else strengths
            strengths = per_row(strengths, len(rows), f"{place}.strengths")
            for i, (layer, row) in enumerate(rows):
                pair = bounds[i]
                if not isinstance(pair, list | tuple) or len(pair) != 2:
                    raise SpecError(
                        f"{place}.bounds[{i}] is {shown(pair)}; it is [lo, hi], null for no bound."
                    )
                fields = {"vector": row, "min": pair[0], "max": pair[1], "strength": strengths[i]}
                yield (site, layer), fields, f"{place} row {i}"
            continue
        for layer, entries in mapping(by_layer, place).items():
            path = f"{place}[{layer!r}]"
            if not isinstance(entries, list | tuple):
                raise SpecError(f"{path} is {shown(entries)}; it is a list of clamps.")
            for i, entry in enumerate(entries):
                yield (site, layer_of(layer, place)), _fields(entry, f"{path}[{i}]"), f"{path}[{i}]"


def _fields(entry: Any, where: str) -> dict[str, Any]:
    allowed = {"vector", "strength", *_BOUNDS}
    if not isinstance(entry, Mapping) or "vector" not in entry or not set(entry) <= allowed:
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


def _clamp(stream: SiteLayer, fields: Mapping[str, Any], where: str, tokens: Any) -> Clamp:
    bounds = []
    for name, none in (("min", -MAX_FLOAT32), ("max", MAX_FLOAT32)):
        value = fields.get(name)
        bounds.append(none if value is None else number_of(value, f"{where}.{name}"))
    strength = number_of(fields.get("strength", 1.0), f"{where}.strength")
    direction = one_vector(fields["vector"], f"{where}.vector")
    words = {".direction": ".vector", ".lo": ".min", ".hi": ".max", ".strength": ".strength"}
    with called({f"Clamp{ours}": f"{where}{theirs}" for ours, theirs in words.items()}):
        return Clamp(
            direction, lo=bounds[0], hi=bounds[1], site=stream[0], layer=stream[1], tokens=tokens,
            strength=strength,
        )  # fmt: skip
