"""Linear probes: folded through their scaler, scored, saved and read back."""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.toy_model import TensorResult
from vllm_scope.analysis.probes import LinearProbe, load_probe, save_probe, train_probe
from vllm_scope.analysis.rows import token_rows, truth_of
from vllm_scope.errors import SpecError

STREAM = ("resid_post", 5)


def labelled(n: int = 200):
    """Rows far from the origin, of very different widths, one of them constant."""
    torch.manual_seed(0)
    labels = torch.rand(n) < 0.4
    rows = torch.randn(n, 8) * torch.logspace(-2, 2, 8) + 50
    rows[:, 2] += 0.5 * labels
    rows[:, 7] = 3.0
    return rows, labels


def test_a_probe_scores_as_the_pipeline_that_it_was_folded_from():
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows, labels = labelled()
    classifier = LogisticRegression(C=0.5, solver="newton-cholesky")
    pipeline = make_pipeline(StandardScaler(), classifier).fit(rows.numpy(), labels.numpy())
    probe = train_probe(rows, labels, STREAM, c=0.5)
    np.testing.assert_allclose(
        probe.scores(rows), pipeline.decision_function(rows.numpy()), atol=2e-3
    )
    np.testing.assert_allclose(
        probe.probabilities(rows), pipeline.predict_proba(rows.numpy())[:, 1], atol=1e-3
    )
    expected = roc_auc_score(labels, pipeline.decision_function(rows.numpy()))
    assert probe.auroc(rows, labels) == pytest.approx(expected, abs=2e-3)
    assert expected > 0.7


def test_scores_are_float32_of_rows_of_any_shape_and_dtype():
    probe = LinearProbe([1.0, -2.0], 0.5, *STREAM)
    rows = torch.tensor([[[1.0, 1.0]], [[3.0, 0.0]]], dtype=torch.bfloat16)
    scores = probe.scores(rows)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[-0.5], [3.5]]


def test_auroc_counts_the_pairs_in_order():
    probe = LinearProbe([1.0], 0.0, *STREAM)
    rows = torch.tensor([[1.0], [2.0], [2.0], [3.0]])
    # Of the four pairs two are in order, one is not, one is a tie.
    assert probe.auroc(rows, [False, True, False, True]) == 0.875
    assert probe.auroc(rows, torch.tensor([True, True, False, False])) == 0.125


def test_a_notebook_shows_a_probe_in_one_line():
    probe = LinearProbe([0.5] * 2048, -1.25, *STREAM)
    assert repr(probe) == "<LinearProbe of resid_post 5: 2048 weights, bias -1.25, threshold 0>"
    rows, labels = labelled()
    fitted = train_probe(rows, labels, STREAM, pooling="mean").calibrated(rows, labels)
    assert repr(fitted).endswith("pooling 'mean', calibrated>")


def test_a_probe_survives_its_files_exactly(tmp_path):
    rows, labels = labelled()
    probe = train_probe(rows, labels, ("post_block", 5), pooling="last_prompt", model="org/model")
    save_probe(tmp_path / "p.safetensors", probe)
    again = load_probe(str(tmp_path / "p.safetensors"))
    assert again.weight.tolist() == probe.weight.tolist()
    assert (again.bias, again.threshold) == (probe.bias, 0.0)
    assert (again.site, again.layer) == STREAM
    assert (again.pooling, again.model) == ("last_prompt", "org/model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json", "p.safetensors"]


def write(tmp_path, tensors, body):
    save_file(tensors, tmp_path / "p.safetensors")
    (tmp_path / "p.json").write_text(body if isinstance(body, str) else json.dumps(body))
    return tmp_path / "p.safetensors"


WEIGHT = {"weight": np.float32([2, 4]), "bias": np.float32([1])}
BODY = {"site": "resid_post", "layer": 5}


def test_a_scaler_in_the_file_is_folded(tmp_path):
    scaler = {"mean": np.float32([10, 20]), "scale": np.float32([2, 8])}
    probe = load_probe(write(tmp_path, WEIGHT | scaler, BODY))
    # ((12 - 10) / 2) * 2 + ((28 - 20) / 8) * 4 + 1
    assert probe.scores(torch.tensor([12.0, 28.0])).item() == 7.0


