"""Translates the steering fork's keys to actions, and loads steering modules at run time.

Owns:  `translate`, `load_modules`.
Runs:  in the front-end.
From:  vectors, gates, features and capture, in the same folder as this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from vllm_scope.compat.bounds import Room, parsed
from vllm_scope.compat.steering_http.capture import decorate, reads_of
from vllm_scope.compat.steering_http.features import check_places, features_of
from vllm_scope.compat.steering_http.gates import gated
from vllm_scope.compat.steering_http.vectors import clamps_of, stacked, vectors_of, words_of
from vllm_scope.engine.frontend.translators import Translation, called, named
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import Add, Edit
from vllm_scope.request.sites import Sites
from vllm_scope.vectors import load_vectors, to_bytes
from vllm_scope.vectors.hooks import REQUEST_TIERS, number_of, tiers

if TYPE_CHECKING:
    from vllm import LLM

#: Maps each key that is not supported to the reason and the alternative, for the error text.
REFUSED = {
    "sae_full_reconstruction_specs": "this version cannot replace a row by its reconstruction; "
    "vllm_scope.Replace replaces a row by a row of another run",
    "patch": "to patch, use vllm_scope.Replace with the rows of a Read",
    "patch_vectors": "to patch, use vllm_scope.Replace with the rows of a Read",
}


def translate(values: Mapping[str, object], sites: Sites) -> Translation:
    """Translate the fork's keys of one request to edits and Reads.

    Raises:
        SpecError: a value has a wrong form, or a key is not supported.
    """
    for key, instead in REFUSED.items():
        if values.get(key) is not None:
            raise SpecError(f"{key} cannot be met: {instead}.")
    room = Room()
    edits: list[tuple[Edit, dict[str, str]]] = _module(values)
    for key, tokens in REQUEST_TIERS.items():
        adds = stacked(vectors_of(values.get(key), key, sites, room), tokens)
        edits += [(add, words_of(add, key)) for add in adds]
    edits += gated(values.get("steering"), sites, room)
    # As in the fork, clamps apply after all vectors are added.
    for key, tokens in tiers("steering_clamps").items():
        clamps = clamps_of(values.get(key), tokens, key, sites, room).values()
        edits += [(clamp, words_of(clamp, key)) for some in clamps for clamp in some]
    features = features_of(values.get("sae_clamp_specs"), sites, room)
    edits += [(one.edit, one.words) for one in features]
    reads = reads_of(values.get("capture"), sites, room)
    actions = (*(edit for edit, _ in edits), *(read for read, _ in reads))
    consumers = tuple(dict.fromkeys(read.to for read, _ in reads))
    decorator = partial(decorate, consumers=consumers) if reads else None
    check = partial(check_places, features) if features else None
    return Translation(actions, decorator, check=check, paths=named([*edits, *reads]))


def _module(values: Mapping[str, object]) -> list[tuple[Edit, dict[str, str]]]:
    """The edit of the key `steering_module_ref` or `steering_name`; [] without such a key.

    The value of the key is (name, scale) or a name.
    """
    given = [k for k in ("steering_module_ref", "steering_name") if values.get(k) is not None]
    if not given:
        return []
    if len(given) > 1:
        raise SpecError("steering_module_ref and steering_name mean the same; give one of them.")
    where, ref = given[0], values[given[0]]
    if isinstance(ref, str) and ref.startswith("["):
        ref = parsed(ref, where)
    pair = (ref, 1.0) if isinstance(ref, str) else ref
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise SpecError(f"{where} is {shown(ref)}; it must be (name, scale).")
    with called({"Add.vector": where, "Add.scale": f"{where}[1]"}):
        return [(Add(pair[0], scale=number_of(pair[1], f"{where}[1]")), {"": where})]


def load_modules(llm: LLM, modules: Iterable[str]) -> dict[str, str]:
    """Register steering modules with a running engine, in place of the fork's `--steering-modules`.

    Args:
        modules: strings of the form "name=path". `vllm_scope.vectors.load_vectors` reads the file
            at the path, such as the fork's JSON. If the engine already has a steering module of
            this name, later requests get the new content.

    Returns:
        The digests of the steering modules' contents, by name.

    Raises:
        SpecError: an item is not name=path, or the content of a file does not fit this model.
    """
    digests = {}
    for module in modules:
        name, equals, path = module.partition("=")
        if not equals or not name or not path:
            raise SpecError(f"{shown(module)} is not name=path.")
        data = to_bytes(load_vectors(path))
        digests[name] = llm.collective_rpc("scope_register", args=(name, data))[0]
    return digests
