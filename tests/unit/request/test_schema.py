"""The published JSON Schema says what the parser says."""

from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import vllm_scope
from tests.unit.request.probe_forms import probe_specs
from tests.unit.strategies import as_json, specs
from vllm_scope import Probe, Spec, SpecError, scope, spec_schema

ROOT = Path(__file__).parents[3]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VALIDATOR = Draft202012Validator(spec_schema())
KINDS = {"Read", "Probe", "Add", "Ablate", "Clamp", "Replace"}


def is_valid(body: object) -> bool:
    return VALIDATOR.is_valid(body)


def refusal(body: object) -> str | None:
    """What the parser says; None if it takes the spec."""
    try:
        Spec.from_json(json.dumps(body))
    except SpecError as error:
        return str(error)
    return None


def test_the_schema_is_a_schema_and_is_json():
    Draft202012Validator.check_schema(spec_schema())
    assert json.loads(json.dumps(spec_schema())) == spec_schema()


@settings(max_examples=500, deadline=None)
@given(specs(num_layers=4) | probe_specs(num_layers=4))
def test_what_scope_writes_is_valid(spec):
    VALIDATOR.validate(json.loads(spec.to_json()))


# The docs


class _Names(dict):
    """Names of the docs' examples; one that nobody defines is a vector."""

    def __missing__(self, name: str) -> Any:
        return np.ones(4)


def _documented() -> list[Any]:
    """The calls of actions in the docs' Python that can be made alone."""
    found = []
    for path in DOCS:
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.S):
            for node in ast.walk(ast.parse(block)):
                if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in KINDS:
                    continue
                code = compile(ast.Expression(node), str(path), "eval")
                names = _Names(vars(vllm_scope), bias=0.5, a=-1, b=1)
                try:
                    found.append(eval(code, {}, names))
                except (AttributeError, IndexError, TypeError, SpecError):
                    continue  # it needs what stands around it
    return found


def test_the_actions_of_the_docs_are_valid():
    actions = _documented()
    assert {type(action).__name__ for action in actions} == KINDS
    assert len(actions) > 30
    for action in actions:
        after = getattr(action, "after", None)  # its first stage stands beside it
        first = [] if after is None else [Probe(np.ones(4), layer=0, name=after, threshold=0.0)]
        VALIDATOR.validate(json.loads(scope(*first, action)["scope"]))


def test_the_json_of_the_docs_is_valid():
    text = (ROOT / "docs/http.md").read_text()
    found = [json.loads(f'"{one}"') for one in re.findall(r'"scope": "(\{\\"reads.*?\]\})"', text)]
    assert found
    for one in found:
        VALIDATOR.validate(json.loads(one))


# The parser


def _read(**fields: Any) -> dict:
    return {"reads": [{"site": "resid_post", **fields}]}


def _probe(**fields: Any) -> dict:
    return {"probes": [{"weight": [1.0, 2.0], "layers": [1], "name": "p", **fields}]}


def _mlp(*layers: Any, **fields: Any) -> dict:
    return {"mlp": list(layers), **fields}


def _pool(**fields: Any) -> dict:
    return {"attention": {"query": [1.0, 2.0], "value": [3.0, 4.0], **fields}}


#: An Mlp's layer of three numbers from rows of two, and one of the score.
FIRST, LAST = [[[1, 2], [3, 4], [5, 6]], [0, 0, 0.5]], [[[1, 2, 3]], [-1]]


def _edit(kind: str = "add", **fields: Any) -> dict:
    first = {"add": "vector", "replace": "values"}.get(kind, "direction")
    body = {"kind": kind, "layers": [1], first: [1.0, 2.0], **fields}
    return {"edits": [{name: value for name, value in body.items() if value != "absent"}]}


