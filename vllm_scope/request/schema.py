"""The JSON Schema of a spec.

Owns:  `spec_schema`.
Runs:  in every process. No torch.
From:  the parser's classes, limits and words.

Promise: a spec that `scope(...)` makes is valid. A spec of a wrong form, which the parser refuses,
is also invalid by the schema. The form is wrong if a value has a wrong type, a field or word is
unknown, a field is missing, or a list has too many or too few items.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vllm_scope.request.actions import (
    EDITS,
    KINDS,
    MAX_FLOAT32,
    MAX_NAME,
    Edit,
    EncoderRows,
    FeatureRows,
    Features,
    Gate,
    LensTopK,
    Moments,
    Probe,
    Read,
)
from vllm_scope.request.actions.features import MAX_FEATURES
from vllm_scope.request.actions.policy import Policy
from vllm_scope.request.actions.sparse import MAX_INDICES, MAX_TOP_K
from vllm_scope.request.actions.states import STATES
from vllm_scope.request.arrays import DTYPES, MAX_NUMBERS
from vllm_scope.request.heads import READ_CODECS
from vllm_scope.request.nets import (
    AGGREGATES,
    HIDDEN,
    MAX_HIDDEN_LAYERS,
    MAX_WINDOW,
    AttentionPool,
    Mlp,
)
from vllm_scope.request.selectors import FAR, MAX_ITEMS, MAX_PARTS, WORDS
from vllm_scope.request.sites import (
    ALIASES,
    EDIT_SITES,
    LENS_SITES,
    MAX_LAYER,
    MAX_LAYERS,
    MODEL_SITES,
    SITES,
    STREAM_SITES,
)
from vllm_scope.request.spec import MOST

Schema = dict[str, Any]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _whole(least: int | None = None) -> Schema:
    return {"type": "integer", "minimum": 1 - FAR if least is None else least, "maximum": FAR - 1}


def _list(items: Schema, most: int, least: int = 1, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def _tuple(*items: Schema) -> Schema:
    return {**_list({}, len(items), len(items)), "prefixItems": list(items), "items": False}


def _object(required: list[str], properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_NULL = {"type": "null"}
_NUMBER = {"type": "number", "minimum": -MAX_FLOAT32, "maximum": MAX_FLOAT32}
_NAME = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
_MODULE = _any(_NAME, _object(["module"], {"module": _NAME}))
_LAYER = {"type": "integer", "minimum": 0, "maximum": MAX_LAYER - 1}


def _said(cls: type[Any], schema: Schema) -> Schema:
    """The schema, described by the first line of the class's docstring."""
    return {"description": (cls.__doc__ or "").partition("\n")[0], **schema}


def _array(least: int, most: int) -> Schema:
    """The schema of an array of numbers with `least` to `most` dimensions."""
    rows = _NUMBER
    nested = [rows := _list(rows, MAX_NUMBERS) for _ in range(most)]
    size = {"type": "integer", "minimum": 1, "maximum": MAX_NUMBERS}
    packed = {
        "dtype": {"enum": list(DTYPES)},
        "shape": _list(size, most, least),
        "data": {"type": "string", "contentEncoding": "base64", "pattern": _BASE64},
    }
    return _any(_object(list(packed), packed), *nested[least - 1 :])


def _definitions() -> Schema:
    """The schemas that several fields use, by name."""
    end, codecs = _any(_whole(), _NULL), []
    for name, options in READ_CODECS.items():
        given: Schema = {option: {"type": "integer"} for option in options}
        codecs.append(_object(["name"], {"name": {"const": name}, **given}))
    return {
        "array": _array(1, 3),
        "vector": _any(_MODULE, _ref("array")),
        **_of_probes(),
        "gate": _any(_NULL, _gate()),
        "sae": _features(),
        "encoder": _encoder(),
        "of_features": _any(_NUMBER, _list(_NUMBER, MAX_FEATURES)),
        "flags": _any({"type": "boolean"}, _list({"type": "boolean"}, MAX_FEATURES)),
        "codec": _any(_NULL, {"enum": list(READ_CODECS)}, *codecs),
        "layers": _any(_NULL, {"const": "all"}, _LAYER, _list(_LAYER, MAX_LAYERS)),
        "tokens": _any(
            {"enum": list(WORDS)},
            _whole(),
            _list(_whole(), MAX_ITEMS),
            _object(["slice"], {"slice": _tuple(end, end, _any(_whole(1), _NULL))}),
            _object(["token_ids"], {"token_ids": _list(_whole(0), MAX_ITEMS)}),
            _object(["union"], {"union": _list(_ref("tokens"), MAX_PARTS)}),
            _object(["except"], {"except": _list(_ref("tokens"), 2, 2)}),
        ),
    }


