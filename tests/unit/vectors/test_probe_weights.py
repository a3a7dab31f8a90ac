"""Weights from other libraries: the score of a row is what the estimator or the module makes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    LogisticRegressionCV,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    RidgeCV,
)
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from torch import nn

from tests.unit.strategies import sentence
from vllm_scope import AttentionPool, Mlp, Probe, Spec, scope
from vllm_scope.vectors.probe_weights import (
    ProbeWeights,
    from_safetensors,
    from_sklearn,
    from_state_dict,
)

WIDTH = 6
BETWEEN = {
    "relu": lambda z: np.maximum(z, 0),
    "tanh": np.tanh,
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: torch.nn.functional.gelu(torch.from_numpy(z)).numpy(),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rows_and_labels(num_rows: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Rows far from the origin, of very different widths."""
    random = np.random.default_rng(0)
    labels = random.random(num_rows) < 0.4
    rows = random.normal(size=(num_rows, WIDTH)) * np.logspace(-1, 1, WIDTH) + 5
    rows[:, 2] += 0.3 * labels
    return rows, labels


def scores(found: ProbeWeights, rows: np.ndarray) -> np.ndarray:
    """What a Probe with these weights computes, in float64 and without its activation."""
    weight = found.weight
    if isinstance(weight, Mlp):
        values = rows
        for i, (matrix, bias) in enumerate(weight.layers):
            values = values if i == 0 else BETWEEN[weight.hidden](values)
            values = values @ matrix.numpy.T.astype(np.float64) + bias.numpy
        return values[:, 0] + found.bias
    if isinstance(weight, AttentionPool):
        logits, values = (
            rows @ one.numpy.T.astype(np.float64) for one in (weight.query, weight.value)
        )
        pooled = []
        for end in range(1, len(rows) + 1):
            shares = np.exp(logits[:end] - logits[:end].max(axis=0))
            shares /= shares.sum(axis=0)
            pooled.append((shares * values[:end]).sum() + found.bias)
        return np.array(pooled)
    assert weight.dtype == np.float32
    return rows @ weight.astype(np.float64) + found.bias


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def fits_a_probe(found: ProbeWeights) -> None:
    """A Probe takes the weights, and its JSON has them."""
    probe = Probe(found.weight, bias=found.bias, activation=found.activation, layer=1, name="p")
    assert Spec.from_json(scope(probe)["scope"]).probes == (probe,)


# scikit-learn


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of defaults of LogisticRegressionCV
@pytest.mark.parametrize(
    "estimator",
    [
        LogisticRegression(),
        LogisticRegression(fit_intercept=False),
        LogisticRegressionCV(cv=2),
        LinearDiscriminantAnalysis(),
        LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
        LinearSVC(),
        RidgeClassifier(),
        RidgeClassifierCV(),
        make_pipeline(StandardScaler(), LogisticRegression()),
        make_pipeline(StandardScaler(with_mean=False), LogisticRegression()),
        make_pipeline(StandardScaler(with_std=False), LinearSVC()),
        make_pipeline(StandardScaler(with_mean=False, with_std=False), LinearSVC()),
        make_pipeline("passthrough", StandardScaler(), StandardScaler(), RidgeClassifier()),
        make_pipeline(make_pipeline(StandardScaler()), make_pipeline(LogisticRegression())),
    ],
    ids=repr,
)
def test_the_score_of_a_linear_classifier_is_its_decision(estimator):
    rows, labels = rows_and_labels()
    estimator.fit(rows, labels)
    found = from_sklearn(estimator)
    np.testing.assert_allclose(
        scores(found, rows), estimator.decision_function(rows), rtol=1e-5, atol=1e-5
    )
    assert found.activation == ("sigmoid" if hasattr(estimator, "predict_proba") else None)
    if found.activation:
        np.testing.assert_allclose(
            sigmoid(scores(found, rows)), estimator.predict_proba(rows)[:, 1], atol=1e-5
        )
    assert not found.weight.flags.writeable
    fits_a_probe(found)


