"""Translates the steering fork's clamps on features of sparse autoencoders (SAEs) to SetFeatures.

    sae_clamp_specs=[{
        "module_name": "golden_gate",          # an SAE of additional_config["scope"]["saes"]
        "phase": "decode",                     # "both" (the default), "prefill" or "decode"
        "clamps": {"post_block": {20: [
            {"feature_idx": 34, "kind": "absolute", "value": 5.0, "only_if_active": True},
        ]}},
    }]

Let f be the feature's activation in the token's row. The kind `absolute` adds (value - f) times the
feature's decoder vector to the row. The kind `additive` adds value times the decoder vector. With
`only_if_active`, both kinds change the row only if f is above 0.

Owns:  `features_of`, and the check that an SAE belongs to the clamped place.
Runs:  in the front-end. For HTTP requests, the event loop of the API server runs this code.
To:    keys.

Promise: on one token, all clamps of one SAE at one place read the same row, even if the clamps are
in different objects of `sae_clamp_specs`. Clamps of features apply after all vectors and after all
clamps along directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_scope.compat.bounds import MOST, Room, check_fields, few, few_fields, parsed
from vllm_scope.compat.steering_http.vectors import HOOKS
from vllm_scope.engine.frontend.translators import called
from vllm_scope.errors import SpecError, checked_flag, shown
from vllm_scope.request.actions import SetFeature
from vllm_scope.request.actions.base import checked_name
from vllm_scope.request.actions.features import MAX_FEATURES
from vllm_scope.request.sites import Place, Sites
from vllm_scope.vectors.hooks import layer_of, number_of, site_of

KEY = "sae_clamp_specs"
#: Maps each value of the field `phase` to the tokens at which the clamps apply.
_PHASES = {
    "both": ("prompt", "generated"), "prefill": ("prompt",), "decode": ("generated",),
}  # fmt: skip
_KINDS = ("absolute", "additive")
_GATED = (
    "in the fork, a server's monitor scales the gated clamps of all requests, and no monitor of "
    "vllm-scope does this; leave gated out, or give vllm_scope.SetFeature a gate"
)


@dataclass(frozen=True)
class _Clamp:
    index: int
    value: float
    add: bool
    only_if_active: bool


@dataclass(frozen=True)
class Asked:
    """One SetFeature that a request asks for.

    Attributes:
        module: the SAE's name.
        place: the place where the caller clamps features of the SAE.
        words: the caller's names of the edit and of the edit's fields, for error texts.
    """

    edit: SetFeature
    module: str
    place: Place
    words: dict[str, str]


#: Maps (name of an SAE, place) to the clamps of this SAE at this place. The clamps are a dict from
#: tokens ("prompt" or "generated") to a dict from each clamp to the clamp's path in the body.
_Grouped = dict[tuple[str, Place], dict[str, dict[_Clamp, str]]]


def features_of(body: object, sites: Sites, room: Room) -> list[Asked]:
    """Translate the value of `sae_clamp_specs` to SetFeatures.

    Args:
        room: counts the edits of the request.

    Raises:
        SpecError: a value has a wrong form or too many items, or a SetFeature cannot express a
            clamp.
    """
    specs = parsed(body, KEY)
    if specs is None:
        return []
    if not isinstance(specs, list | tuple):
        raise SpecError(f"{KEY} is {shown(specs)}; it must be a list of objects.")
    few(specs, MOST["edits"], "objects", KEY)
    groups: _Grouped = {}
    for i, spec in enumerate(specs):
        _group(spec, f"{KEY}[{i}]", groups, sites, room)
    return [asked for at, tiers in groups.items() for asked in _edits(*at, tiers)]


def check_places(asked: Iterable[Asked], saes: Mapping[str, Any]) -> None:
    """Raise SpecError if the caller clamps features at a boundary other than the SAE's boundary.

    Args:
        saes: the SAEs that the engine holds, by name. This check ignores a name that is not in
            `saes`, because the check of SetFeature refuses this name.
    """
    for one in asked:
        sae = saes.get(one.module)
        if sae is not None and sae.place.boundary != one.place.boundary:
            raise SpecError(
                f"{one.words['']} is {one.place.site!r} {one.place.layer}, and the SAE "
                f"{shown(one.module)} is of {sae.place.site!r} {sae.place.layer}; clamp its "
                "features there."
            )


def _group(spec: object, where: str, groups: _Grouped, sites: Sites, room: Room) -> None:
    """Add the clamps of one object of `sae_clamp_specs` to `groups`."""
    fields = few_fields(spec, 4, "fields", where)
    check_fields(fields, ("module_name", "clamps"), ("phase", "gated"), where)
    name = checked_name(fields["module_name"], f"{where}.module_name")
    phase = fields.get("phase", "both")
    if not isinstance(phase, str) or phase not in _PHASES:
        raise SpecError(f"{where}.phase is {shown(phase)}; it must be {' or '.join(_PHASES)}.")
    if fields.get("gated", False) is not False:
        raise SpecError(f"{where}.gated is {shown(fields['gated'])}: {_GATED}.")
    for hook, layers in few_fields(fields["clamps"], len(HOOKS), "hooks", where).items():
        path = f"{where}.clamps[{hook!r}]"
        site = site_of(hook, f"{where}.clamps")
        for layer, entries in few_fields(layers, sites.num_layers, "layers", path).items():
            at = f"{path}[{layer!r}]"
            place = Place(site, layer_of(layer, at))
            room.take("edits", 1, at)
            if not isinstance(entries, list | tuple):
                raise SpecError(f"{at} is {shown(entries)}; it must be a list of clamps.")
            few(entries, MAX_FEATURES, "features", at)
            tiers = groups.setdefault((name, place), {})
            for n, entry in enumerate(entries):
                clamp = _clamp(entry, f"{at}[{n}]")
                for tokens in _PHASES[phase]:
                    _put(tiers.setdefault(tokens, {}), clamp, f"{at}[{n}]")


def _put(tier: dict[_Clamp, str], clamp: _Clamp, path: str) -> None:
    for other, there in tier.items():
        if other.index == clamp.index:
            raise SpecError(
                f"{path}.feature_idx is {clamp.index}, which {there} clamps too, on the same "
                "tokens; clamp a feature once."
            )
    tier[clamp] = path
    few(list(tier), MAX_FEATURES, "features, with the other clamps of this SAE at this place", path)


def _clamp(entry: object, where: str) -> _Clamp:
    fields = few_fields(entry, 4, "fields", where)
    check_fields(fields, ("feature_idx", "kind", "value"), ("only_if_active",), where)
    index, kind = fields["feature_idx"], fields["kind"]
    if type(index) is not int or index < 0:
        raise SpecError(f"{where}.feature_idx is {shown(index)}; it must be a whole number from 0.")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise SpecError(f"{where}.kind is {shown(kind)}; it must be {' or '.join(_KINDS)}.")
    active = checked_flag(fields.get("only_if_active", False), f"{where}.only_if_active")
    return _Clamp(index, number_of(fields["value"], f"{where}.value"), kind == "additive", active)


def _edits(module: str, place: Place, tiers: Mapping[str, dict[_Clamp, str]]) -> Iterator[Asked]:
    """Yield one SetFeature for all tokens, or one per phase if the clamps of the phases differ."""
    prompt, generated = (tiers.get(tokens, {}) for tokens in _PHASES["both"])
    same = set(prompt) == set(generated)
    by_tokens = {"all": prompt} if same else {"prompt": prompt, "generated": generated}
    for tokens, clamps in by_tokens.items():
        if not clamps:
            continue
        at = next(iter(clamps.values())).rpartition("[")[0]
        spec = at[: at.index("]") + 1]
        words = {"": at, ".sae": f"{spec}.module_name", ".index": at, ".value": at}
        with called({f"SetFeature{ours}": theirs for ours, theirs in words.items()}):
            edit = SetFeature(
                module,
                [one.index for one in clamps],
                [one.value for one in clamps],
                add=[one.add for one in clamps],
                only_if_active=[one.only_if_active for one in clamps],
                site=place.site,
                layer=place.layer,
                tokens=tokens,
            )
        yield Asked(edit, module, place, words)