def _features() -> Schema:
    rows, numbers = _array(2, 2), _any(_NUMBER, _list(_NUMBER, MAX_FEATURES))
    least = {"minimum": 0}
    thresholds = _any(_NUMBER | least, _list(_NUMBER | least, MAX_FEATURES))
    given = {"encoder": rows, "decoder": rows, "bias": numbers, "threshold": thresholds}
    return _any(_NAME, _said(FeatureRows, _object(list(given), given)))


def _encoder() -> Schema:
    given = {"encoder": _array(2, 2), "bias": _array(1, 1), "threshold": _array(1, 1)}
    return _any(_NAME, _said(EncoderRows, _object(list(given), given)))


def _gate() -> Schema:
    hints = get_type_hints(Gate)
    aliases = [alias for alias, site in ALIASES.items() if site in STREAM_SITES]
    given: Schema = {
        "vector": _array(1, 1),
        "layer": _any(_NULL, _LAYER),
        "site": {"enum": [*STREAM_SITES, *aliases]},
        "threshold": _NUMBER | {"default": 0.0},
        "sharpness": _NUMBER | {"exclusiveMinimum": 0},
        "state": _any(_NULL, *(_state(kind, cls) for kind, cls in STATES.items())),
    }
    for each in fields(Gate):
        if each.init:
            found = given.get(each.name) or dict(_of_type(hints[each.name]))
            given[each.name] = found
            if each.default is not MISSING and each.default is not None:
                found["default"] = each.default
    embed = {"properties": {"site": {"const": "embed"}}, "required": ["site"]}
    else_ = {"required": ["layer"], "properties": {"layer": {"not": _NULL}}}
    return _said(Gate, _object(["vector"], given)) | {"if": embed, "then": {}, "else": else_}


def _state(kind: str, cls: Any) -> Schema:
    hints, some = get_type_hints(cls), fields(cls)
    given = {one.name: _OF_STATES.get(one.name) or _of_type(hints[one.name]) for one in some}
    required = ["kind", *(one.name for one in some if one.default is MISSING)]
    return _said(cls, _object(required, {"kind": {"const": kind}, **given}))


def _of_probes() -> Schema:
    """The schemas of the weights and aggregates of probes, by name."""
    both = {"query": _array(1, 2), "value": _array(1, 2)}
    layers = _list(_tuple(_array(2, 2), _array(1, 1)), MAX_HIDDEN_LAYERS + 1, 2)
    decay = _OF_STATES["decay"]
    window = {"type": "integer", "minimum": 1, "maximum": MAX_WINDOW}
    shaped = [_ref("mlp"), _ref("attention")]
    hidden = {"enum": list(HIDDEN), "default": Mlp.hidden}
    return {
        "mlp": _said(Mlp, _object(["mlp"], {"mlp": layers, "hidden": hidden})),
        "attention": _said(
            AttentionPool, _object(["attention"], {"attention": _object(list(both), both)})
        ),
        "weight": _any(_MODULE, _array(1, 2), *shaped, *(_list(one, MAX_LAYERS) for one in shaped)),
        "aggregate": _any(
            _NULL,
            {"enum": list(AGGREGATES)},
            _object(["ema"], {"ema": decay}),
            _object(["rolling_mean"], {"rolling_mean": window, "then": {"enum": [None, "max"]}}),
        ),
    }


