"""How large a worker's rings are, and what one token may take of them."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from vllm_scope import CapacityError, ConfigError, Read, Spec
from vllm_scope.config import ScopeConfig
from vllm_scope.engine.worker.sizes import (
    HOST_ARENA_BYTES,
    MAX_HOST_BYTES,
    ROWS_PER_TAP,
    STEPS_IN_ARENA,
    Limits,
    Sizes,
    check_memory,
)
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.program.operations import Cost
from vllm_scope.request.heads import Bank, Encoding, Scored
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import LEVELS, Place, Sites, point_of

#: bf16 rows of 100 numbers: 200 bytes, 13 slots.
CPU = Sizes(Widths((200,)), tuple(range(5)), max_rows=64, graph_rows=0, cuda=False)
GPU = Sizes(Widths((200,)), tuple(range(5)), max_rows=64, graph_rows=32, cuda=True)
MIB = 2**20


def test_a_row_takes_whole_slots():
    assert Widths((1, 16, 17, 200)).row_slots == (1, 1, 2, 13)


@pytest.mark.parametrize("sizes", [CPU, GPU], ids=["cpu", "gpu"])
def test_an_arena_holds_a_tap_of_the_largest_step_whatever_is_read_there(sizes):
    slots = sizes.arena_slots(ScopeConfig())
    # Three rows, and scores in what is left.
    assert ROWS_PER_TAP > LEVELS
    assert slots >= sizes.max_rows * (LEVELS * 13 + 1)


def test_on_a_gpu_the_arena_holds_some_steps_of_the_largest_graph_whole():
    assert GPU.arena_slots(ScopeConfig()) == STEPS_IN_ARENA * 32 * 5 * 13


def test_on_a_cpu_the_arena_holds_the_largest_step_or_a_bounded_part_of_it():
    assert CPU.arena_slots(ScopeConfig()) == 64 * 5 * 13
    large = Sizes(Widths((8192,)), tuple(range(65)), max_rows=8192, graph_rows=0, cuda=False)
    slots = large.arena_slots(ScopeConfig())
    assert slots == ROWS_PER_TAP * 8192 * 512  # one tap of it, where that is more
    middling = Sizes(Widths((8192,)), tuple(range(65)), max_rows=512, graph_rows=0, cuda=False)
    assert middling.arena_slots(ScopeConfig()) * SLOT_BYTES == HOST_ARENA_BYTES


@pytest.mark.parametrize(
    ("sizes", "least"),
    [
        pytest.param(CPU, 64 * 13, id="one-tap-of-the-largest-step"),
        pytest.param(GPU, 32 * 5 * 13, id="the-largest-graph"),
        pytest.param(
            Sizes(Widths((200,)), tuple(range(5)), 640, 32, True),
            640 * 13,
            id="a-step-larger-than-the-graph",
        ),
    ],
)
def test_an_arena_that_is_too_small_is_refused_with_what_is_needed(sizes, least):
    enough = least * SLOT_BYTES / MIB
    assert sizes.arena_slots(ScopeConfig(arena_mib=enough)) == least
    with pytest.raises(ConfigError, match="5 taps and steps of") as caught:
        sizes.arena_slots(ScopeConfig(arena_mib=enough * 0.99))
    assert f"at least {enough:.1f} are needed" in str(caught.value)


@pytest.mark.parametrize(
    ("arena_slots", "host_slots"),
    [
        (1000, 2000),
        (MAX_HOST_BYTES // SLOT_BYTES, MAX_HOST_BYTES // SLOT_BYTES),
        (2 * MAX_HOST_BYTES // SLOT_BYTES, 2 * MAX_HOST_BYTES // SLOT_BYTES),
    ],
    ids=["small", "at-the-bound", "above-it"],
)
def test_the_host_ring_is_twice_the_arena_within_bounds_and_never_smaller(arena_slots, host_slots):
    assert Sizes.host_slots(arena_slots) == host_slots


def test_taps_of_several_widths_have_room_for_a_row_of_each():
    """The stream's rows take 13 slots, those of q 25, those of k 7."""
    boundaries = (0, 2, Place("q", 0).boundary, Place("k", 0).boundary)
    sizes = Sizes(Widths((200, 400, 100, 100, 400)), boundaries, 64, 32, True)
    assert sizes.slots_of_all == 13 + 13 + 25 + 7
    whole = STEPS_IN_ARENA * 32 * sizes.slots_of_all
    assert sizes.arena_slots(ScopeConfig()) == max(whole, ROWS_PER_TAP * 64 * 25)
    with pytest.raises(ConfigError, match="4 taps and steps of") as caught:
        sizes.arena_slots(ScopeConfig(arena_mib=0.01))
    assert f"{32 * 58 * SLOT_BYTES / MIB:.1f} are needed" in str(caught.value)


def test_limits_are_what_a_token_may_take_of_the_largest_step():
    slots = GPU.arena_slots(ScopeConfig())
    limits = GPU.limits(slots, Cost(7, 8, 9), optimistic=True)
    assert limits.capacity == Cost(7, 8, 9)
    assert limits.optimistic
    assert limits.row_bytes == (200,)
    assert limits.token_slots == slots // 32
    assert limits.tap_slots == slots // 64
    assert CPU.limits(slots, Cost(), False).token_slots == 0


def _rows(*boundaries: int) -> tuple[int, ...]:
    return tuple(point_of(boundary, 0) for boundary in boundaries)


