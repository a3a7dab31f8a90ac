"""The steering fork of vLLM (RhizoNymph/vllm): its steering and capture keys.

    SamplingParams(extra_args={
        "steering_vectors": {"post_block": {15: vector}},             # every token
        "prefill_steering_vectors": {"post_block": {15: vector}},     # the prompt's
        "decode_steering_vectors": {"pre_attn": {3: {"vector": [...], "scale": 2.0}}},
        "steering_module_ref": ("formal", 1.5),
    })

Hooks are pre_attn, post_attn and post_block; only those that the engine taps can be used
(`additional_config={"scope": {"sites": [...]}}`). Tiers add up. A tier's tokens are found by
position, so a prompt that is computed again after a preemption keeps its tier.

Steering modules are loaded with `load_modules(llm, ["formal=formal.json"])`, or at start
with `additional_config={"scope": {"modules": {...}}}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm_scope.actions import Action, Add, Read
from vllm_scope.arrays import Array
from vllm_scope.engine.translators import Translation
from vllm_scope.errors import SpecError, shown
from vllm_scope.sites import ALIASES, Sites
from vllm_scope.vectors import SteeringModule, load_vectors, to_bytes

#: Key -> the tokens of its tier, in the order in which tiers are added.
TIERS = {
    "steering_vectors": "all",
    "prefill_steering_vectors": "prompt",
    "decode_steering_vectors": "generated",
}
#: The words for positions of a capture.
POSITIONS = {
    "last_prompt": "last_prompt",
    "all_prompt": "prompt",
    "all_generated": "generated",
    "all": "all",
}


def translate(values: Mapping[str, Any], sites: Sites) -> Translation:
    """What the fork's keys of one request mean.

    Raises:
        SpecError: a value of a wrong form, or a capture.
    """
    actions: list[Action] = []
    for key, tokens in TIERS.items():
        if values.get(key) is not None:
            actions += _tier(values[key], tokens, f"extra_args[{key!r}]")
    if values.get("steering_module_ref") is not None:
        actions.append(_module(values["steering_module_ref"]))
    if values.get("capture") is not None:
        reads_of(values["capture"])
        raise SpecError(
            "extra_args['capture'] asks for files, and this version has no filesystem sink yet. "
            "Read the rows with vllm_scope.Read and take them from output.scope, or write them "
            "with vllm_scope.files."
        )
    return Translation(tuple(actions))


def _tier(body: Any, tokens: str, where: str) -> list[Action]:
    """One Add per hook: {hook: {layer: vector | {"vector": ..., "scale": ...}}}."""
    actions: list[Action] = []
    for hook, by_layer in _mapping(_parsed(body, where), where, "hook").items():
        _check_hook(hook, where)
        place = f"{where}[{hook!r}]"
        vectors: dict[int, np.ndarray] = {}
        for layer, entry in _mapping(by_layer, place, "layer").items():
            number = _layer(layer, place)
            if number in vectors:
                raise SpecError(f"{place} has layer {number} twice.")
            vectors[number] = _vector(entry, f"{place}[{layer!r}]")
        sizes = {len(vector) for vector in vectors.values()}
        if len(sizes) > 1:
            raise SpecError(f"{place} has vectors of {sorted(sizes)} numbers; all are of one size.")
        actions.append(
            Add(np.stack(list(vectors.values())), ALIASES[hook], list(vectors), tokens=tokens)
        )
    return actions


def _vector(entry: Any, where: str) -> np.ndarray:
    """float32 [hidden_size], its scale multiplied in."""
    scale: Any = 1.0
    if isinstance(entry, Mapping) and "vector" in entry:
        unknown = set(entry) - {"vector", "scale"}
        if unknown:
            raise SpecError(f"{where} has {shown(min(unknown))}; its fields are vector and scale.")
        scale, entry = entry.get("scale", 1.0), entry["vector"]
    found = Array.parse(entry, where)
    if len(found.shape) != 1:
        raise SpecError(f"{where} has shape {found.shape}; it is one vector, [hidden_size].")
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise SpecError(f"{where}.scale is {shown(scale)}; it is a number.")
    return found.numpy * np.float32(scale)


def _module(ref: Any) -> Action:
    """(name, scale), or a name alone."""
    where = "extra_args['steering_module_ref']"
    if isinstance(ref, str) and ref.startswith("["):
        ref = _parsed(ref, where)
    name, scale = (ref, 1.0) if isinstance(ref, str) else _pair(ref, where)
    return Add(name, scale=scale)


def _pair(ref: Any, where: str) -> tuple[str, float]:
    if not isinstance(ref, list | tuple) or len(ref) != 2 or not isinstance(ref[0], str):
        raise SpecError(f"{where} is {shown(ref)}; it is (name, scale).")
    return ref[0], ref[1]


def reads_of(capture: Any) -> list[Read]:
    """What a capture reads: {"filesystem": {hooks: {hook: [layers]}, positions, ...}}.

    Raises:
        SpecError: another consumer than `filesystem`, or a value of a wrong form.
    """
    where = "extra_args['capture']"
    body = _mapping(_parsed(capture, where), where, "consumer")
    if set(body) != {"filesystem"}:
        raise SpecError(f"{where} has {shown(sorted(body))}; the consumer here is 'filesystem'.")
    place = f"{where}['filesystem']"
    wanted = _mapping(body["filesystem"], place, "field")
    unknown = set(wanted) - {"request_id", "tag", "hooks", "positions"}
    if unknown or "hooks" not in wanted:
        raise SpecError(
            f"{place} has {shown(sorted(wanted))}; its fields are hooks, positions, request_id "
            "and tag."
        )
    positions = wanted.get("positions", "last_prompt")
    if isinstance(positions, str):
        if positions not in POSITIONS:
            raise SpecError(
                f"{place}['positions'] is {shown(positions)}; it is one of "
                f"{', '.join(POSITIONS)}, or a list of positions."
            )
        positions = POSITIONS[positions]
    reads = []
    for hook, layers in _mapping(wanted["hooks"], f"{place}['hooks']", "hook").items():
        _check_hook(hook, f"{place}['hooks']")
        reads.append(Read(ALIASES[hook], layers, tokens=positions))
    return reads


def load_module(path: str | Path) -> SteeringModule:
    """A steering module from {hook: {layer: vector | {"vector", "scale"}}} in JSON.

    Other files are read by `vllm_scope.vectors.load_vectors`: safetensors, npz, GGUF.

    Raises:
        SpecError: another form. A module has one tier; vectors of the prefill and decode
            tiers go into requests, or into modules of their own.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if path.suffix != ".json":
        return load_vectors(path)
    body = _mapping(_parsed(path.read_text(encoding="utf-8"), str(path)), str(path), "hook")
    tiers = sorted(set(body) & {*TIERS, "vectors", "prefill_vectors", "decode_vectors"})
    if tiers in (["vectors"], ["steering_vectors"]):
        body = body[tiers[0]]
    elif tiers:
        raise SpecError(
            f"{path} has the tiers {', '.join(tiers)}; a steering module here is added to every "
            "token. Put the vectors of a phase into requests, as prefill_steering_vectors and "
            "decode_steering_vectors."
        )
    vectors = {}
    for action in _tier(body, "all", str(path)):
        assert isinstance(action, Add)
        for layer, vector in zip(action.layer_numbers or (), action.vector.numpy, strict=True):
            vectors[action.site, layer] = vector
    return SteeringModule(vectors)