@pytest.mark.parametrize(
    ("tensors", "body", "message"),
    [
        pytest.param({"weight": WEIGHT["weight"]}, BODY, "has .*'weight'", id="no-bias"),
        pytest.param(WEIGHT | {"mean": np.float32([1, 1])}, BODY, "has .*'mean'", id="half-scaler"),
        pytest.param(WEIGHT | {"x": np.float32([1])}, BODY, "has .*'x'", id="one-more"),
        pytest.param(WEIGHT | {"bias": np.float32([1, 2])}, BODY, "one number", id="two-biases"),
        pytest.param(
            WEIGHT | {"weight": np.float32([[1, 2]])}, BODY, r"weight has shape \[1, 2\]",
            id="matrix",
        ),
        pytest.param(
            WEIGHT | {"weight": np.float32([np.inf, 2])}, BODY, "weight has inf", id="inf"
        ),
        pytest.param(WEIGHT | {"bias": np.float32([np.nan])}, BODY, "bias is nan", id="nan-bias"),
        pytest.param(
            WEIGHT | {"mean": np.float32([1, 1]), "scale": np.float32([1, 0])}, BODY,
            "values of scale must be above 0", id="zero-scale",
        ),
        pytest.param(
            WEIGHT | {"mean": np.float32([1]), "scale": np.float32([1])}, BODY,
            "must each have 2 values", id="short-scaler",
        ),
        pytest.param(WEIGHT, "{", "is not JSON", id="no-json"),
        pytest.param(WEIGHT, [], "its fields are", id="a-list"),
        pytest.param(WEIGHT, {"site": "resid_post"}, "its fields are", id="no-layer"),
        pytest.param(WEIGHT, BODY | {"kind": "x"}, "its fields are", id="another-field"),
        pytest.param(WEIGHT, BODY | {"layer": "5"}, "has layer '5'", id="layer-as-text"),
        pytest.param(WEIGHT, BODY | {"site": ["x"]}, "has site", id="site-a-list"),
        pytest.param(WEIGHT, BODY | {"pooling": 1}, "pooling is 1", id="pooling-a-number"),
        pytest.param(WEIGHT, BODY | {"threshold": None}, "threshold is None", id="no-threshold"),
        pytest.param(WEIGHT, BODY | {"threshold": True}, "threshold is True", id="truth"),
    ],
)  # fmt: skip
def test_files_that_are_no_probe_are_refused(tmp_path, tensors, body, message):
    with pytest.raises(SpecError, match=message):
        load_probe(write(tmp_path, tensors, body))


def test_a_probes_file_is_safetensors(tmp_path):
    for act in (load_probe, lambda path: save_probe(path, LinearProbe([1.0], 0.0, *STREAM))):
        with pytest.raises(SpecError, match=r"ends in '\.pkl'"):
            act(tmp_path / "p.pkl")


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        pytest.param(torch.ones(2, 3), [True], "labels of shape", id="too-few-labels"),
        pytest.param(torch.ones(2, 3), [True, True], "all the same", id="one-kind"),
        pytest.param(torch.ones(3), [True, False, True], r"\[n, hidden_size\]", id="one-row"),
        pytest.param(torch.full((2, 1), torch.inf), [True, False], "NaN or Inf", id="inf"),
        pytest.param(np.full((2, 1), 1e39), [True, False], "Inf in float32", id="beyond-float32"),
    ],
)
def test_rows_that_no_probe_can_be_fitted_to_are_refused(rows, labels, message):
    with pytest.raises(SpecError, match=message):
        train_probe(rows, labels, STREAM)


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 1], [False, True, True], [0.0, 1.0, 1.0], np.array([0, 1, 1], np.uint8),
        torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1], dtype=torch.bfloat16),
        np.array([False, True, 1], object),
    ],
)  # fmt: skip
def test_labels_are_0_and_1_or_false_and_true(labels):
    assert truth_of(labels).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("labels", "values"),
    [
        pytest.param([0, 1, 2], r"\[0, 1, 2\]", id="three-classes"),
        pytest.param([-1, 1, 1], r"\[-1, 1\]", id="signs"),
        pytest.param(np.array([1, 2, 2]), r"\[1, 2\]", id="from-1"),
        pytest.param(torch.tensor([0.25, 0.75, 0.75]), r"\[0.25, 0.75\]", id="shares"),
        pytest.param([0, 1, float("nan")], r"\[0.0, 1.0, nan\]", id="nan"),
        pytest.param(["lie", "truth", "lie"], r"\['lie', 'truth'\]", id="texts"),
        pytest.param(["0", "1", "1"], r"\['0', '1'\]", id="numbers-as-texts"),
        pytest.param([0, None, 1], r"\[0, None, 1\]", id="none"),
    ],
)
def test_other_labels_are_refused_wherever_labels_are_taken(labels, values):
    rows, probe = torch.randn(3, 2), LinearProbe([1.0, 2.0], 0.0, *STREAM)
    results = [TensorResult({STREAM: row[None]}) for row in rows]
    for act in (
        lambda: train_probe(rows, labels, STREAM),
        lambda: probe.auroc(rows, labels),
        lambda: probe.calibrated(rows, labels),
        lambda: token_rows(results, labels, STREAM),
    ):
        with pytest.raises(SpecError, match=f"labels has the values {values}; a label is 0 or 1"):
            act()


