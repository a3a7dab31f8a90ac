"""What is made of sums equals what is made of the rows, by scikit-learn in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from vllm_scope import Probe, SpecError
from vllm_scope.analysis.contrast import mean_difference
from vllm_scope.analysis.moments import (
    difference_of_means,
    lda_probe,
    principal_components,
    ridge_probe,
    sums_at,
    whitening,
)
from vllm_scope.batch.sums import Sums, bytes_of
from vllm_scope.worker.device_sums import DeviceSums

STREAM = ("resid_post", 2)
WIDTH = 24
#: Of weights, as for sums that a device made of float32 rows.
NEAR = {"rtol": 1e-4, "atol": 1e-7}


def sums_of(rows: np.ndarray, targets: np.ndarray | None = None) -> Sums:
    """As the worker makes them, of float32 rows that come in parts."""
    kind = True, targets is not None
    room = torch.empty(bytes_of(WIDTH, 4, *kind), dtype=torch.uint8)
    made = DeviceSums(room, WIDTH, torch.float32, *kind)
    given = torch.from_numpy(rows.astype(np.float32))
    for at in np.array_split(np.arange(len(rows)), 5):
        ys = np.zeros(len(at)) if targets is None else targets[at]
        made.add(lambda some: given[torch.from_numpy(some)], at, ys)
    return Sums.of_packed(made.read())


@pytest.fixture(scope="module")
def rows() -> dict[str, np.ndarray]:
    """Correlated rows with a large mean, as those of a residual stream; one number has a hundred
    times the variance of the others."""
    rng = np.random.default_rng(5)
    mixing = rng.standard_normal((WIDTH, WIDTH)) * np.where(np.arange(WIDTH) == 3, 10, 1)
    means = {"a": rng.standard_normal(WIDTH) + 20, "b": rng.standard_normal(WIDTH) + 20}
    made = {k: m + rng.standard_normal((n, WIDTH)) @ mixing
            for (k, m), n in zip(means.items(), (700, 300), strict=True)}  # fmt: skip
    return {label: some.astype(np.float32).astype(np.float64) for label, some in made.items()}


@pytest.fixture(scope="module")
def found(rows):
    return {(*STREAM, label): sums_of(some) for label, some in rows.items()}


def test_the_difference_of_means_is_that_of_the_rows(rows, found):
    streams = [{STREAM: torch.from_numpy(rows[label])} for label in "ab"]
    for normalise in (True, False):
        ours = difference_of_means(found, "a", "b", normalise=normalise)
        theirs = mean_difference(*streams, normalise=normalise)
        np.testing.assert_allclose(ours[STREAM], theirs[STREAM], rtol=1e-5)
        assert ours.provenance == theirs.provenance


@pytest.mark.parametrize("alpha", [0.0, 1.0, 500.0])
def test_a_ridge_probe_is_that_of_the_rows(rows, found, alpha):
    x, y = np.concatenate([*rows.values()]), np.repeat([1.0, -1.0], [700, 300])
    exact = Ridge(alpha=alpha).fit(x, y)
    for probe in (
        ridge_probe(found, STREAM, alpha=alpha, targets={"a": 1, "b": -1}),
        ridge_probe({(*STREAM, "all"): sums_of(x, y)}, STREAM, alpha=alpha),
    ):
        np.testing.assert_allclose(probe.weight, exact.coef_, **NEAR)
        np.testing.assert_allclose(probe.bias, exact.intercept_, rtol=1e-4)
        scores = probe.scores(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(scores, exact.predict(x), atol=1e-3)


@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_an_lda_probe_is_that_of_the_rows(rows, found, shrinkage):
    x, y = np.concatenate([*rows.values()]), np.repeat([1, 0], [700, 300])
    exact = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage or None).fit(x, y)
    if shrinkage:
        # scikit-learn shrinks after it has divided by the standard deviations; this one does not.
        within = sum(len(some) * np.cov(some.T, bias=True) for some in rows.values()) / len(x)
        shrunk = 0.7 * within + 0.3 * np.trace(within) / WIDTH * np.eye(WIDTH)
        exact = LinearDiscriminantAnalysis(
            solver="lsqr", covariance_estimator=_Known(shrunk)
        ).fit(x, y)  # fmt: skip
    probe = lda_probe(found, STREAM, "a", "b", shrinkage=shrinkage, pooling="all")
    np.testing.assert_allclose(probe.weight, exact.coef_[0], **NEAR)
    np.testing.assert_allclose(probe.bias, exact.intercept_[0], rtol=1e-4, atol=1e-5)
    assert isinstance(probe.action("p"), Probe)
    with_others = {**found, (*STREAM, "c"): sums_of(rows["a"] + 5)}
    both = lda_probe(with_others, STREAM, ["a"], ["b"], shrinkage=shrinkage)
    np.testing.assert_array_equal(both.weight, probe.weight)


def test_a_label_is_in_one_class_and_counts_once(rows, found):
    with pytest.raises(SpecError, match=r"the labels \['a'\] are in both classes"):
        lda_probe(found, STREAM, ["a", "b"], "a")
    assert sums_at(found, STREAM, ["a", "a"]).count == len(rows["a"])


class _Known:
    """A covariance estimator that is told the covariance."""

    def __init__(self, covariance: np.ndarray) -> None:
        self.covariance_ = covariance

    def fit(self, _rows: np.ndarray) -> _Known:
        return self


def test_principal_components_are_those_of_the_rows(rows, found):
    x = np.concatenate([*rows.values()])
    exact = PCA(n_components=4, svd_solver="full").fit(x)
    ours = principal_components(sums_at(found, STREAM), 4)
    np.testing.assert_allclose(ours.variances, exact.explained_variance_, rtol=1e-8)
    np.testing.assert_allclose(ours.variances / ours.total, exact.explained_variance_ratio_)
    signs = np.sign((ours.directions * exact.components_).sum(1))
    np.testing.assert_allclose(ours.directions, exact.components_ * signs[:, None], atol=1e-7)
    np.testing.assert_allclose(ours.transform(x), exact.transform(x) * signs, atol=1e-5)


def test_white_rows_have_the_identity_as_their_covariance(rows, found):
    x = np.concatenate([*rows.values()])
    made = whitening(sums_at(found, STREAM))
    white = made(x)
    np.testing.assert_allclose(np.cov(white.T, bias=True), np.eye(WIDTH), atol=1e-7)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(made.matrix, made.matrix.T, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize(("num_rows", "mean"), [(WIDTH, 0), (WIDTH, 50), (WIDTH, 1000), (6, 0)])
def test_too_few_rows_are_found_whatever_their_rounding(seed, num_rows, mean, scale):
    """As many rows as numbers have a covariance of one rank less."""
    rng = np.random.default_rng(seed)
    scales = np.where(np.arange(WIDTH) == 3, scale, 1)

    def in_halves(count: int) -> dict[tuple[str, int, str], Sums]:
        made = rng.standard_normal((count, WIDTH)) * scales + mean
        return {(*STREAM, name): sums_of(made[i::2]) for i, name in enumerate("ab")}

    with pytest.raises(SpecError, match=r"is singular; take more"):
        ridge_probe(in_halves(num_rows), STREAM, alpha=0, targets={"a": 1, "b": 0})
    with pytest.raises(SpecError, match=r"is singular; take more"):
        lda_probe(in_halves(num_rows), STREAM, "a", "b")
    fitted = ridge_probe(in_halves(3 * WIDTH), STREAM, alpha=0, targets={"a": 1, "b": 0})
    assert np.isfinite(fitted.weight).all()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_rows_that_are_all_the_same_are_not_whitened(count):
    """The squares of such rows and the square of their mean differ by rounding."""
    same = np.tile(np.linspace(0.1, 7.7, WIDTH), (count, 1))
    with pytest.raises(SpecError, match="the rows are all the same"):
        whitening(sums_of(same))


def test_bad_input_is_refused_in_one_sentence(found):
    few = {(*STREAM, "few"): sums_of(np.eye(WIDTH)[:3]), (*STREAM, "b"): sums_of(np.eye(WIDTH)[:2])}
    bare = {(*STREAM, label): Sums(3, np.ones(WIDTH)) for label in "ab"}
    lost = {(*STREAM, "a"): Sums(3, np.ones(WIDTH), missing=2)}
    none = {(*STREAM, "a"): Sums(0, np.zeros(WIDTH), missing=2)}
    good, bad = found[*STREAM, "a"], np.full(WIDTH, np.inf)
    broken = [
        {(*STREAM, "a"): replace(good, **some)}
        for some in ({"x": -bad}, {"xx": good.xx + bad}, {"xy": bad}, {"y": np.nan}, {"yy": np.inf})
    ]
    for call, sentence in (
        (lambda: difference_of_means(found, "a", "c"), r"no rows with label 'c' at resid_post\.2"),
        (lambda: difference_of_means({}, "a", "c"), r"label 'a' or 'c'; there are none at all"),
        (lambda: difference_of_means(found, "a", "a"), r"the two means do not differ"),
        (lambda: ridge_probe(found, STREAM), r"have no targets; give targets"),
        (lambda: ridge_probe(found, STREAM, alpha=-1), r"alpha is -1; it must be a finite number"),
        (
            lambda: ridge_probe(bare, STREAM, targets={"a": 1, "b": 0}),
            r"no covariance; send the requests",
        ),
        (
            lambda: ridge_probe(few, STREAM, alpha=0, targets={"few": 1, "b": 0}),
            r"is singular; take more",
        ),
        (
            lambda: ridge_probe(found, STREAM, targets={"a": 1.0}),
            r"targets is \{'a': 1.0\}, .* two or more .* resid_post.2, which are \['a', 'b'\]",
        ),
        (
            lambda: ridge_probe(found, STREAM, targets={"a": 1, "b": 1}),
            r"two or more of the labels",
        ),
        (lambda: ridge_probe(found, STREAM, targets={}), r"two or more of the labels"),
        (
            lambda: ridge_probe(found, STREAM, targets=["a"]),
            r"targets is \['a'\]; it must be a dict",
        ),
        (lambda: ridge_probe(found, STREAM, targets={"a": "x", "b": 1}), r"targets\['a'\] is 'x'"),
        (
            lambda: ridge_probe(found, STREAM, targets={"a": np.nan, "b": 1}),
            r"targets\['a'\] is nan; it must be finite",
        ),
        (
            lambda: ridge_probe(found, "resid_post"),
            r"stream is 'resid_post'; it must be \(site, layer\)",
        ),
        (
            lambda: lda_probe(found, STREAM, "a", "b", pooling="lastprompt"),
            r"pooling is 'lastprompt'; it must be one of all,",
        ),
        (
            lambda: ridge_probe(found, STREAM, targets={"a": 1, "b": 0}, pooling="lastprompt"),
            r"pooling is 'lastprompt'; it must be one of all,",
        ),
        (lambda: lda_probe(found, "resid_post", "a", "b"), r"stream is 'resid_post'; it must be"),
        (lambda: sums_at(found, "resid_post"), r"stream is 'resid_post'; it must be"),
        (lambda: lda_probe(found, STREAM, "a", "b", shrinkage=2), r"a number from 0 to 1"),
        (lambda: sums_at(found, ("resid_post", 9)), r"there are no sums at resid_post\.9"),
        (
            lambda: sums_at(found | {(*STREAM, "b"): Sums(3, np.ones(WIDTH))}, STREAM),
            r"labels \['a', 'b'\] at resid_post\.2 do not fit together: .* same options of Moments",
        ),
        (lambda: sums_at(none, STREAM), r"2 rows with label 'a' at resid_post\.2 are missing"),
        (lambda: sums_at(lost, STREAM), r"2 rows with label 'a' at resid_post\.2 are missing"),
        *((lambda one=one: sums_at(one, STREAM), r"have NaN or Inf") for one in broken),
        (lambda: principal_components(found[*STREAM, "a"], 25), r"rows have 1 to 24 components"),
        (lambda: whitening(found[*STREAM, "a"], 0), r"floor is 0; it must be a number above 0"),
    ):
        with pytest.raises(SpecError, match=sentence):
            call()