def load_modules(llm: Any, modules: Iterable[str]) -> dict[str, str]:
    """Register modules with a running engine, as `--steering-modules name=path` did.

    Args:
        llm: vllm.LLM.
        modules: "name=path" each. A name that is known already gets the new content,
            for requests that enter from then on.

    Returns:
        name -> digest of its content.

    Raises:
        SpecError: not name=path, or a file that is no module of this model.
    """
    digests = {}
    for module in modules:
        name, equals, path = module.partition("=")
        if not equals or not name or not path:
            raise SpecError(f"{shown(module)} is not name=path.")
        data = to_bytes(load_module(path))
        digests[name] = llm.collective_rpc("scope_register", args=(name, data))[0]
    return digests


def _parsed(body: Any, where: str) -> Any:
    if not isinstance(body, str):
        return body
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where} is not JSON: {error}.") from None


def _mapping(body: Any, where: str, keys: str) -> dict[Any, Any]:
    if not isinstance(body, Mapping) or not body:
        raise SpecError(f"{where} is {shown(body)}; it is an object with one {keys} or more.")
    return dict(body)


def _check_hook(hook: Any, where: str) -> None:
    if hook not in ALIASES:
        raise SpecError(f"{where} has {shown(hook)}; hooks are {', '.join(ALIASES)}.")


def _layer(layer: Any, where: str) -> int:
    """JSON's keys are strings."""
    if isinstance(layer, str) and layer.isdecimal():
        return int(layer)
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
        raise SpecError(f"{where} has {shown(layer)}; layers are whole numbers from 0.")
    return layer
