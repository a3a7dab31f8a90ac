"""The JSON Schema of a spec.

Owns:  `spec_schema`.
Runs:  everywhere. No torch.
From:  the classes, limits and words that the parser itself uses.

Promise: a spec that `scope(...)` writes is valid. A spec whose shape the parser refuses is invalid:
a wrong type, an unknown or missing field, an unknown word, too many or too few items.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vllm_scope.request.actions import EDITS, KINDS, MAX_FLOAT32, MAX_NAME, Edit, Probe, Read
from vllm_scope.request.arrays import DTYPES, MAX_NUMBERS
from vllm_scope.request.encoding import READ_CODECS
from vllm_scope.request.selectors import FAR, MAX_ITEMS, MAX_PARTS, WORDS
from vllm_scope.request.sites import ALIASES, MAX_LAYERS
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
_LAYER = {"type": "integer", "minimum": 0}


def _definitions() -> Schema:
    """What several fields have in common."""
    end, rows, codecs = _any(_whole(), _NULL), _NUMBER, []
    nested = [rows := _list(rows, MAX_NUMBERS) for _ in range(3)]
    shape = _list({"type": "integer", "minimum": 1, "maximum": MAX_NUMBERS}, 3)
    data = {"type": "string", "contentEncoding": "base64", "pattern": _BASE64}
    dtype = {"enum": list(DTYPES)}
    for name, options in READ_CODECS.items():
        given: Schema = {option: {"type": "integer"} for option in options}
        codecs.append(_object(["name"], {"name": {"const": name}, **given}))
    return {
        "array": _any(
            _object(["dtype", "shape", "data"], {"dtype": dtype, "shape": shape, "data": data}),
            *nested,
        ),
        "vector": _any(_MODULE, _ref("array")),
        "codec": _any(_NULL, {"enum": list(READ_CODECS)}, *codecs),
        "layers": _any(_NULL, {"const": "all"}, _LAYER, _list(_LAYER, MAX_LAYERS)),
        "tokens": _any(
            {"enum": list(WORDS)},
            _whole(),
            _list(_whole(), MAX_ITEMS),
            _object(
                ["slice"],
                {
                    "slice": {
                        **_list({}, 3, 3),
                        "prefixItems": [end, end, _any(_whole(1), _NULL)],
                        "items": False,
                    }
                },
            ),
            _object(["token_ids"], {"token_ids": _list(_whole(0), MAX_ITEMS)}),
            _object(["union"], {"union": _list(_ref("tokens"), MAX_PARTS)}),
            _object(["except"], {"except": _list(_ref("tokens"), 2, 2)}),
        ),
    }


#: Fields whose annotation does not say what they take.
_FIELDS = {
    "tokens": _ref("tokens"),
    "layers": _ref("layers"),
    "codec": _ref("codec"),
    "weight": _ref("vector"),
    "vector": _ref("vector"),
    "direction": _ref("vector"),
    "values": _ref("array"),
    "positions": _any(_whole(), _list(_whole(), MAX_ITEMS, uniqueItems=True)),
    "strength": _NUMBER | {"minimum": 0, "maximum": 1},
}


def _of_type(hint: Any) -> Schema:
    if get_origin(hint) is UnionType:
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
        if not each.init or name == "layer":  # in JSON it is `layers`
            continue
        if name == "site":
            aliases = [alias for alias, site in ALIASES.items() if site in cls.sites]
            properties[name] = {"enum": [*cls.sites, *aliases]}
        else:
            properties[name] = dict(_FIELDS.get(name) or _of_type(hints[name]))
        if each.default is MISSING or (cls, name) == (Probe, "name"):
            required.append(name)
        elif each.default is not None:
            properties[name]["default"] = each.default
    return {
        "description": cls.__doc__.partition("\n")[0],
        **_object(required, properties),
        "if": {"properties": {"site": {"const": "embed"}}, "required": ["site"]},
        "then": {"properties": {"layers": {"enum": [None, "all", 0, [0]]}}},
        "else": _layers_of(cls),
    }


def _layers_of(cls: Any) -> Schema:
    """The layers of an action at another site than `embed`."""
    if cls is Read:
        return {}
    one = _any(_LAYER, _list(_LAYER, 1))
    if cls is Probe:
        return {"required": ["layers"], "properties": {"layers": one}}
    named = {"required": ["layers"], "properties": {"layers": {"not": _NULL}}}
    return _any(named, {"properties": {cls.fields[0]: _MODULE}})


def spec_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a spec, the text in `extra_args["scope"]`.

    The schema knows no engine (layers, sites, modules), and does not compare one field with
    another: numbers with a shape, rows with positions, `lo` with `hi`, the names of probes. The
    parser checks these too, so that a valid spec may still be refused.
    """
    items = {"reads": _ref("read"), "probes": _ref("probe"), "edits": _any(*map(_ref, EDITS))}
    lists = {name: _list(items[name], most, least=0) for name, most in MOST.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What one request reads, probes and edits",
        **_object([], lists),
        **_any(*({"required": [n], "properties": {n: {"minItems": 1}}} for n in lists)),
        "$defs": _definitions() | {kind: _action(cls) for kind, cls in KINDS.items()},
    }