@pytest.mark.parametrize(
    "body",
    [
        _read(layers="all"), _read(layers=None), _read(layers=3), _read(layers=[3, 3]),
        _read(site="post_block"), _read(site="embed", layers=[0]), _read(site="q"),
        _read(tokens=-1), _read(tokens=[0, 0]), _read(tokens={"slice": [None, -1, 2]}),
        _read(tokens={"union": ["all", {"except": [{"token_ids": [1]}, "last"]}]}),
        _read(to="filesystem", tag="a", name=None), _read(codec="none"), _read(codec=None),
        _read(codec={"name": "rp8", "k": 8}), _read(when="before"),
        _probe(layers=1), _probe(weight="m", bias=-1), _probe(weight=as_json(), site="resid_mid"),
        _probe(site="q"), _probe(site="mlp_out"), _probe(site="embed", layers="all"),
        _probe(layers=[0, 1], weight=[[1, 2], [3, 4]]), _probe(layers=[2, 0], weight="m"),
        _probe(weight=as_json(shape=(2, 2)), layers=[2, 0]), _probe(weight=[[1, 2]]),
        _probe(weight=_mlp(FIRST, LAST)), _probe(weight=_mlp(FIRST, LAST, hidden="gelu")),
        _probe(weight=_mlp([as_json(shape=(1, 4)), as_json(shape=(1,), data="AACAPw==")],
                           [[[1]], [0]], [[[1]], [0]])),
        _probe(weight=[_mlp(FIRST, LAST)]), _probe(weight=[_mlp(FIRST, LAST)] * 2, layers=[0, 1]),
        _probe(weight=_pool()), _probe(weight=_pool(query=[[1, 2]])),
        _probe(weight=_pool(query=as_json(shape=(2, 2)), value=[[1, 2], [3, 4]])),
        _probe(weight=[_pool()] * 3, layers=[0, 1, 2]), _probe(activation="sigmoid"),
        _probe(activation=None, to="my_sink"), _probe(aggregate=None), _probe(aggregate="max"),
        _probe(aggregate="mean", activation="sigmoid"), _probe(aggregate={"ema": 0}),
        _probe(aggregate={"ema": 0.999}), _probe(aggregate={"rolling_mean": 1}),
        _probe(aggregate={"rolling_mean": 1 << 16, "then": "max"}),
        _probe(aggregate={"rolling_mean": 8, "then": None}),
        _probe(threshold=None), _probe(threshold=-0.5), _probe(threshold=0, action="flag"),
        _probe(action="flag"), _probe(threshold=3, action="stop", tokens="generated"),
        _probe(threshold=1, action="stop", aggregate={"ema": 0.5}, weight=_pool()),
        _probe(after=None), {"probes": [
            *_probe(name="q", threshold=1)["probes"], *_probe(after="q")["probes"]
        ]},
        _edit(vector="m", layers="absent"), _edit(vector={"module": "m"}, layers=None),
        _edit(site="embed", layers="absent"), _edit(site="z"),
        _edit(vector=[[1, 2], [3, 4]], layers=[0, 2]),
        _edit("clamp", lo=None, hi=2, strength=0.5), _edit("replace", positions=3),
        _edit("replace", positions=[3, -1], values=[[[1], [2]]]), _edit("ablate", tokens="last"),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_the_parser_takes_is_valid(body):
    assert refusal(body) is None
    VALIDATOR.validate(body)


@pytest.mark.parametrize(
    "body",
    [
        [], {}, {"reads": []}, {"reads": 1}, {"reads": [7]}, {"read": []}, {"reads": [{}]},
        {"reads": [{"site": "embed"}] * 33}, _read(layer=1), _read(site="attention"),
        _read(site=None), _read(layers=[]), _read(layers=[-1]), _read(layers=True),
        _read(layers=1.5), _read(layers="3"), _read(layers={"1": 2}), _read(layers=[0] * 4097),
        _read(site="embed", layers=[1]), _read(tokens="first"), _read(tokens=None),
        _read(tokens=True), _read(tokens=[]), _read(tokens=["0"]), _read(tokens={}),
        _read(tokens={"slice": [0, 9]}), _read(tokens={"slice": [0, 9, 0]}),
        _read(tokens={"slice": 9}), _read(tokens={"token_ids": []}),
        _read(tokens={"token_ids": [-1]}), _read(tokens={"union": []}),
        _read(tokens={"union": ["all"] * 65}), _read(tokens={"except": ["all"]}),
        _read(tokens={"xor": ["all"]}), _read(tokens=[1 << 40]), _read(when="during"),
        _read(when=None), _read(to=""), _read(to=None), _read(to="s", tag="x" * 201),
        _read(codec="zstd"), _read(codec={"name": "int8", "k": 3}), _read(codec={"k": 3}),
        _read(codec={"name": "rp8", "k": "3"}), _read(kind="read"),
        _probe(name=""), _probe(name=None), _probe(layers="all"), _probe(layers=[]),
        _probe(layers=None), _probe(site="logits"), _probe(bias="1"), _probe(bias=1e39),
        _probe(weight=[]), _probe(weight=None), _probe(weight=["a"]), _probe(when="after"),
        _probe(weight=[[[1.0]]]), _probe(weight=as_json(shape=(1, 1, 4))),
        _probe(weight=["m", "n"]), _probe(weight=_mlp()), _probe(weight=_mlp(LAST)),
        _probe(weight={"mlp": 7}),
        _probe(weight=_mlp(FIRST, *[LAST] * 3)), _probe(weight=_mlp(FIRST, LAST[:1])),
        _probe(weight=_mlp(FIRST, [*LAST, 1])), _probe(weight=_mlp(FIRST, [[1, 2, 3], [-1]])),
        _probe(weight=_mlp(FIRST, [LAST[0], -1])), _probe(weight=_mlp(FIRST, [LAST[0], [[-1]]])),
        _probe(weight=_mlp(FIRST, LAST, hidden="elu")), _probe(weight=_mlp(FIRST, LAST, bias=1)),
        _probe(weight=_mlp(FIRST, LAST, hidden=None)), _probe(weight={"hidden": "relu"}),
        _probe(weight={"attention": {}}), _probe(weight={"attention": [1, 2]}),
        _probe(weight=_pool(key=[1, 2])), _probe(weight=_pool(query=[[[1]]])),
        _probe(weight=_pool(value="m")), _probe(weight=_pool() | {"hidden": "relu"}),
        _probe(weight=_pool() | _mlp(FIRST, LAST)), _probe(weight=[_pool(), _mlp(FIRST, LAST)]),
        _probe(weight=[_pool(), [1, 2]]), _probe(weight=[[1, 2], _pool()]),
        _probe(activation="relu"), _probe(activation=True), _probe(aggregate="min"),
        _probe(aggregate=0.5), _probe(aggregate={}), _probe(aggregate={"ema": 1}),
        _probe(aggregate={"ema": -0.1}), _probe(aggregate={"ema": "0.5"}),
        _probe(aggregate={"ema": True}), _probe(aggregate={"rolling_mean": 0}),
        _probe(aggregate={"rolling_mean": (1 << 16) + 1}), _probe(aggregate={"rolling_mean": 1.5}),
        _probe(aggregate={"rolling_mean": 2, "then": "min"}), _probe(aggregate={"then": "max"}),
        _probe(aggregate={"ema": 0.5, "then": "max"}), _probe(aggregate=["max"]),
        _probe(threshold="1"), _probe(threshold=True), _probe(threshold=[1]),
        _probe(threshold=-1e39), _probe(threshold=1, action="abort"),
        _probe(threshold=1, action=None), _probe(threshold=1, action=["stop"]),
        _probe(after=""), _probe(after=1), _probe(after=["p"]), _probe(after="x" * 201),
        _edit("scale"), _edit(None), _edit(kind="absent"), _edit(layers="absent"),
        _edit(layers=None), _edit(vector="absent"), _edit(vector=""), _edit(vector={"name": "m"}),
        _edit(vector=as_json(dtype="int8")), _edit(vector=as_json(shape=(0,))),
        _edit(vector=as_json(shape=(1, 1, 1, 4))), _edit(vector=as_json(data="*")),
        _edit(vector=as_json(data=7)), _edit(vector=as_json() | {"order": "C"}),
        _edit(vector=[[[[1.0]]]]), _edit(norm_match=1), _edit(scale=None), _edit(site="logits"),
        _edit("ablate", scale=2), _edit("clamp", hi="1"), _edit("clamp", hi=1, strength=2),
        _edit("replace"), _edit("replace", positions=[]), _edit("replace", positions=[3, 3]),
        _edit("replace", positions="last"), _edit("replace", positions=[3], tokens="all"),
        _edit("replace", positions=[3], values="m"),
    ],
    ids=lambda body: json.dumps(body)[:60],
)  # fmt: skip
def test_what_the_parser_refuses_for_its_shape_is_invalid(body):
    assert refusal(body)
    assert not is_valid(body)


#: What the parser says of a spec that is valid: it compares fields, or knows a sum.
BEYOND = re.compile(
    r"rows (or blocks )?for|has \d+ bytes|characters; the|NaN or infinite|is zero; a direction|"
    r"at most hi|there is no bound|two probes|differ in tag|go to memory|one weight for each layer|"
    r"one row or block for each layer|at most \d dimensions|nested|parts|items in all|ragged|"
    r"at most 16,777,216|\[out, \d+\]|has a bias of shape|the last layer must make one|"
    r"both must be \[num_heads|the same number of heads|give a threshold|that stops its request|"
    r"have action 'stop'|has this name|waits for this probe itself|cannot be a first stage|"
    r"generated tokens only"
)
ANYTHING = st.sampled_from(
    [None, True, 0, -1, 1.5, 1 << 50, "", "all", "x", [], [0], [0, 0], ["x"], {}, {"x": 1}]
)


def _places(body: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    keys = body.keys() if isinstance(body, dict) else range(len(body))
    inner = [body[key] for key in keys if isinstance(body[key], dict | list)]
    return [(body, key) for key in keys] + [place for one in inner for place in _places(one)]


@settings(max_examples=400, deadline=None)
@given(specs(num_layers=4) | probe_specs(num_layers=4), st.data())
def test_one_wrong_value_is_seen_by_the_schema_and_the_parser_alike(spec, data):
    body = copy.deepcopy(json.loads(spec.to_json()))
    where, key = data.draw(st.sampled_from(_places(body)))
    if isinstance(where, dict) and data.draw(st.booleans()):
        del where[key]
    else:
        where[key] = data.draw(ANYTHING)
    said = refusal(body)
    if is_valid(body):
        assert said is None or BEYOND.search(said), said
    else:
        assert said is not None, next(VALIDATOR.iter_errors(body))