@pytest.mark.parametrize(
    "estimator",
    [
        Ridge(),
        RidgeCV(),
        LinearRegression(),
        LinearRegression(fit_intercept=False),
        make_pipeline(StandardScaler(), Ridge()),
    ],
    ids=repr,
)
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=["targets", "a-column-of-targets"])
def test_the_score_of_a_regression_is_its_prediction(estimator, shape):
    rows, _ = rows_and_labels()
    estimator.fit(rows, (rows @ np.arange(WIDTH) + np.sin(rows[:, 0])).reshape(shape))
    found = from_sklearn(estimator)
    np.testing.assert_allclose(scores(found, rows), estimator.predict(rows).ravel(), rtol=1e-5)
    assert found.activation is None
    fits_a_probe(found)


@pytest.mark.parametrize("activation", ["relu", "tanh", "logistic"])
@pytest.mark.parametrize("sizes", [(5,), (5, 3)], ids=["one-hidden-layer", "two-hidden-layers"])
@pytest.mark.parametrize("scaler", [[], [StandardScaler()]], ids=["plain", "scaled"])
@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
def test_the_score_of_a_perceptron_is_its_output(kind, scaler, sizes, activation):
    rows, labels = rows_and_labels()
    last = kind(hidden_layer_sizes=sizes, activation=activation, max_iter=50, random_state=0)
    estimator = make_pipeline(*scaler, last).fit(rows, labels)
    found = from_sklearn(estimator)
    assert isinstance(found.weight, Mlp)
    assert found.weight.hidden == {"logistic": "tanh"}.get(activation, activation)
    assert len(found.weight.layers) == len(sizes) + 1
    if kind is MLPClassifier:
        assert found.activation == "sigmoid"
        expected = estimator.predict_proba(rows)[:, 1]
        np.testing.assert_allclose(sigmoid(scores(found, rows)), expected, atol=1e-5)
    else:
        assert found.activation is None
        np.testing.assert_allclose(scores(found, rows), estimator.predict(rows), atol=1e-5)
    fits_a_probe(found)


def test_a_perceptron_without_a_hidden_layer_is_linear():
    rows, labels = rows_and_labels()
    estimator = MLPClassifier((), activation="identity", max_iter=2000).fit(rows, labels)
    found = from_sklearn(estimator)
    assert found.weight.shape == (WIDTH,)
    np.testing.assert_allclose(
        sigmoid(scores(found, rows)), estimator.predict_proba(rows)[:, 1], atol=1e-5
    )


def test_sparse_coefficients_are_numbers():
    rows, labels = rows_and_labels()
    estimator = LogisticRegression().fit(rows, labels)
    expected = from_sklearn(estimator).weight
    assert from_sklearn(estimator.sparsify()).weight.tolist() == expected.tolist()


def test_rows_of_several_layers_side_by_side_make_a_weight_for_each():
    rows, labels = rows_and_labels()
    found = from_sklearn(LogisticRegression().fit(rows, labels))
    both = Probe(found.weight.reshape(2, -1), bias=found.bias, layers=[1, 3], name="p")
    of_layers = [one.numpy for one in both.weights()]
    parts = [rows[:, :3] @ of_layers[0], rows[:, 3:] @ of_layers[1]]
    np.testing.assert_allclose(sum(parts) + found.bias, scores(found, rows), rtol=1e-6)


def test_an_old_multinomial_has_a_score_and_no_probability():
    rows, labels = rows_and_labels()
    estimator = LogisticRegression().fit(rows, labels)
    estimator.multi_class = "multinomial"
    assert from_sklearn(estimator).activation is None


def fitted(estimator, targets=None):
    rows, labels = rows_and_labels()
    return estimator.fit(rows, labels if targets is None else targets(rows, labels))


