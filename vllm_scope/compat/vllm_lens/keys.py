"""Translates vllm-lens's keys of one request to actions, and makes `output.activations`.

Owns:  `translate`, Activations.
Runs:  in the front-end, before a request is checked and when the request's outputs are returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_scope.compat import PERSISTENT
from vllm_scope.compat.bounds import MOST, Room, check_vector, few, parsed
from vllm_scope.compat.vllm_lens.attention import qk_meta
from vllm_scope.compat.vllm_lens.hooks import Hook, HookRun, PersistentHooks
from vllm_scope.compat.vllm_lens.steering import FIELDS, SITE, SteeringVector, claimed_shape
from vllm_scope.engine.frontend.translators import Translation, called, give, named
from vllm_scope.errors import ScopeError, SpecError, shown
from vllm_scope.request.actions import Action, Add, Read
from vllm_scope.request.selectors import Except
from vllm_scope.request.sites import KINDS, Sites, kind_of
from vllm_scope.results.result import ScopeResult

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput

#: Maps each tensor of `output.activations` to the site of its rows.
_TENSORS = {"residual_stream": SITE, "attn_q": "q", "attn_k": "k"}


class Activations(Mapping[str, Any]):
    """`output.activations`, which stacks the rows of a requested tensor at each access.

    The tensors are on the CPU, in the model's dtype, with the layers in ascending order.
    residual_stream has the shape [n_layers, n_positions, hidden_size]. n_positions is
    n_prompt + n_generated - 1, or less while the request runs. attn_q and attn_k have the shape
    [n_layers, n_positions, heads, head_dim]. qk_layers has the layers of attn_q and attn_k, and
    qk_meta has the options of the attention kernels of these layers.

    Raises:
        KeyError: the caller accesses a tensor that the request did not ask for.
        ScopeError: the caller accesses a tensor, and rows of the request are missing.
    """

    def __init__(
        self, result: ScopeResult, sites: Sites, layers: list[int] | None,
        qk_layers: list[int] | None,
    ) -> None:  # fmt: skip
        self._result = result
        self._layers = {} if layers is None else {"residual_stream": layers}
        self._others: dict[str, Sequence[object]] = {}
        if qk_layers is not None:
            self._layers |= {"attn_q": qk_layers, "attn_k": qk_layers}
            meta = [qk_meta(sites, layer) for layer in qk_layers]
            self._others = {"qk_layers": qk_layers, "qk_meta": meta}

    def __getitem__(self, key: str) -> Any:
        if key in self._others:
            return self._others[key]
        if key not in self._layers:
            raise KeyError(f"{key!r} was not asked for; these activations hold {', '.join(self)}.")
        if self._result.status not in ("complete", "streaming"):
            raise ScopeError(
                f"{key} of this request is {self._result.status}: "
                f"{self._result.error or f'{self._result.dropped} rows are missing'}. "
                "The rows that have arrived are in output.outputs[0].scope."
            )
        rows = [self._result[_TENSORS[key], layer] for layer in self._layers[key]]
        # While a request streams, later pipeline stages can have delivered fewer rows.
        shortest = min(len(each) for each in rows)
        return torch.stack([each[:shortest] for each in rows])

    def __iter__(self) -> Iterator[str]:
        return iter((*self._layers, *self._others))

    def __len__(self) -> int:
        return len(self._layers) + len(self._others)


def translate(values: Mapping[str, object], sites: Sites) -> Translation:
    """Translate vllm-lens's keys of one request to actions and hooks.

    Raises:
        SpecError: a key has a wrong value, or this engine does not support the key.
    """
    of_all, own = values.get(PERSISTENT), _hooks(values.get("apply_hooks"))
    run = _run(of_all.hooks if isinstance(of_all, PersistentHooks) else (), own, sites)
    said = _steering(values.get("apply_steering_vectors"), sites)
    if run is not None:
        _check_order(run, [action for action, _ in said])
    layers = _layers(values, "output_residual_stream", sites)
    qk_layers = _layers(values, "output_qk", sites)
    if layers is not None:
        said.append(_named(Read(SITE, layers=layers), "output_residual_stream"))
    if qk_layers is not None:
        _check_tapped(sites)
        said += [_named(Read(site, layers=qk_layers), "output_qk") for site in ("q", "k")]
    if run is not None and not said:
        of_no_token = Read(SITE, tokens=Except("prompt", "prompt"))
        said.append(_named(of_no_token, "apply_hooks"))

    def decorate(output: RequestOutput, completion: CompletionOutput) -> None:
        if layers is not None or qk_layers is not None:
            found = Activations(completion.scope, sites, layers, qk_layers)
            give(output, completion, "activations", found)
        if run is not None and own:
            give(output, completion, "hook_results", run.results(completion.index))
        if run is not None and isinstance(of_all, PersistentHooks):
            alone = len(output.outputs) == 1
            name = output.request_id if alone else f"{completion.index}_{output.request_id}"
            of_all.results[name] = run.results(completion.index, of_all=True)

    return Translation(tuple(action for action, _ in said), decorate, run, named(said))


def _named(read: Read, key: str) -> tuple[Action, dict[str, str]]:
    """A Read for `key`, and the names of the Read's fields in error texts."""
    return read, dict.fromkeys(("", ".layers", ".site"), key)


def _hooks(asked: object) -> list[Hook]:
    asked = parsed(asked, "apply_hooks")
    if not asked:
        return []
    if not isinstance(asked, list | tuple) or not all(isinstance(hook, Hook) for hook in asked):
        raise SpecError(
            f"apply_hooks is {shown(asked)}; it must be a list of Hook. Their functions are "
            "arbitrary code of this process, and a server runs none. With a server, use Read, "
            "Probe, Add, Ablate, Clamp and Replace of vllm_scope; docs/faces.md has one for each "
            "use."
        )
    return list(asked)


