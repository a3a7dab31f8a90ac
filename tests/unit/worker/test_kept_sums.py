"""Sums in one reserved memory: what fits, what is missing, and what a failure leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker.test_summing import CPU, PLACES, POINTS, WIDTH, WIDTHS, read
from vllm_scope.batch.labels import Labels
from vllm_scope.batch.sums import Sums, bytes_of
from vllm_scope.program.layout import Layout
from vllm_scope.request.heads import Summed
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.request.selectors import Word
from vllm_scope.worker.device_sums import DeviceSums
from vllm_scope.worker.packer import first_slots
from vllm_scope.worker.summing import Summing

LAYOUT = (Layout((), ((Summed.of(0), POINTS[:1]),)),)


def added(summing: Summing, key: int, positions: range, value: float = 1.0) -> None:
    """Add rows of ones."""
    keys, zeros = np.full(len(positions), key), np.zeros(len(positions), np.int32)
    labels = Labels(keys, np.array(positions), zeros, LAYOUT, np.arange(len(positions)))
    firsts = first_slots(labels, None, WIDTHS)
    words = torch.full((int(firsts[-1]) + 4, WIDTH), value)
    summing.add(words.view(torch.int64), labels, None, firsts, None)


def summing_of(*asked: ResolvedMoments, room: int = 1 << 20, num_prompt: int = 10) -> Summing:
    made = Summing(torch.float32, CPU, WIDTHS, room)
    for key, one in enumerate(asked):
        made.add_request(key, num_prompt, [one])
    return made


def moments(name="m", by="a", target=None, covariance=True) -> ResolvedMoments:
    return ResolvedMoments(name, PLACES[:1], Word("all"), by, target, covariance)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=30))
def test_what_was_dropped_leaves_room_for_as_many_bytes(some):
    """Sums of any kinds fit if their bytes do, and those that stay keep their numbers."""
    room = 2 * bytes_of(WIDTH, 4, True, True)
    summing, held = Summing(torch.float32, CPU, WIDTHS, room), {}
    for key, (number, covariance, targets) in enumerate(some):
        name = f"n{number}"
        if name in held:
            assert summing.drop(name)
            del held[name]
            continue
        size = bytes_of(WIDTH, 4, covariance, targets)
        fits = sum(n for n, _ in held.values()) + size <= room
        one = moments(name, "a", 2.0 if targets else None, covariance)
        summing.add_request(key, 10, [one])
        added(summing, key, range(10), float(key + 1))
        held[name] = (size if fits else 0), (key + 1.0 if fits else None)
        for other, (_, value) in held.items():
            found = Sums.of_packed(summing.read(other, PLACES[0], "a"))
            assert (found.count, found.missing) == ((0, 10) if value is None else (10, 0))
            if value is not None:
                assert (found.x == 10 * value).all()
                assert found.xx is None or (found.xx == 10 * value**2).all()
                assert found.xy is None or (found.xy == 20 * value).all()


def test_rows_of_another_kind_than_their_sums_are_missing():
    summing = summing_of(moments(target=2.0), moments(), moments(covariance=False, target=1.0))
    for key in range(3):
        added(summing, key, range(10))
    found = read(summing)
    assert (found.count, found.missing, found.y) == (10, 20, 20.0)


def test_an_error_leaves_the_other_rows_of_a_step_alone(monkeypatch):
    def fails(*_args):
        raise RuntimeError("cudaHostAlloc")

    summing = summing_of(moments())
    with monkeypatch.context() as patch:
        patch.setattr("vllm_scope.worker.device_sums.DeviceSums.add", fails)
        added(summing, 0, range(4))
    added(summing, 0, range(4, 10))
    found = read(summing)
    assert (found.count, found.missing) == (6, 4)


def test_products_that_a_reading_cannot_make_are_missing(monkeypatch):
    def full(*_args):
        raise torch.OutOfMemoryError

    summing = summing_of(moments())
    added(summing, 0, range(6))
    with monkeypatch.context() as patch:
        patch.setattr("torch.Tensor.addmm_", full)
        assert read(summing).missing == 6
    added(summing, 0, range(6, 10))
    found = read(summing)
    assert (found.count, found.missing) == (10, 6)
    assert (found.xx == 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 257, 1025])
def test_sums_of_rows_of_an_odd_width_are_those_of_the_rows(width, dtype):
    rows = torch.randn(300, width).to(dtype)
    size = bytes_of(width, dtype.itemsize, True, True)
    assert size % 8 == 0, "the sums behind these sums would not be aligned"
    made = DeviceSums(torch.empty(size, dtype=torch.uint8), width, dtype, True, True)
    for at in np.array_split(np.arange(len(rows)), 3):
        made.add(lambda some: rows[torch.from_numpy(some)], at, np.ones(len(at)))
    found, exact = Sums.of_packed(made.read()), rows.double().numpy()
    np.testing.assert_allclose(found.x, exact.sum(0), atol=1e-9)
    np.testing.assert_allclose(found.xx, exact.T @ exact, atol=1e-9)
