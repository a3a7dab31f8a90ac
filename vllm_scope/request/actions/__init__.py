"""The actions of a request: reads, probes, features, lenses, sums of rows, and edits.

Owns:  Read, Probe, Features, LensTopK, Moments, Gate, Policy, and the edits.
Runs:  in every process, with numpy and without torch.
To:    spec (all actions of a request), resolve (resolves actions for one engine).

base.py         the fields that all actions share, and their JSON
delivering.py   Read
probing.py      Probe
gates.py        Gate, a condition on an edit
states.py       Ema, Latch, Hysteresis, Pid: the states of gates
edits.py        Add, Ablate, Clamp, Replace
features.py     SetFeature, ScaleFeature
sparse.py       Features
lens.py         LensTopK
summing.py      Moments
policy.py       Policy, the name of an operator's code that acts between tokens

Every edit is an update of a token's row x (`.` is the dot product):

    Add       x + scale * v            norm_match: x + scale * ||x|| * v / ||v||
    Ablate    x - (x.d) * d            d: the vector at length 1
    Clamp     x + strength * (clip(x.d, lo, hi) - x.d) * d
    Replace   v                        v: the given row for this position
    SetFeature, ScaleFeature           set or scale an SAE's feature in x

If the edit has a gate with the value g, the change of x is multiplied by g. Edits of one site apply
in the order of the request. Reads and probes get the row after the edits of their site. Gates, and
reads with `when="before"`, get the row before the edits of their site.
"""

from __future__ import annotations

from typing import Any

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import (
    MAX_FLOAT32,
    MAX_NAME,
    MEMORY,
    Action,
    Module,
    without,
)
from vllm_scope.request.actions.delivering import Read
from vllm_scope.request.actions.edits import Ablate, Add, Clamp, Edit, Replace
from vllm_scope.request.actions.features import FeatureRows, ScaleFeature, SetFeature
from vllm_scope.request.actions.gates import Gate
from vllm_scope.request.actions.lens import LensTopK
from vllm_scope.request.actions.policy import Policy
from vllm_scope.request.actions.probing import Probe
from vllm_scope.request.actions.sparse import EncoderRows, Features, HeldSae
from vllm_scope.request.actions.states import Hysteresis, Latch, Pid
from vllm_scope.request.actions.summing import Moments
from vllm_scope.request.sites import SITES

__all__ = [
    "EDITS", "KINDS", "MAX_FLOAT32", "MAX_NAME", "MEMORY",
    "Ablate", "Action", "Add", "Clamp", "Edit", "EncoderRows", "FeatureRows", "Features", "Gate",
    "HeldSae", "Hysteresis", "Latch", "LensTopK", "Module", "Moments", "Pid", "Policy", "Probe",
    "Read", "Replace", "ScaleFeature", "SetFeature",
    "action_from_json",
]  # fmt: skip

#: The class of each action, by its `kind`.
KINDS: dict[str, type[Any]] = {
    action.kind: action
    for action in (
        Read,
        Probe,
        Features,
        LensTopK,
        Moments,
        Add,
        Ablate,
        Clamp,
        Replace,
        SetFeature,
        ScaleFeature,
    )
}
EDITS = {kind: action for kind, action in KINDS.items() if issubclass(action, Edit)}


def action_from_json(cls: type[Any], body: object, where: str) -> Any:
    """Parse one action from its JSON form.

    Raises:
        SpecError: the JSON is not a valid action. The text names the field (after `where`), the
            given value and the allowed values.
    """
    if not isinstance(body, dict):
        raise SpecError(f"{where} is {shown(body)}; it must be an object.")
    known = {"site", "layers", "tokens", *cls.fields} - ({"tokens"} if cls is Replace else set())
    unknown = sorted(set(body) - known, key=str)
    if unknown:
        raise SpecError(
            f"{where} has {shown(unknown[0])}; the fields are {', '.join(sorted(known))}."
        )
    if cls is Read and "site" not in body:  # all actions except Read have a default site
        raise SpecError(f"{where} has no 'site'; sites are {', '.join(SITES)}.")
    try:
        return cls(**body)
    except TypeError:
        # Unknown fields were refused above, and therefore a TypeError means that an argument is
        # missing.
        raise without(cls, body, where) from None
    except SpecError as error:
        text = str(error).replace(f"{cls.__name__} has no layer;", f"{where} has no layers;")
        raise SpecError(text.replace(f"{cls.__name__}.", f"{where}.", 1)) from None
