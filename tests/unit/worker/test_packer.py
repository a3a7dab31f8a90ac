"""What a region of the arena becomes on its way out, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.oracle import numbers_of
from vllm_scope import AttentionPool, Mlp
from vllm_scope.batch.labels import Labels
from vllm_scope.codecs.packed import EncodedRows, Packing, encoding_of, packing_of
from vllm_scope.errors import CapacityError
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths, slots_of_row
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Bank, CodecChoice, Encoding
from vllm_scope.request.nets import Net, net_of
from vllm_scope.request.sites import point_of
from vllm_scope.worker import packer as packer_module
from vllm_scope.worker import probe_bank
from vllm_scope.worker.packer import Packer
from vllm_scope.worker.slot_views import Grid

CPU = torch.device("cpu")
#: Odd, so that a row does not fill its last slot.
HIDDEN_SIZE = 33
A, B, C, D = point_of(0, 0), point_of(2, 0), point_of(2, 1), point_of(2, 2)


def encoding(name: str, dtype: torch.dtype, **options: int) -> Encoding:
    choice = CodecChoice.parse({"name": name, **options}, "codec")
    return encoding_of(choice, HIDDEN_SIZE, str(dtype).removeprefix("torch."), "codec")


def weight(seed: int, *shape: int) -> Array:
    return Array.parse(np.random.default_rng(seed).normal(size=shape), "weight")


def bank_of(*nets: Net) -> Bank:
    return Bank.of([net.digest for net in nets], sum(net.num_values for net in nets))


#: Three vectors, an AttentionPool, and an Mlp: six numbers, which fill one slot and a half.
NETS = (
    *(net_of(weight(seed, HIDDEN_SIZE)) for seed in range(3)),
    AttentionPool(weight(3, HIDDEN_SIZE), weight(4, HIDDEN_SIZE)).net,
    Mlp([(weight(5, 3, HIDDEN_SIZE), weight(6, 3)), (weight(7, 1, 3), weight(8, 1))], "gelu").net,
)
SIX, ONE = bank_of(*NETS), bank_of(NETS[4])
#: Linear, so that they may work together.
THREE, OTHERS = NETS[:3], tuple(net_of(weight(seed, HIDDEN_SIZE)) for seed in (9, 10, 11))
LINEAR, LIKE_LINEAR = bank_of(*THREE), bank_of(*OTHERS)
BANKS = {SIX: NETS, ONE: NETS[4:], LINEAR: THREE, LIKE_LINEAR: OTHERS}


def layouts_of(dtype: torch.dtype) -> tuple[Layout, ...]:
    int8, fp16 = encoding("int8", dtype), encoding("fp16", dtype)
    topk8, full8 = encoding("topk8", dtype, k=5), encoding("full8", dtype)
    return (
        Layout((A, B), ((ONE, (A,)),)),
        Layout((), ((int8, (A, B)),)),
        Layout((B,), ((SIX, (B, C)), (fp16, (C,)), (topk8, (B, C)))),
        Layout((), ((SIX, (B,)),)),
        Layout((A,), ((full8, (A,)),)),
        # The rows for the first bank are not at regular distances.
        Layout((), ((int8, (B,)), (SIX, (A, C, D)))),
        # Two banks that are alike, and rows that both have.
        Layout((A,), ((LINEAR, (A, B)), (LIKE_LINEAR, (B, C)))),
        Layout((), ((LINEAR, (A, B)), (LIKE_LINEAR, (A, D)))),
        # Rows of the second one come first.
        Layout((), ((LINEAR, (B,)), (LIKE_LINEAR, (A,)))),
    )


def labels_of(layout_of: list[int], layouts: tuple[Layout, ...]) -> Labels:
    """Of tokens with these layouts; as in a step, the labels have no others."""
    count = np.arange(len(layout_of))
    used, index = np.unique(layout_of, return_inverse=True)
    some = tuple(layouts[i] for i in used)
    return Labels(count, count, index.astype(np.int32), some, count)


def token_by_token(
    region: Tensor, labels: Labels, boundary: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same, written down plainly: uint8 [num_slots, SLOT_BYTES]; and the slots with numbers of
    banks, which are float64 products, rounded."""
    row_bytes = HIDDEN_SIZE * dtype.itemsize
    row_slots, widths = slots_of_row(row_bytes), Widths((row_bytes,))
    here = [x if boundary is None else x.at(boundary) for x in labels.layouts]
    room = [layout.slots(widths) for layout in here]
    width = [layout.arena.slots(widths) for layout in here]
    if boundary is not None:
        room, width = [max(room)] * len(here), [max(width)] * len(here)
    slots, found, at = region.view(torch.uint8), [], 0
    numbers: list[int] = []
    for which in labels.layout_of:
        layout, token = here[which], slots[at : at + width[which]]
        at += width[which]
        raw = {
            point: token[i * row_slots : (i + 1) * row_slots]
            for i, point in enumerate(layout.arena.points)
        }
        parts = [raw[point] for point in layout.points]
        for one, points in layout.encoded:
            for point in points:
                row = raw[point].reshape(1, -1)[:, :row_bytes].view(dtype)
                if isinstance(one, Bank):
                    made = [numbers_of(net, row.double())[0] for net in BANKS[one]]
                    words = torch.zeros(slots_of_row(one.row_bytes) * SLOT_BYTES // 4)
                    words[: one.row_bytes // 4] = torch.from_numpy(np.concatenate(made))
                    parts.append(words.view(torch.uint8).view(-1, SLOT_BYTES))
                    first = sum(map(len, found)) + sum(map(len, parts[:-1]))
                    numbers += range(first, first + len(parts[-1]))
                else:
                    parts.append(packing_of(one).pack(row).view(-1, SLOT_BYTES))
        size = sum(len(part) for part in parts)
        parts.append(torch.zeros((room[which] - size, SLOT_BYTES), dtype=torch.uint8))
        found += parts
    assert at == len(slots)
    return torch.cat(found), torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("boundary", [None, 0, 2])
@pytest.mark.parametrize(
    "layout_of",
    [
        *(pytest.param([i] * 7, id=f"layout-{i}") for i in range(9)),
        pytest.param([1], id="one-token"),
        pytest.param([0, 1, 2, 3, 4] * 5, id="mixed"),
        pytest.param([4, 4, 4, 0, 0, 2, 2, 1, 3], id="in-runs"),
    ],
)
@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize("chunk_bytes", [64, 2000, 16 << 20])
def test_every_row_and_score_goes_to_its_place(
    chunk_bytes, stacks, layout_of, boundary, dtype, monkeypatch
):
    monkeypatch.setattr(packer_module, "CHUNK_BYTES", chunk_bytes)
    labels = labels_of(layout_of, layouts_of(dtype))
    row_bytes = HIDDEN_SIZE * dtype.itemsize
    packer = Packer(dtype, CPU, Widths((row_bytes,)), stacks=stacks)
    packer.hold(1, (), BANKS)
    before, _ = packer_module._sizes(labels, boundary, Widths((row_bytes,)))
    arena = torch.randn(int(before.sum()) + 9, SLOT_BYTES // dtype.itemsize).to(dtype)
    region = arena[4:-5]
    for _ in range(2):  # as the step after it, whose labels are of the same shape
        into = torch.full((packer.num_slots(labels, boundary), SLOT_BYTES), 7, dtype=torch.uint8)
        packer.pack(region, labels, boundary, into)
        expected, numbers = token_by_token(region, labels, boundary, dtype)
        found, wanted = (slots[numbers].view(torch.float32) for slots in (into, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
        expected[numbers] = into[numbers]
        assert torch.equal(into, expected)
        arena.normal_()


def test_a_token_that_is_larger_than_a_chunk_goes_alone(monkeypatch):
    monkeypatch.setattr(packer_module, "CHUNK_BYTES", 1)
    dtype = torch.float32
    labels = labels_of([1, 2, 1], layouts_of(dtype))
    packer = Packer(dtype, CPU, Widths((4 * HIDDEN_SIZE,)))
    assert [chunk.stop - chunk.start for chunk in packer._chunks(labels, None)] == [
        labels.layouts[i].slots(Widths((16 * 9,))) for i in (0, 1, 0)
    ]


def test_the_work_does_not_grow_with_the_rows():
    dtype = torch.float32
    layouts = layouts_of(dtype)
    moves = []
    for count in (10, 1000):
        packer = Packer(dtype, CPU, Widths((4 * HIDDEN_SIZE,)))
        (chunk,) = packer._chunks(labels_of([0, 1, 2, 3, 4] * count, layouts), None)
        moves.append(len(chunk.moves))
    assert moves[0] == moves[1] == 7  # raw rows, two banks, four codecs


@pytest.mark.parametrize("which", [1, 2, 3, 4, 6])
def test_the_plan_of_tokens_of_one_layout_does_not_grow_with_them(which):
    packer = Packer(torch.float32, CPU, Widths((4 * HIDDEN_SIZE,)), stacks=True)
    packer.hold(1, (), BANKS)
    labels = labels_of([which] * 1000, layouts_of(torch.float32))
    (chunk,) = packer._chunks(labels, None)
    places = [each for move in chunk.moves for each in (move.sources, move.targets)]
    assert all(isinstance(each, Grid) for each in places)


def test_the_next_step_of_the_same_requests_needs_no_new_plan():
    packer = Packer(torch.float32, CPU, Widths((4 * HIDDEN_SIZE,)))
    labels = labels_of([1, 1], layouts_of(torch.float32))
    region = torch.randn(36, 4)
    into = torch.empty((packer.num_slots(labels, None), SLOT_BYTES), dtype=torch.uint8)
    packer.pack(region, labels, None, into)
    plan = packer._plan
    later = Labels(labels.keys, labels.positions + 1, labels.layout_of, labels.layouts, labels.rows)
    packer.pack(region, later, None, into)
    assert packer._plan is plan
    packer.pack(region, labels_of([1, 1], layouts_of(torch.float32)), None, into)
    assert packer._plan is not plan


def test_as_many_projections_as_allowed_are_held_until_their_requests_end():
    packer = Packer(torch.float32, CPU, Widths((4 * HIDDEN_SIZE,)))
    many = [encoding("rp8", torch.float32, k=3, seed=seed) for seed in range(9)]
    packer.hold(1, many[:4], {})
    packer.hold(2, many[2:8], {})
    packer.hold(3, [*many[5:7], encoding("int8", torch.float32)], {})
    with pytest.raises(
        CapacityError, match="use 8 projections of rp8, and this request needs 1 more"
    ):
        packer.hold(4, many[8:], BANKS)
    packer.hold(4, [encoding("int8", torch.float32)], {})
    packer.release_all([2, 99])
    packer.hold(5, many[8:], {})


def _pack_six(packer: Packer) -> Tensor:
    labels = labels_of([3, 3], layouts_of(torch.float32))
    into = torch.empty((packer.num_slots(labels, None), SLOT_BYTES), dtype=torch.uint8)
    if packer.pack(torch.ones(18, 4), labels, None, into):
        raise KeyError("weights that are not held")
    return into


def test_weights_stay_until_the_last_request_that_needs_them_has_ended(monkeypatch):
    monkeypatch.setattr(probe_bank, "IDLE_BYTES", 0)
    packer = Packer(torch.float32, CPU, Widths((4 * HIDDEN_SIZE,)))
    packer.hold(1, (), BANKS)
    packer.hold(2, (), {SIX: NETS})
    packer.release_all([1])
    assert _pack_six(packer).view(torch.float32).any()
    packer.release_all([2])
    packer.release_all([2])  # nothing is held any more
    with pytest.raises(KeyError):
        _pack_six(packer)


def test_if_weights_find_no_room_the_request_is_refused_and_others_go_on(monkeypatch):
    packer = Packer(torch.float32, CPU, Widths((4 * HIDDEN_SIZE,)))
    packer.hold(1, (), {SIX: NETS})

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(probe_bank, "DeviceBank", full)
    with pytest.raises(CapacityError, match="no room for the probes' weights; send fewer probes"):
        packer.hold(2, (), BANKS)
    packer.release_all([2])
    assert _pack_six(packer).view(torch.float32).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_banks_that_are_alike_make_the_same_together(dtype):
    nets = {bank_of(net): [net] for net in NETS[:3]}
    one, two, three = nets
    layouts = (
        Layout((B,), ((one, (A,)), (two, (B,)), (three, (C,)))), Layout((), ((one, (A,)),)),
    )  # fmt: skip
    labels = labels_of([0, 1, 0, 0], layouts)
    row_bytes = HIDDEN_SIZE * dtype.itemsize
    made, num_moves = [], []
    for stacks in (False, True):
        packer = Packer(dtype, CPU, Widths((row_bytes,)), stacks=stacks)
        packer.hold(1, (), nets)
        before, _ = packer_module._sizes(labels, None, Widths((row_bytes,)))
        region = torch.linspace(-1, 1, int(before.sum()) * SLOT_BYTES // dtype.itemsize).to(dtype)
        region = region.view(-1, SLOT_BYTES // dtype.itemsize)
        into = torch.empty((packer.num_slots(labels, None), SLOT_BYTES), dtype=torch.uint8)
        packer.pack(region, labels, None, into)
        made.append(into)
        num_moves.append(len(packer._plan.chunks[0].moves))
    assert num_moves == [4, 3]  # raw rows, and the banks: `two` and `three` have as many rows
    if dtype == torch.float32:
        torch.testing.assert_close(*(some.view(torch.float32) for some in made))
    else:
        assert (made[0] == made[1]).float().mean() > 0.9


def test_banks_that_work_together_work_once_a_step(monkeypatch):
    """The rows of several banks are not in the order of the batch."""
    nets = {bank_of(net): [net] for net in NETS[1:3]}
    layout = Layout((), tuple((bank, (point,)) for bank, point in zip(nets, (A, B), strict=True)))
    packer, num_products = Packer(torch.float32, CPU, Widths((4 * HIDDEN_SIZE,)), stacks=True), []
    packer.hold(1, (), nets)
    product = torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda *args: num_products.append(args) or product(*args))
    made = []
    for num_steps in (1, 2):
        labels = packer._plan.labels if num_steps == 2 else labels_of([0] * 3, (layout,))
        region = torch.rand((int(packer_module._sizes(labels, None, packer.widths)[0].sum()), 4))
        into = torch.full((packer.num_slots(labels, None), SLOT_BYTES), 255, dtype=torch.uint8)
        packer.pack(region, labels, None, into)
        assert len(num_products) == num_steps
        alone = Packer(torch.float32, CPU, packer.widths, stacks=False)
        alone.hold(1, (), nets)
        twin = torch.zeros_like(into)
        alone.pack(region, labels, None, twin)
        made += [(into.view(torch.float32), twin.view(torch.float32))]
    for ours, theirs in made:
        torch.testing.assert_close(ours, theirs)


def full(*_: object) -> Tensor:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("stacks", [False, True])
def test_a_bank_without_room_fails_the_requests_that_asked_for_it_alone(stacks, monkeypatch):
    nets = {bank_of(net): [net] for net in NETS[:3]}
    _, two, _ = nets
    layouts = tuple(Layout((B,), ((bank, (A,)),)) for bank in nets)
    labels = labels_of([0, 1, 2, 1], layouts)
    made = []
    for bad in (None, two):
        packer = Packer(torch.float32, CPU, Widths((4 * HIDDEN_SIZE,)), stacks=stacks)
        packer.hold(1, (), nets)
        before, _ = packer_module._sizes(labels, None, packer.widths)
        region = torch.linspace(-1, 1, int(before.sum()) * 4).view(-1, 4)
        into = torch.empty((packer.num_slots(labels, None), SLOT_BYTES), dtype=torch.uint8)
        if bad is not None:
            monkeypatch.setattr(probe_bank, "DeviceStack", full)
            monkeypatch.setattr(packer._banks[bad], "pack", full)
        assert sorted(packer.pack(region, labels, None, into)) == ([] if bad is None else [1, 3])
        made.append(into.view(4, -1))
    whole, without = made
    row = slots_of_row(4 * HIDDEN_SIZE) * SLOT_BYTES
    assert torch.equal(whole[:, :row], without[:, :row]), "raw rows are as they were"
    for token in (0, 2):
        torch.testing.assert_close(
            whole[token, row:].view(torch.float32), without[token, row:].view(torch.float32)
        )
    assert without[1, row:].view(torch.float32).isnan().all()


@pytest.mark.parametrize("name", ["fp16", "fp8", "int8", "full8", "rp8", "topk8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_codec_without_room_fails_its_requests_and_its_rows_are_not_numbers(
    name, dtype, monkeypatch
):
    bad, good = encoding(name, dtype), encoding("int8" if name != "int8" else "full8", dtype)
    layouts = (Layout((), ((bad, (A,)),)), Layout((), ((good, (A,)),)))
    labels = labels_of([0, 1, 0], layouts)
    packer = Packer(dtype, CPU, Widths((HIDDEN_SIZE * dtype.itemsize,)))
    before, _ = packer_module._sizes(labels, None, packer.widths)
    region = torch.randn(int(before.sum()), SLOT_BYTES // dtype.itemsize).to(dtype)
    pack = Packing.pack

    def pack_or_fail(self: Packing, rows: Tensor) -> Tensor:
        return full() if self is packing_of(bad) and len(rows) > 1 else pack(self, rows)

    monkeypatch.setattr(Packing, "pack", pack_or_fail)
    into = torch.empty((packer.num_slots(labels, None), SLOT_BYTES), dtype=torch.uint8)
    assert sorted(packer.pack(region, labels, None, into)) == [0, 2]
    at, rows = 0, []
    for layout in (layouts[i] for i in labels.layout_of):
        ((head, _),) = layout.encoded
        size = packing_of(head).num_slots
        data = into[at : at + size].reshape(1, -1)
        rows.append(EncodedRows(packing_of(head).codec, data).decode()[0])
        at += size
    assert rows[0].isnan().all()
    assert rows[2].isnan().all()
    assert rows[1].isfinite().all()
    assert rows[1].any()