def _bank(num_values: int) -> Bank:
    return Bank.of([b"a"], num_values)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        pytest.param(Layout(), None, id="nothing"),
        pytest.param(Layout(_rows(0, 2, 4)), None, id="as-much-as-a-token-may"),
        pytest.param(Layout(_rows(0, 2, 4, 6)), "40 slots a token, of 30", id="a-row-more"),
        pytest.param(
            Layout(_rows(0, 2, 4), ((_bank(1), _rows(4)),)), "31 slots a token, of 30",
            id="a-score-more",
        ),
        pytest.param(
            Layout((point_of(2, 0), point_of(2, 1))), "20 slots a token at one tap, of 15",
            id="two-points-of-one-tap",
        ),
        pytest.param(
            Layout(_rows(0), ((_bank(64), _rows(2)),)), "16 slots a token at one tap",
            id="many-scores-at-one-tap",
        ),
        pytest.param(
            Layout(_rows(0), tuple((_bank(32), _rows(b)) for b in (2, 4))), None,
            id="as-many-at-two",
        ),
        pytest.param(
            Layout((), ((_bank(1), _rows(0, 2, 4)),)), None, id="rows-of-probes-are-in-the-arena"
        ),
        pytest.param(
            Layout((), ((_bank(1), _rows(0, 2, 4, 6)),)), "40 slots a token, of 30",
            id="too-many-rows-of-probes",
        ),
        pytest.param(
            Layout(_rows(0, 2), ((Scored.of([b"a"], 4), _rows(0, 2, 4, 6)),)), None,
            id="rows-that-taps-score-are-not",
        ),
        pytest.param(
            Layout(_rows(0, 2, 4), ((Scored.of([b"a"], 4), _rows(0)),)), "31 slots a token, of 30",
            id="a-score-of-a-tap-more",
        ),
        pytest.param(
            Layout((), ((Encoding("small", 16), _rows(0, 2, 4)),)), None,
            id="encoded-rows-are-whole-in-the-arena",
        ),
        pytest.param(
            Layout((), ((Encoding("small", 16), _rows(0, 2, 4, 6)),)),
            "40 slots a token, of 30", id="too-many-for-the-arena",
        ),
        pytest.param(
            Layout(_rows(0, 2), ((Encoding("large", 176), _rows(2)),)),
            "31 slots a token, of 30", id="a-row-raw-and-encoded",
        ),
        pytest.param(
            Layout(_rows(2), ((Encoding("half", 96), _rows(2)),)),
            "16 slots a token at one tap", id="the-same-at-one-tap",
        ),
    ],
)  # fmt: skip
def test_a_token_that_delivers_too_much_is_refused_with_the_place(layout, words):
    found = Limits((160,), 30, 15, 0, 0, 0).excess(layout)
    assert (found is None) == (words is None)
    assert words is None or words in found


def test_without_graphs_a_token_may_take_any_number_of_taps():
    assert Limits((160,), 0, 15, 0, 0, 0).excess(Layout(_rows(*range(100)))) is None


def _layouts(program: RequestProgram) -> list[Layout]:
    return program.held(program.columns(5, drafts=False)).layouts


def test_a_request_is_checked_with_what_global_sinks_read_beside_it():
    sites = Sites(2, 64, "bfloat16", (0, 2, 4))  # rows of 8 slots
    own = Spec((Read("resid_post", codec="int8"),)).resolve(sites)  # of 5 slots each
    more = Spec((Read("resid_post", layer=1, tokens="generated", codec="fp16"),)).resolve(sites)
    ids = np.ones(3, np.int64)

    def program(asked: Resolved) -> RequestProgram:
        return RequestProgram.compile(asked, sites, frozenset(sites.boundaries), 3, ids)

    whole = program(own.joined(reads=more.reads))
    Limits((128,), 16, 13, 0, 0, 0).check(_layouts(program(own)))
    Limits((128,), 18, 13, 0, 0, 0).check(_layouts(whole))
    with pytest.raises(CapacityError, match="18 slots a token, of 17"):
        Limits((128,), 17, 13, 0, 0, 0).check(_layouts(whole))
    with pytest.raises(CapacityError, match="13 slots a token at one tap, of 12"):
        Limits((128,), 18, 12, 0, 0, 0).check(_layouts(whole))


@pytest.mark.parametrize(
    ("options", "asked", "said"),
    [
        pytest.param({"vectors_mib": 600}, {"vectors_mib": 600}, None, id="all-of-it"),
        pytest.param(
            {"vectors_mib": 601}, {"vectors_mib": 601},
            r"additional_config\['scope'\].vectors_mib is 601, which takes 601.0 MiB, and the "
            "device cuda:0 has 600.0 MiB free. Give a smaller vectors_mib; the KV cache needs "
            "memory too.",
            id="one-option",
        ),
        pytest.param(
            {"arena_mib": 200}, {"vectors_mib": 500, "arena_mib": 200},
            "arena_mib is 200, which takes 200.0 MiB, and .* has 100.0 MiB free beside what other "
            "options take", id="two-together",
        ),
        pytest.param(
            {}, {"arena_mib": 2000},
            r"without additional_config\['scope'\].arena_mib, rows on their way take 2,000.0 MiB, "
            "and .*. Tap fewer layers or sites, or start with a smaller max_num_batched_tokens;",
            id="an-arena-that-follows-from-the-taps",
        ),
    ],
)  # fmt: skip
def test_options_that_ask_for_more_memory_than_is_free_are_refused(options, asked, said):
    given = {option: mib * MIB for option, mib in asked.items()}
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_memory(given, ScopeConfig(**options), 600 * MIB, "the device cuda:0")