def three(rows, labels):
    return labels.astype(int) + (rows[:, 0] > 5)


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
@pytest.mark.parametrize(
    ("make", "came", "allowed"),
    [
        pytest.param(lambda: "mood", "a str", "LogisticRegression, Linear", id="a-word"),
        pytest.param(lambda: LogisticRegression, "a type", "LogisticRegression", id="a-class"),
        pytest.param(
            lambda: fitted(RandomForestClassifier(3)), "a RandomForestClassifier",
            "MLPClassifier, MLPRegressor", id="a-forest",
        ),
        pytest.param(
            lambda: fitted(make_pipeline(PCA(2), LogisticRegression())), "a PCA", "StandardScaler",
            id="pca-first",
        ),
        pytest.param(
            lambda: fitted(make_pipeline(StandardScaler())), "a StandardScaler", "a probe is made",
            id="a-scaler-alone",
        ),
        pytest.param(
            lambda: Pipeline([("a", "passthrough")]), "a Pipeline", "a probe is made", id="nothing"
        ),
        pytest.param(LogisticRegression, "LogisticRegression is not fitted", "fit", id="unfitted"),
        pytest.param(
            lambda: make_pipeline(StandardScaler(), LogisticRegression().fit(*rows_and_labels())),
            "StandardScaler is not fitted", "fit", id="an-unfitted-scaler",
        ),
        pytest.param(
            lambda: MLPRegressor(), "MLPRegressor is not fitted", "fit", id="an-unfitted-perceptron"
        ),
        pytest.param(
            lambda: fitted(RidgeClassifier(), three), "makes 3 scores", "a probe makes one",
            id="three-classes",
        ),
        pytest.param(
            lambda: fitted(Ridge(), lambda rows, labels: rows[:, :2]), "makes 2 scores",
            "a probe makes one", id="two-targets",
        ),
        pytest.param(
            lambda: fitted(MLPRegressor(max_iter=9), lambda rows, labels: rows[:, :2]),
            "makes 2 scores", "a probe makes one", id="a-perceptron-with-two-targets",
        ),
        pytest.param(
            lambda: fitted(MLPClassifier((3,), max_iter=9), three), "'softmax'", "logistic",
            id="a-perceptron-with-three-classes",
        ),
        pytest.param(
            lambda: fitted(MLPRegressor("poisson", max_iter=9)), "'exp'", "identity or logistic",
            id="a-perceptron-of-counts",
        ),
        pytest.param(
            lambda: fitted(MLPClassifier((3,), activation="identity", max_iter=9)), "'identity'",
            "relu, tanh, logistic", id="no-activation",
        ),
        pytest.param(
            lambda: fitted(MLPClassifier((3, 3, 3), max_iter=9)), "has 4 items", "2 or 3",
            id="three-hidden-layers",
        ),
    ],
)  # fmt: skip
def test_an_estimator_that_is_no_probe_is_refused(make, came, allowed):
    estimator = make()
    text = sentence(lambda: from_sklearn(estimator))
    assert came in text
    assert allowed in text


# Tensors by name


def torch_rows(num_rows: int = 9) -> torch.Tensor:
    return torch.randn(num_rows, WIDTH)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["linear", "in-a-sequential"])
def test_the_score_of_a_linear_layer_is_its_output(wrapped, bias):
    layer = nn.Linear(WIDTH, 1, bias=bias)
    module = nn.Sequential(nn.Dropout(), layer).eval() if wrapped else layer
    found = from_state_dict(module.state_dict())
    assert found.weight.tolist() == layer.weight[0].tolist()  # a copy: exact, no tolerance
    rows = torch_rows()
    expected = module(rows)[:, 0].detach().numpy()
    np.testing.assert_allclose(scores(found, rows.numpy()), expected, atol=1e-6)
    assert found.activation is None
    fits_a_probe(found)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"weight": torch.arange(3.0), "bias": torch.tensor(2.0)}, id="scalars"),
        pytest.param(
            {"weight": nn.Parameter(torch.arange(3.0)[None]), "bias": torch.tensor([2.0])},
            id="parameters",
        ),
        pytest.param(
            {"weight": torch.arange(3).bfloat16(), "bias": torch.tensor([2]).bfloat16()}, id="bf16"
        ),
        pytest.param({"weight": np.arange(3.0), "bias": np.float32(2)}, id="arrays"),
        pytest.param({"head.weight": [[0, 1, 2]], "head.bias": [2]}, id="lists"),
    ],
)
def test_a_linear_state_may_have_any_form(state):
    found = from_state_dict(state)
    assert found.weight.tolist() == [0, 1, 2]
    assert found.bias == 2


