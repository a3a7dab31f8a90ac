"""Probes of other kinds: an Mlp, an AttentionPool, several layers, an aggregate, a threshold; and
their JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.unit.request.probe_forms import any_probes, mlps, pools, probe_specs
from tests.unit.strategies import as_json, sentence
from vllm_scope import (
    AttentionPool,
    Ema,
    Mlp,
    Probe,
    RollingMean,
    Spec,
    TokenIds,
    Union,
    scope,
)
from vllm_scope.request.arrays import Array
from vllm_scope.request.nets import HIDDEN, MAX_WINDOW, net_of, parse_aggregate, shaped_weight
from vllm_scope.request.sites import MODEL_SITES, SITES

V = [1.0, -2.0, 0.5, 0.0]
INF = float("inf")
NAN = float("nan")


def layer(out: int, width: int, fill: float = 1.0) -> tuple[Any, Any]:
    return np.full((out, width), fill), np.full(out, -fill)


MLP = Mlp([layer(3, 4), layer(1, 3)])
POOL = AttentionPool([V, V], [V, V[::-1]])


def probe(weight: Any = MLP, **fields: Any) -> Probe:
    return Probe(weight, **{"layer": 1, "name": "p", **fields})


def again(action: Probe) -> Probe:
    """The probe that another process makes of its JSON."""
    (found,) = Spec.from_json(scope(action)["scope"]).probes
    return found


def from_json(**fields: Any) -> Probe:
    body = {"weight": V, "layers": [1], "name": "p", **fields}
    (found,) = Spec.from_json(json.dumps({"probes": [body]})).probes
    return found


# JSON


@given(any_probes(num_layers=4, width=4))
def test_a_probe_of_any_form_survives_its_json(action):
    found = again(action)
    assert found == action
    assert hash(found) == hash(action)
    assert again(found).to_json() == action.to_json()
    assert dataclasses.replace(found, tokens="all") == dataclasses.replace(action, tokens="all")


@given(probe_specs(num_layers=3))
def test_a_spec_with_probes_of_any_form_is_equal_after_its_json(spec):
    assert Spec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        pytest.param(probe(V), {}, id="plain"),
        pytest.param(probe(V, activation="sigmoid"), {"activation": "sigmoid"}, id="sigmoid"),
        pytest.param(probe(V, aggregate="max"), {"aggregate": "max"}, id="max"),
        pytest.param(probe(V, aggregate="mean"), {"aggregate": "mean"}, id="mean"),
        pytest.param(probe(V, aggregate=Ema(0.5)), {"aggregate": {"ema": 0.5}}, id="ema"),
        pytest.param(
            probe(V, aggregate=RollingMean(8)), {"aggregate": {"rolling_mean": 8}}, id="rolling"
        ),
        pytest.param(
            probe(V, aggregate=RollingMean(8, then="max")),
            {"aggregate": {"rolling_mean": 8, "then": "max"}},
            id="rolling-max",
        ),
        pytest.param(probe(V, site="mlp_out"), {"site": "mlp_out"}, id="another-site"),
        pytest.param(probe(V, threshold=0), {"threshold": 0.0}, id="flag"),
        pytest.param(
            probe(V, threshold=-1.5, action="stop"),
            {"threshold": -1.5, "action": "stop"},
            id="stop",
        ),
    ],
)
def test_the_json_of_a_probe_has_what_differs_from_the_default(action, fields):
    plain = {"site": "resid_post", "layers": (1,), "bias": 0.0, "name": "p"}
    body = action.to_json()
    assert body.pop("weight") == Array.parse(V, "").to_json()
    assert body == plain | fields
    assert again(action) == action


@pytest.mark.parametrize("threshold", [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)])
def test_a_threshold_is_a_python_number(threshold):
    found = probe(V, threshold=threshold)
    assert (type(found.threshold), found.threshold) == (float, 0.5)
    assert found.action == "flag"


@pytest.mark.parametrize("tokens", ["all", "prompt", "generated", Union("prompt", "generated")])
def test_a_probe_that_stops_takes_whole_phases(tokens):
    found = probe(V, threshold=1, action="stop", tokens=tokens)
    assert again(found) == found


@pytest.mark.parametrize("tokens", ["last_prompt", "last", [0, -1], slice(4, 9), TokenIds(3)])
def test_a_probe_that_flags_takes_any_tokens(tokens):
    found = probe(POOL, threshold=1, aggregate="max", activation="sigmoid", tokens=tokens)
    assert again(found) == found


def test_the_json_of_a_shaped_weight_has_its_arrays():
    (first, last), hidden = probe(MLP).to_json()["weight"].values()
    assert [Array.parse(one, "").shape for one in (*first, *last)] == [(3, 4), (3,), (1, 3), (1,)]
    assert hidden == "relu"
    pool = probe(POOL).to_json()["weight"]["attention"]
    assert Array.parse(pool["query"], "").numpy.tolist() == [V, V]
    assert Array.parse(pool["value"], "").numpy.tolist() == [V, V[::-1]]
    assert probe([POOL, POOL], layer=[1, 2]).to_json()["weight"] == [{"attention": pool}] * 2


# One meaning in any spelling


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(Mlp([layer(3, 4), layer(1, 3)], "relu"), MLP, id="relu-by-default"),
        pytest.param(
            Mlp([[np.ones((3, 4)).tolist(), [-1, -1, -1]], ([[1, 1, 1]], [-1])]), MLP, id="lists"
        ),
        pytest.param(
            Mlp([(torch.ones(3, 4), -torch.ones(3)), (torch.ones(1, 3).bfloat16(), [-1])]),
            MLP,
            id="tensors",
        ),
        pytest.param(Mlp(MLP.layers), MLP, id="arrays"),
        pytest.param(AttentionPool(V, V), AttentionPool([V], [V]), id="one-head"),
        pytest.param(AttentionPool(torch.tensor(V), [V]), AttentionPool(V, np.array(V)), id="pool"),
        pytest.param(RollingMean(3, None), RollingMean(3), id="rolling"),
        pytest.param(Ema(0), Ema(0.0), id="ema"),
        pytest.param(Ema(np.float32(0.5)), Ema(0.5), id="ema-of-numpy"),  # type: ignore[arg-type]
        pytest.param(RollingMean(np.int64(4)), RollingMean(4), id="mean-of-numpy"),  # type: ignore[arg-type]
    ],
)
def test_a_weight_or_an_aggregate_is_the_same_in_any_spelling(one, other):
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)


def test_a_probe_takes_a_weight_as_json_as_well():
    assert probe(MLP.to_json()) == probe([MLP]) == probe(MLP) == probe((MLP.to_json(),))
    assert probe([POOL.to_json()]) == probe(POOL)
    assert probe(V, aggregate={"ema": 0.25}).aggregate == Ema(0.25)


def test_a_torch_module_of_linear_layers_is_the_layers_of_an_mlp():
    made = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    layers = [(one.weight, one.bias) for one in (made[0], made[2])]
    (first, _), (last, bias) = Mlp(layers, hidden="tanh").layers
    assert first.numpy.tolist() == made[0].weight.tolist()
    assert last.numpy.tolist() == made[2].weight.tolist()
    assert bias.numpy.tolist() == made[2].bias.tolist()


# What is computed


@given(mlps(width=4))
def test_the_net_of_an_mlp_is_its_layers(mlp):
    net = net_of(mlp)
    assert (net.width, net.num_values, net.hidden) == (4, 1, mlp.hidden)
    assert net.layers == mlp.layers
    sizes = [4, *(weight.shape[0] for weight, _ in mlp.layers)]
    pairs = zip(sizes[1:], sizes[:-1], strict=True)
    assert net.num_bytes == 4 * sum(out * size + out for out, size in pairs)


@given(pools(width=4, num_heads=2))
def test_the_net_of_a_pool_makes_the_logits_of_all_heads_and_then_their_values(pool):
    net = net_of(pool)
    (weight, bias), *others = net.layers
    assert not others
    assert bias is None
    assert net.hidden is None
    assert (net.width, net.num_values, net.num_bytes) == (4, 4, 64)
    row = np.float32([3, 1, -1, 2])
    logits_and_values = np.concatenate([pool.query.numpy @ row, pool.value.numpy @ row])
    assert (weight.numpy @ row).tolist() == logits_and_values.tolist()


def test_the_net_of_a_vector_is_one_row():
    net = net_of(Array.parse(V, ""))
    assert (net.width, net.num_values, net.num_bytes, net.hidden) == (4, 1, 16, None)
    assert net.layers[0][0].numpy.tolist() == [V]


@pytest.mark.parametrize(
    ("weight", "layers", "each"),
    [
        pytest.param(V, 1, [V], id="a-vector"),
        pytest.param([V], [1], [V], id="a-matrix-of-one"),
        pytest.param([V, V[::-1]], [2, 0], [V, V[::-1]], id="in-the-order-of-the-layers"),
    ],
)
def test_a_linear_probe_has_a_vector_for_each_layer(weight, layers, each):
    found = probe(weight, layer=layers)
    assert [one.numpy.tolist() for one in found.weights()] == each
    assert all(one.shape == (4,) for one in found.weights())


def test_a_probe_of_several_layers_has_a_net_for_each():
    other = Mlp([layer(5, 4), layer(1, 5)], "silu")
    assert probe([MLP, other], layer=[3, 1]).weights() == [MLP, other]
    assert probe(MLP).weights() == [MLP]
    assert probe(POOL).pools
    assert not probe(MLP).pools
    assert not probe(V).pools
    assert not probe("m", layer=[0, 1]).pools


def test_the_digest_of_a_net_is_of_all_that_it_computes():
    weights = [
        MLP,
        Mlp(MLP.layers, "gelu"),
        Mlp([layer(3, 4, 2.0), layer(1, 3)]),
        Mlp([(MLP.layers[0][0], np.zeros(3)), layer(1, 3)]),
        Mlp([layer(3, 4), layer(3, 3), layer(1, 3)]),
        POOL,
        AttentionPool(POOL.value, POOL.query),
        Array.parse(V, ""),
        Array.parse(V[::-1], ""),
    ]
    digests = [net_of(weight).digest for weight in weights]
    assert len(set(digests)) == len(weights)
    assert digests[0] == net_of(Mlp([layer(3, 4), layer(1, 3)])).digest


# Where


@pytest.mark.parametrize("site", [site for site in SITES if site not in MODEL_SITES])
def test_a_probe_may_be_at_any_site(site):
    assert again(probe(V, site=site)).site == site


def test_a_probe_of_the_embeddings_has_one_layer():
    found = Probe(V, site="embed", name="p")
    assert found.layer_numbers == (0,)
    assert again(found) == found


def test_equal_layers_of_a_probe_are_one():
    assert probe(V, layer=[1, 1]) == probe(V)


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(lambda: probe(V, to="hook"), id="linear"),
        pytest.param(lambda: probe(MLP, to="hook"), id="mlp"),
        pytest.param(lambda: probe(V, to="hook", activation="sigmoid"), id="sigmoid"),
        pytest.param(lambda: probe("m", to="hook", site="z"), id="a-module"),
    ],
)
def test_a_sink_takes_scores_that_need_one_row_alone(action):
    assert again(action()).to == "hook"


# What is refused


@pytest.mark.parametrize(
    ("make", "came", "allowed"),
    [
        pytest.param(lambda: Mlp(7), "Mlp.layers is 7", "list of (weight, bias)", id="a-number"),
        pytest.param(
            lambda: Mlp(np.ones((2, 2))), "is array([[1., 1.], [1., 1.]])", "list of (",
            id="an-array",
        ),
        pytest.param(lambda: Mlp([]), "has 0 items", "2 or 3", id="no-layer"),
        pytest.param(lambda: Mlp([layer(1, 4)]), "1 items", "plain weight", id="one-layer"),
        pytest.param(
            lambda: Mlp([layer(4, 4)] * 3 + [layer(1, 4)]), "4 items", "2 or 3", id="four-layers"
        ),
        pytest.param(
            lambda: Mlp([np.ones(4), layer(1, 3)]), "[0] is array", "(weight, bias)", id="bare"
        ),
        pytest.param(
            lambda: Mlp([([V], [0], 1), layer(1, 1)]), "[0] is (", "(weight, bias)", id="three"
        ),
        pytest.param(
            lambda: Mlp([(V, [1.0]), layer(1, 3)]), "(4,)", "[out, width of a row]", id="a-vector"
        ),
        pytest.param(
            lambda: Mlp([layer(3, 4), layer(1, 4)]), "[1] has a weight of shape (1, 4)",
            "[out, 3]", id="another-width",
        ),
        pytest.param(
            lambda: Mlp([layer(3, 4), (np.ones((3, 1)), [1.0])]), "(3, 1)", "[out, 3]", id="turned"
        ),
        pytest.param(
            lambda: Mlp([(np.ones((3, 4)), [1.0]), layer(1, 3)]), "[0] has a bias of shape (1,)",
            "the bias must be [3]", id="a-short-bias",
        ),
        pytest.param(
            lambda: Mlp([(np.ones((3, 4)), [[1.0] * 3]), layer(1, 3)]), "bias of shape (1, 3)",
            "the bias must be [3]", id="a-bias-of-two-dimensions",
        ),
        pytest.param(
            lambda: Mlp([(np.ones((3, 4)), None), layer(1, 3)]), "[0] bias is None", "list of num",
            id="no-bias",
        ),
        pytest.param(
            lambda: Mlp([layer(3, 4, NAN), layer(1, 3)]), "[0] weight is NaN", "finite", id="nan"
        ),
        pytest.param(
            lambda: Mlp([layer(3, 4), ([[1, 1, 1]], [INF])]), "[1] bias is NaN or infinite",
            "finite", id="inf",
        ),
        pytest.param(
            lambda: Mlp([layer(3, 4), layer(2, 3)]), "[1] makes 2 numbers", "one, the score",
            id="two-outputs",
        ),
        pytest.param(
            lambda: Mlp(MLP.layers, "elu"), "Mlp.hidden is 'elu'", ", ".join(HIDDEN), id="hidden"
        ),
        pytest.param(lambda: Mlp(MLP.layers, None), "hidden is None", "relu", id="no-hidden"),
        pytest.param(
            lambda: AttentionPool(None, V), "AttentionPool.query is None", "list of numbers",
            id="no-query",
        ),
        pytest.param(
            lambda: AttentionPool(V, "m"), "AttentionPool.value is 'm'", "list of numbers",
            id="a-module-as-value",
        ),
        pytest.param(
            lambda: AttentionPool([V, V], V), "(2, 4) and a value of shape (1, 4)",
            "both must be [num_heads, width", id="fewer-values",
        ),
        pytest.param(
            lambda: AttentionPool(V, V[:3]), "(1, 4) and a value of shape (1, 3)", "both must be",
            id="another-width-of-values",
        ),
        pytest.param(
            lambda: AttentionPool([[V]], [[V]]), "(1, 1, 4)", "[num_heads, width", id="a-cube"
        ),
        pytest.param(lambda: Ema(1), "Ema.decay is 1", "0 to below 1", id="decay-1"),
        pytest.param(lambda: Ema(-0.1), "Ema.decay is -0.1", "0 to below 1", id="decay-below-0"),
        pytest.param(lambda: Ema(NAN), "Ema.decay is nan", "0 to below 1", id="decay-nan"),
        pytest.param(lambda: Ema("0.5"), "'0.5'", "a number", id="decay-text"),
        pytest.param(lambda: Ema(False), "False", "a number", id="decay-bool"),
        pytest.param(lambda: RollingMean(0), "window is 0", "1 to 65,536", id="no-window"),
        pytest.param(
            lambda: RollingMean(MAX_WINDOW + 1), "65537", "1 to 65,536", id="a-long-window"
        ),
        pytest.param(lambda: RollingMean(2.0), "window is 2.0", "whole number", id="half-a-window"),
        pytest.param(lambda: RollingMean(True), "window is True", "whole number", id="window-bool"),
        pytest.param(lambda: RollingMean(2, "min"), "'min'", "None or 'max'", id="then-min"),
        pytest.param(lambda: RollingMean(2, then=0), "then is 0", "None or 'max'", id="then-0"),
        pytest.param(lambda: probe(V, layer="all"), "'all'", "a list of them", id="everywhere"),
        pytest.param(lambda: probe("m", layer=None), "None", "name one layer", id="module-nowhere"),
        pytest.param(
            lambda: probe(MLP, layer=[0, 1]), "1 weights for 2 layers", "each layer", id="one-mlp"
        ),
        pytest.param(
            lambda: probe([POOL, POOL]), "2 weights for 1 layers", "each layer", id="two-pools"
        ),
        pytest.param(
            lambda: probe([V, V], layer=[0, 1, 2]), "2 weights for 3", "each layer", id="two-of-3"
        ),
        pytest.param(
            lambda: probe([MLP, POOL], layer=[0, 1]), "Probe.weight is [Mlp", "a list of Mlp",
            id="two-kinds",
        ),
        pytest.param(
            lambda: probe([MLP, V], layer=[0, 1]), "Probe.weight is [Mlp", "a list of Mlp",
            id="mlp-and-vector",
        ),
        pytest.param(
            lambda: probe([POOL, AttentionPool(V, V)], layer=[0, 1]), "Probe.weight is [Attention",
            "the same number of heads", id="heads",
        ),
        pytest.param(
            lambda: probe(V, activation="relu"), "activation is 'relu'", "'sigmoid' or None",
            id="relu",
        ),
        pytest.param(
            lambda: probe(V, aggregate="min"), "aggregate is 'min'", "'mean', Ema(decay)", id="min"
        ),
        pytest.param(lambda: probe(V, aggregate=0.5), "aggregate is 0.5", "Ema(decay)", id="half"),
        pytest.param(
            lambda: probe(V, aggregate=np.array(["max", "mean"])), "aggregate is array(['max'",
            "'max', 'mean'", id="an-array-as-aggregate",
        ),
        pytest.param(
            lambda: probe(V, aggregate=Ema), "aggregate is <class", "Ema(decay)", id="the-class"
        ),
        pytest.param(
            lambda: probe(V, threshold=NAN), "threshold is nan", "finite in float32", id="nan-above"
        ),
        pytest.param(
            lambda: probe(V, threshold=1e39), "threshold is 1e+39", "finite", id="beyond-float32"
        ),
        pytest.param(
            lambda: probe(V, threshold="high"), "threshold is 'high'", "a number", id="high"
        ),
        pytest.param(
            lambda: probe(V, threshold=True), "threshold is True", "a number", id="threshold-bool"
        ),
        pytest.param(
            lambda: probe(V, threshold=1, action="abort"), "action is 'abort'", "'flag' or 'stop'",
            id="abort",
        ),
        pytest.param(
            lambda: probe(V, threshold=1, action=None), "action is None", "'flag' or 'stop'",
            id="no-action",
        ),
        pytest.param(
            lambda: probe(V, action="stop"), "action is 'stop'", "give a threshold with it",
            id="stop-at-nothing",
        ),
        pytest.param(
            lambda: probe(V, threshold=0.5, to="hook"), "threshold is 0.5, and the scores go to",
            "scores that go to memory", id="threshold-at-a-sink",
        ),
        pytest.param(
            lambda: probe(V, threshold=1, action="stop", tokens="last_prompt"),
            "tokens is 'last_prompt'", "'all', 'prompt' or 'generated'", id="stop-at-one-token",
        ),
        pytest.param(
            lambda: probe(V, threshold=1, action="stop", tokens=Union("prompt", [9])),
            "tokens is {'union'", "'all', 'prompt' or 'generated'", id="stop-in-half-a-phase",
        ),
        pytest.param(
            lambda: probe(V, to="hook", aggregate="max"), "to is 'hook'", "or an aggregate",
            id="aggregate-at-a-sink",
        ),
        pytest.param(
            lambda: probe(POOL, to="hook"), "to is 'hook'", "without an AttentionPool", id="pool-to"
        ),
        pytest.param(
            lambda: probe([V, V], layer=[0, 1], to="hook"), "to is 'hook'", "of one layer",
            id="layers-at-a-sink",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_names_what_came_and_what_is_allowed(make, came, allowed):
    text = sentence(make)
    assert came in text
    assert allowed in text


@pytest.mark.parametrize(
    ("fields", "start", "allowed"),
    [
        pytest.param(
            {"weight": {"mlp": [[[[1]], [0]]]}}, "probes[0].weight: Mlp.layers has 1", "2 or 3",
            id="one-layer",
        ),
        pytest.param(
            {"weight": {"mlp": 7}}, "probes[0].weight: Mlp.layers is 7", "(weight, bias)", id="mlp"
        ),
        pytest.param(
            {"weight": MLP.to_json() | {"bias": 1}}, "probes[0].weight is {", "{mlp: [[weight,",
            id="another-field",
        ),
        pytest.param(
            {"weight": {"attention": [V, V]}}, "probes[0].weight is {'attention'",
            "{attention: {query, value}}", id="a-list-as-pool",
        ),
        pytest.param(
            {"weight": {"attention": {"query": V}}}, "probes[0].weight is {'attention'",
            "{query, value}", id="no-value",
        ),
        pytest.param(
            {"weight": {"attention": {"query": V, "value": as_json("int8")}}},
            "probes[0].weight: AttentionPool.value.dtype is 'int8'", "float32, float16",
            id="a-wrong-array",
        ),
        pytest.param(
            {"weight": [MLP.to_json(), {"mlp": []}], "layers": [0, 1]},
            "probes[0].weight[1]: Mlp.layers has 0", "2 or 3", id="the-second-of-two",
        ),
        pytest.param(
            {"weight": [MLP.to_json(), POOL.to_json()], "layers": [0, 1]},
            "probes[0].weight is [", "a list of Mlp", id="two-kinds",
        ),
        pytest.param(
            {"weight": [V, MLP.to_json()], "layers": [0, 1]}, "probes[0].weight is [[",
            "a list of numbers", id="a-vector-and-an-mlp",
        ),
        pytest.param(
            {"activation": ["sigmoid"]}, "probes[0].activation is ['sigmoid']", "or None", id="list"
        ),
        pytest.param(
            {"aggregate": {"ema": 1.5}}, "probes[0].aggregate: Ema.decay is 1.5", "below 1",
            id="decay",
        ),
        pytest.param(
            {"aggregate": {"rolling_mean": 0}}, "probes[0].aggregate: RollingMean.window is 0",
            "1 to 65,536", id="window",
        ),
        pytest.param(
            {"aggregate": {"rolling_mean": 3, "then": "mean"}},
            "probes[0].aggregate: RollingMean.then is 'mean'", "None or 'max'", id="then",
        ),
        pytest.param(
            {"aggregate": {"ema": 0.5, "then": "max"}}, "probes[0].aggregate is {'ema'",
            "{rolling_mean: window", id="an-ema-then",
        ),
        pytest.param(
            {"aggregate": {}}, "probes[0].aggregate is {}", "{ema: decay}", id="an-empty-object"
        ),
        pytest.param(
            {"action": "stop"}, "probes[0].action is 'stop'", "give a threshold", id="no-threshold"
        ),
        pytest.param(
            {"threshold": [1]}, "probes[0].threshold is [1]", "a number", id="a-list-as-threshold"
        ),
        pytest.param(
            {"threshold": 1, "action": "stop", "tokens": [3]}, "probes[0].tokens is [3]",
            "takes 'all', 'prompt' or 'generated'", id="stop-at-a-position",
        ),
        pytest.param(
            {"aggregate": ["max"]}, "probes[0].aggregate is ['max']", "'max', 'mean'", id="a-list"
        ),
    ],
)  # fmt: skip
def test_json_of_a_probe_that_cannot_be_names_its_path(fields, start, allowed):
    text = sentence(lambda: from_json(**fields))
    assert text.startswith(start)
    assert allowed in text


@pytest.mark.parametrize("value", [None, 7, "m", V, {}, {"module": "m"}, as_json(), [MLP]])
def test_other_weights_are_no_shaped_weights(value):
    assert shaped_weight(value, "w") is None


@pytest.mark.parametrize("value", ["max", "mean", None, Ema(0.5), RollingMean(2, "max")])
def test_an_aggregate_is_what_its_json_means(value):
    assert parse_aggregate(value, "a") == value
    if value is not None and not isinstance(value, str):
        assert parse_aggregate(json.loads(json.dumps(value.to_json())), "a") == value
