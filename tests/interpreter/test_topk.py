"""The strongest features, as torch finds them."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import long_except
from vllm_scope.worker.held_saes import GROUP
from vllm_scope.worker.maxima import maxima
from vllm_scope.worker.topk import MOST, MOST_GROUPS, fits, put_pairs


def features_of(products, bias, threshold):
    features = products + bias
    return features if threshold is None else features.masked_fill(features <= threshold, 0)


SIZES = [(40, 17), (5, 3), (260, 32)]


@pytest.mark.parametrize(("num_groups", "count"), long_except(SIZES, (40, 17)))
@pytest.mark.parametrize("thresholds", [True, False])
def test_the_strongest_of_each_row(thresholds, num_groups, count):
    assert fits(num_groups, count)
    generator = torch.Generator().manual_seed(num_groups)
    width = num_groups * GROUP
    products = torch.randn(4, width, generator=generator)
    bias, threshold = torch.randn(2, width, generator=generator) / 4
    products[1] = products[1].round()  # many are equal
    products[2, 7] = torch.nan
    products[3] -= 10  # none is active
    given = threshold if thresholds else None
    packed = torch.full((4, 2 * count + 5), -7, dtype=torch.int32)
    into, first = packed[:, 1:], count + 1
    indices, values = into[:, :count], into[:, first:].view(torch.float32)
    put_pairs(maxima(products, bias, given, GROUP), products, bias, given, count, into, first)
    features = features_of(products, bias, given)
    expected = features.topk(count).values.relu()
    found = values[:, :count]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    at = indices[:, :count].long()
    assert all(len(set(row)) == count for row in at.tolist())
    torch.testing.assert_close(features.gather(1, at).relu(), found, rtol=0, atol=0, equal_nan=True)
    if not thresholds:
        order = torch.sort(features, dim=1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(at[:2], order[:2]), "of equal ones, the lowest number comes first"
    assert (packed[:, [0, count + 1]] == -7).all()
    assert (packed[:, 2 * count + 2 :] == -7).all()


def test_no_rows_change_nothing():
    empty = torch.zeros(0, 2 * GROUP)
    none = torch.zeros(0, 8, dtype=torch.int32)
    put_pairs(torch.zeros(0, 2), empty, empty.sum(0), None, 2, none, 4)


@pytest.mark.parametrize("thresholds", [True, False])
def test_as_many_as_a_program_holds_one_in_each_group(thresholds):
    """Row 0 has negative features alone; row 1 has a NaN whose sign bit is set."""
    num_groups, count = 70, MOST
    width = num_groups * GROUP
    products = torch.full((2, width), -5.0)
    products[0, ::GROUP] = torch.arange(num_groups) / 100 - 4
    products[1, ::GROUP] = torch.arange(num_groups) + 9.0
    products[1, 7] = torch.tensor(-(1 << 22), dtype=torch.int32).view(torch.float32)
    bias = torch.randn(width, generator=torch.Generator().manual_seed(1)) / 4
    threshold = bias.clone()
    threshold[::GROUP] = 40
    given = threshold if thresholds else None
    packed = torch.full((2, 2 * count), -7, dtype=torch.int32)
    put_pairs(maxima(products, bias, given, GROUP), products, bias, given, count, packed, count)
    features = features_of(products, bias, given)
    order = torch.sort(features, dim=1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(packed[:, :count].long(), order)
    values = packed[:, count:].view(torch.float32)
    expected = features.gather(1, order).relu()
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_what_fits():
    assert fits(MOST_GROUPS, MOST)
    assert not fits(MOST_GROUPS + 1, MOST)
    assert not fits(1, MOST + 1)