def test_a_scaler_among_the_tensors_comes_first():
    rows = torch_rows().numpy().astype(np.float64)
    state = {"weight": torch.arange(6.0), "bias": torch.tensor([1.0])}
    scaler = {"mean": torch.randn(WIDTH), "scale": torch.rand(WIDTH) + 0.5}
    found = from_state_dict(state | scaler)
    scaled = (rows - scaler["mean"].numpy()) / scaler["scale"].numpy()
    np.testing.assert_allclose(scores(found, rows), scaled @ np.arange(6) + 1, rtol=1e-5)


FUNCTIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


@pytest.mark.parametrize("hidden", FUNCTIONS)
@pytest.mark.parametrize("sizes", [(5,), (5, 3)], ids=["one-hidden-layer", "two-hidden-layers"])
def test_the_score_of_a_sequential_is_its_output(sizes, hidden):
    widths = [WIDTH, *sizes]
    steps = [
        step
        for i, out in enumerate(sizes)
        for step in (nn.Linear(widths[i], out), FUNCTIONS[hidden]())
    ]
    module = nn.Sequential(*steps, nn.Linear(sizes[-1], 1))
    found = from_state_dict(module.state_dict(), "mlp", hidden=hidden)
    rows = torch_rows()
    expected = module(rows)[:, 0].detach().numpy()
    np.testing.assert_allclose(scores(found, rows.double().numpy()), expected, atol=1e-5)
    assert found.bias == 0
    fits_a_probe(found)


def test_layers_come_in_the_order_of_their_numbers():
    module = nn.Sequential(*[nn.Identity()] * 2, nn.Linear(WIDTH, 4), *[nn.Identity()] * 7)
    module.append(nn.Linear(4, 4)).append(nn.Linear(4, 1, bias=False))
    state = {f"net.{name}": tensor for name, tensor in sorted(module.state_dict().items())}
    assert next(iter(state)) == "net.10.bias"
    found = from_state_dict(state, "mlp")
    matrices = [matrix.numpy.tolist() for matrix, _ in found.weight.layers]
    assert matrices == [module[i].weight.tolist() for i in (2, 10, 11)]
    assert found.weight.layers[2][1].numpy.tolist() == [0]


def test_layers_with_names_come_in_the_order_that_is_given():
    into, out = nn.Linear(WIDTH, 4), nn.Linear(4, 1)
    module = nn.ModuleDict({"out": out, "into": into})
    found = from_state_dict(module.state_dict(), "mlp", names=["into", "out"])
    assert found.weight.layers[0][0].numpy.tolist() == into.weight.tolist()
    assert found.weight.layers[1][1].numpy.tolist() == out.bias.tolist()


class Attention(nn.Module):
    """Attention over all positions so far; query and value are layers with a bias."""

    def __init__(self, num_heads: int, names: tuple[str, str], bias: bool = True):
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(WIDTH, num_heads, bias=bias))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        query, value = (getattr(self, name)(rows) for name in self.names)
        ends = range(1, len(rows) + 1)
        return torch.stack([(query[:end].softmax(0) * value[:end]).sum() for end in ends])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize(
    ("names", "given"),
    [
        pytest.param(("query", "value"), None, id="query-and-value"),
        pytest.param(("q", "v"), None, id="q-and-v"),
        pytest.param(("look", "read"), ("look", "read"), id="other-names"),
    ],
)
def test_the_score_of_an_attention_probe_is_its_output(names, given, num_heads, bias):
    module = Attention(num_heads, names, bias)
    found = from_state_dict(module.state_dict(), "attention", names=given)
    rows = torch_rows()
    expected = module(rows).detach().numpy()
    np.testing.assert_allclose(scores(found, rows.double().numpy()), expected, atol=1e-6)
    assert found.weight.query.shape == (num_heads, WIDTH)
    fits_a_probe(found)