def _run(of_all: Sequence[Hook], own: Sequence[Hook], sites: Sites) -> HookRun | None:
    for hook in (*of_all, *own):
        if not 0 <= min(hook.layer_indices) <= max(hook.layer_indices) < sites.num_layers:
            raise SpecError(
                f"Hook.layer_indices is {shown(hook.layer_indices)}; this model has layers 0 to "
                f"{sites.num_layers - 1}."
            )
    return HookRun(of_all, own) if of_all or own else None


def _check_order(run: HookRun, adds: list[Action]) -> None:
    """Raise SpecError if a hook after a layer would not see a steering vector of this layer."""
    steered = {layer for add in adds if isinstance(add, Add) for layer in add.layer_numbers or ()}
    both = sorted(layer for layer, before in run.places if not before and layer in steered)
    if both:
        raise SpecError(
            f"layers {both} have both a steering vector and a hook after them; here such a hook "
            "runs first, and would not see the vector. Add the vector in the hook."
        )


def _check_tapped(sites: Sites) -> None:
    kinds = {kind_of(boundary) for boundary in sites.readable}
    if not kinds >= {KINDS.index("q"), KINDS.index("k")}:
        raise SpecError(
            "output_qk is asked for, and this engine does not tap queries and keys; start it with "
            "additional_config={'scope': {'sites': ['embed', 'resid_post', 'q', 'k']}}."
        )


def _layers(values: Mapping[str, object], key: str, sites: Sites) -> list[int] | None:
    asked = parsed(values.get(key), key)
    if asked is None or (isinstance(asked, int) and asked == 0):
        return None
    # vLLM turns the booleans in `vllm_xargs` into numbers.
    if isinstance(asked, int) and asked == 1:
        # All layers of the model. An engine that does not tap all layers refuses the request.
        return list(range(sites.num_layers))
    few(asked, sites.num_layers, "layers", key)
    if not isinstance(asked, list | tuple) or not asked:
        raise SpecError(
            f"{key} is {shown(asked)}; it must be True for all layers, a list of layers, or False "
            "for none."
        )
    with called({"Read.layers": key}):
        Read(SITE, layers=list(asked))
    return sorted(set(asked))


def _steering(asked: object, sites: Sites) -> list[tuple[Action, dict[str, str]]]:
    """The Adds for `apply_steering_vectors`, each with the names of its fields in error texts."""
    key, room = "apply_steering_vectors", Room()
    asked = parsed(asked, key)
    if asked is None:
        return []
    few(asked, MOST["edits"], "vectors", key)
    if not isinstance(asked, list | tuple):
        raise SpecError(
            f"{key} is {shown(asked)}; it must be a list of SteeringVector, or its JSON."
        )
    for i, vector in enumerate(asked):
        _check_size(vector, sites, room, f"{key}[{i}]")
    return [one for i, vector in enumerate(asked) for one in _adds(vector, f"{key}[{i}]")]


def _adds(given: object, where: str) -> list[tuple[Action, dict[str, str]]]:
    """The Adds for a SteeringVector or for its JSON, each with its fields' names in error texts."""
    words = dict.fromkeys((".layers", ".site"), f"{where}.layer_indices")
    words |= {"": where, ".vector": f"{where}.activations", ".tokens": f"{where}.position_indices"}
    with called({"SteeringVector": where} | {f"Add{end}": path for end, path in words.items()}):
        vector = SteeringVector.model_validate(given)
        actions = vector.to_actions()
    if vector.position_indices is None:
        most = vector.num_edits - 1
        words[".tokens"] += f", which is 0 to {most} as it was left out,"
    return [(action, words) for action in actions]


def _check_size(vector: object, sites: Sites, room: Room, where: str) -> None:
    """Raise SpecError for JSON of a SteeringVector that does not fit this model.

    The check builds no array. Therefore a wrong size costs little memory.
    """
    if isinstance(vector, SteeringVector):
        room.take("edits", vector.num_edits, where)
        return
    if not isinstance(vector, Mapping):
        raise SpecError(f"{where} is {shown(vector)}; it must be a SteeringVector.")
    few(vector, len(FIELDS), "fields", where)
    few(vector.get("layer_indices"), sites.num_layers, "layers", f"{where}.layer_indices")
    positions = vector.get("position_indices")
    if isinstance(positions, list | tuple):
        room.take("positions", len(positions), f"{where}.position_indices")
    values, path = vector.get("activations"), f"{where}.activations"
    shape = claimed_shape(values)
    if shape is None or len(shape) not in (2, 3):
        return  # the constructor of SteeringVector raises the error
    if shape[-1] != sites.hidden_size:
        raise SpecError(
            f"{path} has {shape[-1]:,} numbers; this model's rows have {sites.hidden_size}."
        )
    if shape[0] > sites.num_layers:
        raise SpecError(f"{path} has {shape[0]:,} rows; this model has {sites.num_layers} layers.")
    num_positions = shape[1] if len(shape) == 3 else 1
    room.take("edits", num_positions, path)
    room.take("numbers", math.prod(shape), path)
    if isinstance(values, list | tuple):
        for i, row in enumerate(values):
            rows = row if len(shape) == 3 and isinstance(row, list | tuple) else [row]
            few(rows, num_positions, "positions", f"{path}[{i}]")
            for each in rows:
                check_vector(each, sites.hidden_size, room, f"{path}[{i}]")
