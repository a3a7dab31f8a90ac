"""What a lens delivers of rows: the likeliest tokens of log-softmax over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from tests.lenses import random_lens
from vllm_scope.errors import CompatError, ConfigError, SpecError
from vllm_scope.lenses.linear import Affine, LinearLens
from vllm_scope.program.layout import SLOT_BYTES, slots_of_row
from vllm_scope.request.sites import Place
from vllm_scope.worker import lens
from vllm_scope.worker.lens import DeviceLens, DeviceMap, hold_lenses, num_bytes


def unpacked(packed: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = packed.view(torch.int32)[:, : 2 * count]
    return words[:, :count].long(), words[:, count:].view(torch.float32)


@pytest.mark.parametrize("vocab_size", [50, 640, 1000])
@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_are_those_of_log_softmax(vocab_size, count, dtype, monkeypatch):
    monkeypatch.setattr(lens, "MOST_BYTES", 4 * vocab_size * 3)  # three rows at once
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64 * 16, 16, generator=generator).to(dtype)
    rows = torch.randn(20, 16, generator=generator).to(dtype)
    # As vLLM removes the padding of the vocabulary.
    found = DeviceLens(lambda some: (some @ weight.T)[:, :vocab_size], vocab_size)
    packed = found.pack(rows, count)
    assert packed.shape == (20, slots_of_row(8 * count) * SLOT_BYTES)
    assert len(found.pack(rows[:0], count)) == 0
    ids, values = unpacked(packed, count)
    exact = (rows @ weight.T)[:, :vocab_size].double().log_softmax(1)
    torch.testing.assert_close(values.double(), exact.topk(count).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(exact.gather(1, ids), values.double(), rtol=0, atol=1e-5)


def test_the_largest_piece_is_computed_once_at_the_start(monkeypatch):
    monkeypatch.setattr(lens, "MOST_BYTES", 4 * 640 * 7)
    pieces = []

    def logits(rows):
        pieces.append(rows.clone())
        return rows.repeat(1, 40)

    found = DeviceLens(logits, 640)
    row = torch.randn(16)
    found.reserve(row)
    assert [len(piece) for piece in pieces] == [7]
    assert torch.equal(pieces[0], row.expand(7, -1))
    found.pack(torch.randn(20, 16), 10)
    assert max(map(len, pieces)) == 7


def test_a_device_without_room_for_a_piece_has_no_lens():
    def logits(rows):
        raise torch.OutOfMemoryError

    with pytest.raises(CompatError, match=r"no room .* 64 MiB of logits.* gpu_memory_utilization"):
        DeviceLens(logits, 640).reserve(torch.randn(16))


def test_a_vocabulary_that_is_smaller_leaves_places_empty():
    ids, values = unpacked(DeviceLens(lambda rows: rows, 3).pack(torch.eye(3), 5), 5)
    assert ids[:, 3:].tolist() == [[-1, -1]] * 3
    assert values[:, 3:].tolist() == [[0, 0]] * 3
    assert ids[:, 0].tolist() == [0, 1, 2]
    torch.testing.assert_close(values[:, :3].logsumexp(1), torch.zeros(3))


def test_a_row_that_is_not_finite_stays_so_and_leaves_others():
    rows = torch.randn(3, 128)
    rows[1, 5] = torch.nan
    rows[2, 7] = -torch.inf
    _, values = unpacked(DeviceLens(lambda some: some, 128).pack(rows, 2), 2)
    assert values[1].isnan().all()
    assert values[[0, 2]].isfinite().all()


SIZE = 16


def lens_of_rows(dtype: torch.dtype) -> tuple[DeviceLens, torch.Tensor]:
    weight = torch.randn(640, SIZE, generator=torch.Generator().manual_seed(4)).to(dtype)
    return DeviceLens(lambda rows: rows @ weight.T, 640), weight


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_map_is_applied_before_the_models_own_lens(dtype, residual):
    own, weight = lens_of_rows(dtype)
    named = random_lens("named", [0, 1], SIZE, residual)
    held = hold_lenses([named], 1, (2, 4), (), dtype, torch.device("cpu"))
    rows = torch.randn(20, SIZE).to(dtype)
    for layer in (0, 1):
        packed = own.of(held["named", 2 * layer + 2]).pack(rows, 5)
        ids, values = unpacked(packed, 5)
        mapped = named.map(rows, ("resid_post", layer))
        exact = (mapped @ weight.double().T).log_softmax(1)
        # The mapped row is rounded; a logit is a sum of sixteen products.
        tolerance = 1e-5 if dtype == torch.float32 else 0.2
        torch.testing.assert_close(values.double(), exact.topk(5).values, rtol=0, atol=tolerance)
        torch.testing.assert_close(exact.gather(1, ids), values.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_map_that_changes_nothing_is_the_models_own_lens_bit_for_bit(dtype, residual):
    own, _ = lens_of_rows(dtype)
    nothing = Affine(torch.zeros(SIZE, SIZE) if residual else torch.eye(SIZE), None)
    mapped = DeviceMap(nothing, residual, dtype, torch.device("cpu"))
    rows = torch.randn(20, SIZE).to(dtype)
    assert torch.equal(own.of(mapped).pack(rows, 5), own.pack(rows, 5))


def test_maps_are_held_where_there_are_taps_and_within_their_bound():
    named, cpu = random_lens("named", range(4), SIZE, site="resid_pre"), torch.device("cpu")
    held = hold_lenses([named], 1, (0, 2, 4, 6), (3,), torch.float32, cpu)
    assert list(held) == [("named", 0), ("named", 2), ("named", 4)]
    assert num_bytes(named, 4, torch.bfloat16) == 4 * (2 * SIZE * SIZE + 4 * SIZE)
    with pytest.raises(ConfigError, match=r"lenses_mib is 0\.001; the maps of 'named' take 0\.0"):
        hold_lenses([named], 0.001, (0, 2), (), torch.float32, cpu)
    bad = LinearLens("bad", {Place("resid_post", 1): Affine(torch.eye(2) * torch.nan, None)})
    with pytest.raises(SpecError, match="'bad': the map of resid_post 1 has a number"):
        hold_lenses([bad], 1, (4,), (), torch.float32, cpu)
