"""The figures of a harvest equal those of numpy in float64, however the rows are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope.errors import FileError
from vllm_scope.harvests.statistics import OUTLIER, Statistics, compiled_count


def rows_of(count, width=48):
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(count)) * 3 + 1
    rows[::7, 5] = 900
    return rows.bfloat16()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_figures_equal_float64_of_all_rows(cuts):
    rows = rows_of(sum(cuts))
    parts = [Statistics.of_rows(iter([block])) for block in rows.split(cuts)]
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    exact = rows.double().numpy()
    norms = np.linalg.norm(exact, axis=1)
    outlying = np.abs(exact) > OUTLIER * norms[:, None] / np.sqrt(exact.shape[1])
    body = found.to_json()
    assert body["rows"] == len(rows)
    assert body["norm"] == pytest.approx(
        {"mean": norms.mean(), "sd": norms.std(), "min": norms.min(), "max": norms.max()},
        rel=1e-4, abs=1e-2,
    )  # fmt: skip
    np.testing.assert_allclose(found.mean, exact.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.variance, exact.var(0), rtol=1e-4, atol=1e-3)
    assert body["norm_of_mean"] == pytest.approx(np.linalg.norm(exact.mean(0)), rel=1e-5)
    assert body["outliers"] == {
        "values": int(outlying.sum()),
        "rows": int(outlying.any(1).sum()),
        "dimensions": {"5": int(outlying[:, 5].sum())},
    }
    again = Statistics.parse(Statistics.summary(iter([rows]))["statistics"].numpy(), "x")
    np.testing.assert_allclose(again.values, found.values, rtol=1e-4, atol=1e-3)


def test_rows_that_are_not_finite_are_counted_and_in_no_other_figure():
    rows = rows_of(20).float()
    broken = torch.cat([rows, rows[:2]])
    broken[20, 3], broken[21, 4] = torch.nan, torch.inf
    found = Statistics.of_rows(iter([broken])).to_json()
    assert found["rows_not_finite"] == 2
    assert found | {"rows_not_finite": 0} == Statistics.of_rows(iter([rows])).to_json()
    none = Statistics.of_rows(iter([broken[20:]])).to_json()
    assert (none["rows"], none["norm"]["max"]) == (0, 0.0)
    assert Statistics.of_rows(iter([rows[:0]])).to_json()["rows"] == 0


@pytest.mark.parametrize("width", [8, 50, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dimension_is_counted_in_more_rows_than_a_byte_can_count(width, dtype):
    """The rows are those of one of three layers, as a request's are."""
    rows = torch.zeros(700, 3, width, dtype=dtype)
    rows[:, 1] = 1 / 4
    at = torch.arange(700) % width
    at[at == 3] = width - 1
    rows[torch.arange(700), 1, at] = 100.0
    found = Statistics.of_rows(iter([rows[:, 1]]))
    # A row of 8 numbers has no outlier: no number exceeds sqrt(8) times the root mean square.
    outliers = torch.bincount(at, minlength=width) if width > OUTLIER**2 else torch.zeros(width)
    assert found.values[2].tolist() == outliers.tolist()
    assert found.counts[:3].tolist() == [700, 0, 700 if width > OUTLIER**2 else 0]
    rows[:, 1] = 0
    rows[:, 1, 3] = -100.0
    found = Statistics.of_rows(iter([rows[:, 1]]))
    assert found.values[2].tolist() == [
        700.0 * (i == 3 and width > OUTLIER**2) for i in range(width)
    ]
    assert found.values[1, 3] == 700 * 100.0**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_small_variance_beside_a_large_mean_is_that_of_float64(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = (
        500 + torch.randn(4000, 64, generator=generator) * (0.2 if dtype.itemsize > 2 else 3)
    ).to(dtype)
    found, exact = Statistics.of_rows(iter(rows.split(700))), rows.double().numpy()
    np.testing.assert_allclose(found.mean, exact.mean(0), rtol=1e-7)
    np.testing.assert_allclose(found.variance, exact.var(0), rtol=1e-4)


def test_rows_near_the_largest_float32_are_figured_without_a_warning(recwarn):
    found = Statistics.of_rows(iter([torch.full((300, 8), 5e18)])).to_json()
    assert (found["rows"], found["rows_not_finite"]) == (300, 0)
    assert found["norm"]["mean"] == pytest.approx(5e18 * 8**0.5)
    assert not recwarn


def test_rows_whose_squared_norm_no_float32_holds_are_broken():
    found = Statistics.of_rows(iter([torch.full((3, 8), 1e19)])).to_json()
    assert (found["rows"], found["rows_not_finite"]) == (0, 3)


def test_an_outlier_is_more_than_six_times_the_root_mean_square():
    zero, spike = torch.zeros(2, 36), torch.zeros(1, 36)
    spike[0, 7] = 3.0  # exactly six times
    found = Statistics.of_rows(iter([zero, spike]))
    assert not found.values[2].any()


def test_rows_are_counted_without_the_gil():
    assert compiled_count().targetoptions["nogil"]
    assert compiled_count() is compiled_count()


def test_damaged_figures_are_refused():
    with pytest.raises(FileError, match="its statistics are of shape"):
        Statistics.parse(np.zeros(9), "x")