def test_labels_of_lists_that_differ_in_length_are_refused():
    with pytest.raises(SpecError, match="whose parts differ in length"):
        train_probe(torch.ones(2, 3), [[True], [True, False]], STREAM)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_rows_may_be_numpy_arrays(dtype):
    rows, labels = labelled()
    given = rows.numpy().astype(dtype)
    given.setflags(write=False)
    same = torch.from_numpy(given.copy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe = train_probe(given[::-1], labels.numpy()[::-1], STREAM)
        assert torch.equal(probe.scores(given), probe.scores(same))
    np.testing.assert_allclose(probe.weight, train_probe(same, labels, STREAM).weight, rtol=1e-3)
    assert probe.auroc(given, labels) == probe.auroc(same, labels)
    again = [probe.calibrated(some, labels).calibration for some in (given, same)]
    assert again[0] == again[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"stream": "resid_post"}, r"stream is 'resid_post'; it must be \(site, layer\)",
            id="site-alone",
        ),
        pytest.param({"stream": ("nowhere", 5)}, "has site 'nowhere'", id="no-site"),
        pytest.param(
            {"rows": {STREAM: torch.ones(2, 3)}},
            r"rows is \{.*; it must be a tensor or a numpy array",
            id="rows-by-stream",
        ),
        pytest.param({"rows": [[1.0], [2.0]]}, r"rows is \[\[1.0\]", id="lists"),
        pytest.param({"rows": np.array([["a"], ["b"]])}, r"rows is array\(", id="texts"),
        pytest.param(
            {"pooling": "lastprompt"},
            "pooling is 'lastprompt'; it must be one of all, prompt, generated, last_prompt, "
            "last, or",
            id="no-pooling",
        ),
    ],
)  # fmt: skip
def test_arguments_that_are_no_probes_are_refused_in_one_sentence(change, message):
    given = {"rows": torch.ones(2, 3), "labels": [0, 1], "stream": STREAM} | change
    with pytest.raises(SpecError, match=message):
        train_probe(**given)


def test_rows_of_another_size_are_refused():
    with pytest.raises(SpecError, match="for 1 values"):
        LinearProbe([1.0], 0.0, *STREAM).scores(torch.ones(2, 3))


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ImportError, match=r"pip install 'vllm-scope\[probes\]'"):
        train_probe(torch.ones(2, 3), [True, False], STREAM)


def test_auroc_is_of_all_rows_at_once():
    rows = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 1], [1, 0, 1, 1]], dtype=torch.bool)
    probe = LinearProbe(np.arange(8.0) - 4, 0.0, *STREAM)
    flat = probe.auroc(rows.flatten(0, 1), labels.flatten())
    assert probe.auroc(rows.requires_grad_(), labels) == flat