@pytest.mark.parametrize("bias", [torch.tensor(0.5), torch.tensor([0.5])], ids=["scalar", "one"])
def test_a_query_that_is_a_parameter_and_a_bias_of_the_score_are_taken(bias):
    query, value = torch.randn(2, WIDTH)
    found = from_state_dict({"query": query, "value": value, "bias": bias}, "attention")
    assert found.weight == AttentionPool(query, value)
    assert found.bias == 0.5
    classifier = {"query": query, "head.weight": value[None], "head.bias": torch.tensor([2.0])}
    found = from_state_dict(classifier, "attention", names=["query", "head"])
    assert found.weight == AttentionPool(query, value)
    assert found.bias == 2


PAIR = {"query": np.ones((2, 3)), "value": np.ones((2, 3))}
NET = {"0.weight": np.ones((4, 3)), "0.bias": np.ones(4), "2.weight": np.ones((1, 4))}


@pytest.mark.parametrize(
    ("state", "options", "came", "allowed"),
    [
        pytest.param({}, {"kind": "tree"}, "kind is 'tree'", "linear, mlp, attention", id="kind"),
        pytest.param(nn.Linear(3, 1), {}, "state is Linear", "state_dict()", id="a-module"),
        pytest.param({}, {}, "layers are []", "kind='linear' has 1", id="nothing"),
        pytest.param(NET, {}, "['0', '2']", "kind='linear' has 1", id="two-layers"),
        pytest.param(
            {"weight": np.ones((1, 3))}, {"kind": "mlp"}, "['']", "has 2 or 3", id="one-layer"
        ),
        pytest.param(
            {f"{i}.weight": np.ones((1, 1)) for i in range(4)}, {"kind": "mlp"}, "'3'", "2 or 3",
            id="four-layers",
        ),
        pytest.param({"weight": np.ones((2, 3))}, {}, "makes 2 scores", "makes one", id="outputs"),
        pytest.param(
            {"weight": np.ones((1, 1, 3))}, {}, "[1, 3]", "a vector is", id="three-dimensions"
        ),
        pytest.param(
            {"weight": np.ones((1, 3)), "bias": np.ones(2)}, {}, "bias has shape (2,)",
            "one number", id="two-biases",
        ),
        pytest.param({"weight": [1, np.nan]}, {}, "weight is NaN", "finite", id="nan"),
        pytest.param(
            {"weight": [1.0], "bias": np.float64("inf")}, {}, "bias is", "finite", id="inf"
        ),
        pytest.param({"weight": ["a"]}, {}, "weight is ['a']", "numbers", id="words"),
        pytest.param(
            {"weight": [1.0], "mean": [1.0]}, {}, "['mean']", "mean and scale", id="half-a-scaler"
        ),
        pytest.param(
            {"weight": [1.0], "mean": [1.0], "scale": [0.0]}, {}, "must each have 1 values",
            "above 0", id="a-zero-scale",
        ),
        pytest.param(
            {"weight": [1.0], "mean": [1.0, 2.0], "scale": [1.0, 1.0]}, {},
            "must each have 1 values", "mean and scale", id="a-wide-scaler",
        ),
        pytest.param(
            {"weight": [1.0], "running_var": [1.0]}, {}, "['running_var']", "leave out", id="rest"
        ),
        pytest.param(
            NET | {"1.running_mean": np.ones(4)}, {"kind": "mlp"}, "['1.running_mean']",
            "leave out", id="batch-norm",
        ),
        pytest.param(
            NET | {"1.weight": np.ones(4), "1.bias": np.ones(4)}, {"kind": "mlp"}, "(4,)",
            "[out, 4]", id="layer-norm",
        ),
        pytest.param(
            {"into.weight": np.ones((4, 3)), "out.weight": np.ones((1, 4))}, {"kind": "mlp"},
            "['into', 'out']", "names=[...]", id="names-without-numbers",
        ),
        pytest.param(
            NET, {"kind": "mlp", "names": ["2", "0"]}, "makes 4 scores", "one", id="turned"
        ),
        pytest.param(
            NET, {"kind": "mlp", "names": ["0", "1"]}, "no '1.weight'", "2.weight", id="no-layer"
        ),
        pytest.param(
            NET, {"kind": "mlp", "names": ["0"]}, "['0']", "has 2 or 3", id="one-name"
        ),
        pytest.param(NET, {"kind": "mlp", "hidden": "elu"}, "'elu'", "relu, gelu", id="hidden"),
        pytest.param(NET, {"kind": "attention"}, "'0.bias'", "names=(query", id="no-query"),
        pytest.param(
            PAIR, {"kind": "attention", "names": ["query"]}, "['query']", "has 2", id="no-value"
        ),
        pytest.param(
            PAIR | {"position_weight": np.ones(2)}, {"kind": "attention"}, "['position_weight']",
            "leave out", id="positions",
        ),
        pytest.param(
            PAIR | {"value": np.ones((1, 3))}, {"kind": "attention"}, "(1, 3)", "num_heads",
            id="fewer-values",
        ),
        pytest.param(
            PAIR | {"bias": np.ones(2)}, {"kind": "attention"}, "(2,)", "one number",
            id="a-bias-for-each-head",
        ),
        pytest.param(
            {"q": np.ones((2, 3)), "v.weight": np.ones((2, 3)), "v.bias": np.ones(1)},
            {"kind": "attention"}, "of the value has shape (1,)", "each head", id="a-short-bias",
        ),
    ],
)  # fmt: skip
def test_tensors_that_are_no_probe_are_refused(state, options, came, allowed):
    text = sentence(lambda: from_state_dict(state, **options))
    assert came in text
    assert allowed in text


