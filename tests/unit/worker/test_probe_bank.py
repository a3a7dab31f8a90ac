"""The numbers of a bank equal float64; its weights stay as long as a request holds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.oracle import numbers_of, terms_of
from vllm_scope import AttentionPool, Mlp
from vllm_scope.program.layout import SLOT_BYTES, slots_of_row
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Bank
from vllm_scope.request.nets import HIDDEN, Net, net_of
from vllm_scope.worker import probe_bank
from vllm_scope.worker.probe_bank import Banks, DeviceBank

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(seed: int, *shape: int) -> Array:
    numbers = np.random.default_rng(seed).normal(size=shape)
    return Array.parse(numbers, "weight")


def linear(seed: int, width: int) -> Net:
    return net_of(weight(seed, width))


def mlp(seed: int, width: int, hidden: str, *sizes: int) -> Net:
    takes = (width, *sizes)
    shapes = zip((*sizes, 1), takes, strict=True)
    layers = [(weight(seed + i, *shape), weight(seed + i, shape[0])) for i, shape in
              enumerate(shapes)]  # fmt: skip
    return Mlp(layers, hidden).net


def pool(seed: int, width: int, num_heads: int) -> Net:
    return AttentionPool(weight(seed, num_heads, width), weight(seed + 1, num_heads, width)).net


def check(nets: list[Net], rows: torch.Tensor) -> None:
    """What a bank makes of rows is float64's, within the sums of float32; the rest is zero."""
    size = 4 * sum(net.num_values for net in nets)
    before = rows.clone()
    packed = DeviceBank(nets, CPU).pack(rows)
    assert torch.equal(rows, before)
    assert (packed.dtype, packed.shape) == (
        torch.uint8, (len(rows), slots_of_row(size) * SLOT_BYTES)
    )  # fmt: skip
    found = packed.view(torch.float32)
    exact = rows.double().numpy()
    expected = np.concatenate([numbers_of(net, exact) for net in nets], axis=1)
    terms = np.concatenate([terms_of(net, exact) for net in nets], axis=1)
    assert (np.abs(found[:, : size // 4].numpy() - expected) <= 1e-6 * (terms + 1)).all()
    assert not found[:, size // 4 :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 512])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda w: [linear(0, w)], id="linear"),
        pytest.param(lambda w: [linear(i, w) for i in range(5)], id="linears"),
        *(pytest.param(lambda w, h=h: [mlp(0, w, h, 7)], id=h) for h in HIDDEN),
        *(pytest.param(lambda w, h=h: [mlp(0, w, h, 7, 3)], id=f"{h}-deep") for h in HIDDEN),
        pytest.param(lambda w: [pool(0, w, 1)], id="pool"),
        pytest.param(lambda w: [pool(0, w, 3)], id="pool-of-three-heads"),
        pytest.param(
            lambda w: [
                linear(0, w), mlp(1, w, "gelu", 6), pool(5, w, 2), linear(9, w),
                mlp(10, w, "relu", 4, 2), mlp(20, w, "tanh", 1), linear(0, w),
            ],
            id="mixed",
        ),
    ],
)  # fmt: skip
def test_a_bank_equals_float64(make, width, dtype):
    generator = torch.Generator().manual_seed(width)
    for count in (0, 1, 17):
        check(make(width), torch.randn(count, width, generator=generator).to(dtype))


@st.composite
def nets(draw, width: int) -> Net:
    seed, kind = draw(st.integers(0, 99)), draw(st.sampled_from(["linear", "mlp", "pool"]))
    if kind == "linear":
        return linear(seed, width)
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    if kind == "mlp":
        return mlp(seed, width, draw(st.sampled_from(HIDDEN)), *sizes)
    return pool(seed, width, sizes[0])


@given(st.lists(nets(8), min_size=1, max_size=6), st.sampled_from(DTYPES), st.integers(0, 99))
def test_any_nets_share_a_bank(some, dtype, seed):
    check(some, torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(dtype))


def test_rows_may_be_a_part_of_wider_ones():
    wide = torch.randn(9, 50).bfloat16()
    check([linear(0, 33), pool(1, 33, 2)], wide[:, 3:36])


def test_a_number_that_is_not_finite_stays_in_its_own_row():
    rows = torch.ones(3, 4)
    rows[1, 2] = torch.nan
    found = DeviceBank([linear(0, 4), mlp(1, 4, "tanh", 3)], CPU).pack(rows).view(torch.float32)
    assert found[1, :2].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_a_bank_counts_the_bytes_of_its_weights():
    some = [linear(0, 10), mlp(1, 10, "relu", 5), pool(3, 10, 2)]
    assert DeviceBank(some, CPU).num_bytes == 4 * (10 + (10 + 1) * 5 + (5 + 1) + 2 * 2 * 10)


# Which weights stay


def bank(name: str, width: int = 8) -> dict[Bank, list[Net]]:
    """A bank of one net of 4 * width bytes."""
    return {Bank.of([name.encode()], 1): [linear(len(name), width)]}


def loaded(banks: Banks, *names: str) -> str:
    """Those of some banks that are there."""
    return "".join(name for name in names if next(iter(bank(name))) in banks._loaded)


@pytest.fixture
def made(monkeypatch) -> list[DeviceBank]:
    """Room for two idle banks of 8 numbers, and the banks that were made."""
    monkeypatch.setattr(probe_bank, "IDLE_BYTES", 2 * 32)
    found: list[DeviceBank] = []

    class Counted(DeviceBank):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(probe_bank, "DeviceBank", Counted)
    return found


def test_a_held_bank_is_loaded_once_however_many_hold_it(made):
    banks = Banks(CPU)
    for _ in range(3):
        banks.hold(bank("a"))
    banks.hold(bank("b"))
    assert len(made) == 2
    assert banks[next(iter(bank("a")))] is made[0]
    for _ in range(3):
        banks.release(bank("a"))
    # An idle one is found again.
    banks.hold(bank("a"))
    assert len(made) == 2


def test_a_held_bank_is_never_dropped(made):
    banks = Banks(CPU)
    for name in "abcdefgh":
        banks.hold(bank(name))
        banks.hold(bank(name))
    for name in "abcdefgh":
        banks.release(bank(name))
        assert loaded(banks, *"abcdefgh") == "abcdefgh"
    # Of those that nobody holds, at most two stay: the ones that were released last.
    for i, name in enumerate("abcdefgh"):
        banks.release(bank(name))
        assert loaded(banks, *"abcdefgh") == "abcdefgh"[max(0, i - 1) :]


def test_the_idle_bank_that_was_used_longest_ago_goes_first(made):
    banks = Banks(CPU)
    for name in "ab":
        banks.hold(bank(name))
    for name in "ba":
        banks.release(bank(name))
    banks.hold(bank("b"))  # used again: now `a` is idle alone
    banks.release(bank("b"))
    banks.hold(bank("c"))
    banks.release(bank("c"))
    assert loaded(banks, *"abc") == "bc"


def test_an_idle_bank_larger_than_the_room_goes_at_once(made):
    banks = Banks(CPU)
    banks.hold(bank("a"))
    banks.release(bank("a"))
    banks.hold(bank("large", 17))
    assert loaded(banks, "a", "large") == "alarge"
    banks.release(bank("large", 17))
    assert loaded(banks, "a", "large") == ""


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcde")), max_size=40))
def test_idle_banks_are_bounded_whatever_comes_and_goes(steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_bank, "IDLE_BYTES", 2 * 32)
        banks, held = Banks(CPU), dict.fromkeys("abcde", 0)
        for begins, name in steps:
            if begins:
                banks.hold(bank(name))
                held[name] += 1
            elif held[name]:
                banks.release(bank(name))
                held[name] -= 1
            there = loaded(banks, *"abcde")
            assert all(name in there for name in held if held[name])
            if not begins:
                assert sum(not held[name] for name in there) <= 2


def test_if_weights_find_no_room_none_is_held_and_idle_ones_make_room(made, monkeypatch):
    banks, make = Banks(CPU), probe_bank.DeviceBank
    banks.hold(bank("a"))
    banks.hold(bank("idle"))
    banks.release(bank("idle"))

    def full(*args):
        if len(made) == 3:
            raise torch.OutOfMemoryError
        return make(*args)

    monkeypatch.setattr(probe_bank, "DeviceBank", full)
    with pytest.raises(torch.OutOfMemoryError):
        banks.hold({**bank("a"), **bank("b"), **bank("c")})
    assert loaded(banks, "a", "b", "c", "idle") == "a"
    made.clear()
    banks.release(bank("a"))  # held once
    banks.hold(bank("large", 17))
    banks.release(bank("large", 17))
    assert loaded(banks, "a", "large") == ""


@pytest.mark.parametrize("most_bytes", [64 << 20, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stack_gives_each_bank_its_part_of_the_rows(dtype, most_bytes, monkeypatch):
    monkeypatch.setattr(probe_bank, "MOST_BYTES", most_bytes)
    nets = {Bank.of([bytes([i])], 2): [linear(i, 40), linear(i + 9, 40)] for i in range(5)}
    banks = Banks(CPU)
    banks.hold(nets)
    (shape,) = {banks.like(bank) for bank in nets}
    assert shape == (40, 2, False)
    rows = torch.randn(5 * 7, 48).to(dtype)[:, :40]  # as rows lie in slots
    found = banks.stack(tuple(nets)).pack(rows).view(torch.float32)
    parts = zip(nets, rows.split(7), strict=True)
    alone = torch.cat([banks[bank].pack(some) for bank, some in parts])
    torch.testing.assert_close(found, alone.view(torch.float32), rtol=1e-5, atol=1e-5)


def test_banks_that_are_not_alike_or_large_are_worked_on_alone(monkeypatch):
    monkeypatch.setattr(probe_bank, "MOST_STACKED", 4 * 40)
    several = {
        Bank.of([b"one"], 1): [linear(0, 40)],
        Bank.of([b"large"], 2): [linear(0, 40), linear(1, 40)],
        Bank.of([b"deep"], 1): [mlp(0, 40, "relu", 1)],
    }
    banks = Banks(CPU)
    banks.hold(several)
    assert len({banks.like(bank) for bank in several}) == 3


def test_only_the_last_stacks_are_kept_and_none_of_banks_that_nobody_holds(monkeypatch):
    monkeypatch.setattr(probe_bank, "MOST_STACK_BYTES", 4 * 4 * 8)
    nets = {Bank.of([bytes([i])], 1): [linear(i, 8)] for i in range(4)}
    banks = Banks(CPU)
    banks.hold(nets)
    a, b, c, d = nets
    for pair in ((a, b), (b, c), (c, d)):
        banks.stack(pair)
    assert list(banks._stacks) == [(b, c), (c, d)]
    again = banks.stack((b, c))
    assert banks.stack((b, c)) is again
    assert list(banks._stacks) == [(c, d), (b, c)]
    banks.release({b: nets[b]})
    assert list(banks._stacks) == [(c, d)]