#: Schemas of those fields of states whose type annotation does not say which values are allowed.
_OF_STATES: dict[str, Schema] = {
    "decay": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "most_sum": _any(_NULL, _NUMBER | {"minimum": 0}),
}
#: Schemas of those fields of actions whose type annotation does not say which values are allowed.
_FIELDS = {
    "tokens": _ref("tokens"),
    "layers": _ref("layers"),
    "codec": _ref("codec"),
    "weight": _ref("weight"),
    "aggregate": _ref("aggregate"),
    "vector": _ref("vector"),
    "gate": _ref("gate"),
    "sae": _ref("sae"),
    "encoder": _ref("encoder"),
    "index": _any(_NULL, _whole(0), _list(_whole(0), MAX_FEATURES)),
    "value": _ref("of_features"),
    "factor": _ref("of_features"),
    "top_k": _any(_NULL, {"type": "integer", "minimum": 1, "maximum": MAX_TOP_K}),
    "count": {"type": "integer", "minimum": 1, "maximum": MAX_TOP_K},
    "indices": _any(_NULL, _whole(0), _list(_whole(0), MAX_INDICES, uniqueItems=True)),
    "add": _ref("flags"),
    "only_if_active": _ref("flags"),
    "max_relative_norm": _any(_NULL, _NUMBER | {"minimum": 0}),
    "direction": _ref("vector"),
    "values": _ref("array"),
    "positions": _any(_whole(), _list(_whole(), MAX_ITEMS, uniqueItems=True)),
    "strength": _NUMBER | {"minimum": 0, "maximum": 1},
}


def _of_type(hint: Any) -> Schema:
    if get_origin(hint) in (UnionType, Union):  # `Literal[...] | None` is a Union
        return _any(*map(_of_type, get_args(hint)))
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    plain: dict[Any, Schema] = {
        float: _NUMBER,
        bool: {"type": "boolean"},
        str: _NAME,
        NoneType: _NULL,
    }
    return plain[hint]


def _action(cls: Any) -> Schema:
    hints, properties, required = get_type_hints(cls), {}, []
    if issubclass(cls, Edit):
        properties["kind"] = {"const": cls.kind}
        required.append("kind")
    for each in fields(cls):
        name = each.name
        if not each.init or name == "layer":  # the JSON form has the field `layers` only
            continue
        if name == "site":
            sites = _sites_of(cls)
            aliases = [alias for alias, site in ALIASES.items() if site in sites]
            properties[name] = {"enum": [*sites, *aliases]}
        else:
            named = {(Features, "sae"): "encoder", (LensTopK, "top_k"): "count"}.get(
                (cls, name), name
            )
            properties[name] = dict(_FIELDS.get(named) or _of_type(hints[name]))
        if each.default is MISSING or (cls, name) == (Probe, "name"):
            required.append(name)
        elif each.default not in (None, ""):
            properties[name]["default"] = each.default
    return {
        **_said(cls, _object(required, properties)),
        "if": {"properties": {"site": {"enum": [*MODEL_SITES]}}, "required": ["site"]},
        "then": {"properties": {"layers": {"enum": [None, "all", 0, [0]]}}},
        "else": _layers_of(cls),
    }


def _sites_of(cls: Any) -> tuple[str, ...]:
    if cls is LensTopK:
        return LENS_SITES
    return EDIT_SITES if issubclass(cls, Edit) else SITES


def _layers_of(cls: Any) -> Schema:
    """The schema of an action's layers. The action's site has layers (it is not `embed` or
    `ln_final`)."""
    if cls in (Read, LensTopK, Moments):
        return {}
    if cls is Probe:
        return {"required": ["layers"], "properties": {"layers": {"not": {"enum": [None, "all"]}}}}
    if cls is Features:
        return {"properties": {"layers": {"not": {"const": "all"}}}}
    named = {"required": ["layers"], "properties": {"layers": {"not": _NULL}}}
    return _any(named, {"properties": {cls.fields[0]: _MODULE}})


def spec_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a spec, which is the text in `extra_args["scope"]`.

    The schema does not contain an engine's layers, sites and modules. The schema does not compare
    two fields, such as `lo` with `hi`, or a probe's weights with its layers. The parser makes these
    comparisons. Therefore the parser can refuse a spec that the schema accepts.
    """
    items = {
        "reads": _ref("read"), "probes": _ref("probe"), "edits": _any(*map(_ref, EDITS)),
        "features": _ref("features"), "lens": _ref("lens"), "moments": _ref("moments"),
    }  # fmt: skip
    lists = {name: _list(items[name], most, least=0) for name, most in MOST.items()}
    policy = _said(Policy, _object(["name"], {"name": _NAME, "options": {"type": "object"}}))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What one request reads, probes and edits",
        **_object([], lists | {"policy": policy}),
        **_any(*({"required": [n], "properties": {n: {"minItems": 1}}} for n in lists)),
        "$defs": _definitions() | {kind: _action(cls) for kind, cls in KINDS.items()},
    }