# Files


def test_a_file_has_the_same_weights_as_its_tensors(tmp_path):
    path = tmp_path / "p.safetensors"
    net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)).bfloat16()
    states = [
        (nn.Linear(WIDTH, 1).state_dict(), {}),
        (net.state_dict(), {"kind": "mlp", "hidden": "tanh"}),
        (Attention(2, ("a", "b")).state_dict(), {"kind": "attention", "names": ["a", "b"]}),
    ]
    for state, options in states:
        save_file(state, path)
        found, expected = from_safetensors(str(path), **options), from_state_dict(state, **options)
        assert found.bias == expected.bias
        assert found.activation is None
        rows = torch_rows().numpy()
        assert scores(found, rows).tolist() == scores(expected, rows).tolist()


def test_a_saved_linear_probe_is_such_a_file(tmp_path):
    from vllm_scope.analysis.probes import LinearProbe, save_probe

    save_probe(tmp_path / "p.safetensors", LinearProbe([1.0, 2.0], 0.5, "resid_post", 3))
    found = from_safetensors(tmp_path / "p.safetensors")
    assert (found.weight.tolist(), found.bias) == ([1, 2], 0.5)


def test_a_file_that_is_no_probe_is_refused_with_its_path(tmp_path):
    path = tmp_path / "p.safetensors"
    save_file({"weight": torch.ones(2, 3)}, path)
    text = sentence(lambda: from_safetensors(path))
    assert text.startswith(f"{path}: the last layer makes 2 scores")
    path.write_bytes(b"no header")
    assert "not safetensors" in sentence(lambda: from_safetensors(path))


@pytest.mark.parametrize("name", ["p.pt", "p.pkl", "p.bin", "p.joblib"])
def test_a_file_that_would_be_unpickled_is_refused_before_it_is_opened(tmp_path, name):
    assert "ends in .safetensors" in sentence(lambda: from_safetensors(tmp_path / name))


# What is imported


def test_neither_torch_nor_scikit_learn_is_imported_for_tensors():
    code = (
        "import sys; from vllm_scope.vectors.probe_weights import from_state_dict; "
        "from_state_dict({'weight': [1.0, 2.0]}); "
        "assert not {'torch', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.preprocessing", None)
    with pytest.raises(ImportError, match=r"pip install 'vllm-scope\[probes\]'"):
        from_sklearn(LogisticRegression())


def test_a_notebook_shows_weights_in_one_line():
    found = ProbeWeights(np.linspace(0, 1, 2048, dtype=np.float32), -0.5, "sigmoid")
    assert repr(found) == "<ProbeWeights: 2048 numbers, bias -0.5, activation sigmoid>"
    layers = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
    shown = repr(from_state_dict(layers.state_dict(), "mlp"))
    assert "Mlp(" in shown
    assert len(shown) < 200
