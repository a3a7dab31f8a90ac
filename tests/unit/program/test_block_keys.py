"""Which KV blocks of edited requests may be shared: equal edits on equal tokens, no others."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.collector import collector_off
from tests.unit.programs import runs
from tests.unit.strategies import VOCAB, edits
from vllm_scope import Ablate, Add, Except, Positions, Replace, Spec, TokenIds, Union
from vllm_scope.program import block_keys
from vllm_scope.program.block_keys import BlockKeys
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.operations import OP_CHECK, Program
from vllm_scope.request.arrays import Array
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites

BLOCK = 4
SITES = Sites(2, 4, "float32", tuple(range(5)))
V, W = [1.0, 2.0, 0.0, -1.0], [0.0, 3.0, 0.0, 4.0]


def _keys(*some, num_prompt: int = 8, ids: list[int] | None = None, modules=None) -> BlockKeys:
    prompt = np.array(ids if ids is not None else [1] * num_prompt, np.int64)
    resolved = Spec(edits=some).resolve(SITES, modules)
    return BlockKeys(resolved.edits, len(prompt), prompt)


def _chain(keys: BlockKeys, num_positions: int) -> list[bytes | None]:
    return [keys.key(start, start + BLOCK) for start in range(0, num_positions, BLOCK)]


@given(st.lists(edits(2, 4), min_size=1, max_size=3), st.integers(1, 20))
def test_a_key_that_was_made_for_another_block_of_the_phase_is_this_blocks_own(some, num_prompt):
    keys, ids = _keys(*some, num_prompt=num_prompt), [1] * num_prompt
    for start in range(0, 32, BLOCK):
        alone = _keys(*some, num_prompt=num_prompt, ids=ids)
        assert keys.key(start, start + BLOCK) == alone._key(start, start + BLOCK)


def test_the_blocks_of_a_long_prompt_with_edits_of_a_phase_cost_next_to_nothing():
    keys = _keys(Add(V, layer=0), num_prompt=100_000)
    with collector_off():
        started = time.process_time()
        found = {keys.key(start, start + 16) for start in range(0, 100_000, 16)}
        took = time.process_time() - started
    assert len(found) == 1
    assert took < 0.05


def test_blocks_whose_scales_a_policy_sets_are_the_requests_own():
    edits = Spec(edits=(Add(V, layer=0),)).resolve(SITES).edits
    plain, one, other = (BlockKeys(edits, 6, [1] * 6, own) for own in (b"", b"one", b"other"))
    for start in range(0, 16, BLOCK):
        keys = {keys.key(start, start + BLOCK) for keys in (plain, one, other)}
        # The second block has generated tokens too.
        assert len(keys) == (1 if start == 0 else 3)


@pytest.mark.parametrize(
    ("edit", "edited"),
    [
        pytest.param(Add(V, layer=0), [True, True, True, True], id="all"),
        pytest.param(Add(V, layer=0, tokens="prompt"), [True, True, False, False], id="prompt"),
        pytest.param(Add(V, layer=0, tokens="generated"), [False, False, True, True], id="rest"),
        pytest.param(Add(V, layer=0, tokens=[5]), [False, True, False, False], id="one-position"),
        pytest.param(Add(V, layer=0, tokens=[-1, 12]), [False, True, False, True], id="two"),
        pytest.param(
            Replace([V, W], positions=[2, 9], layer=0), [True, False, True, False], id="replace"
        ),
        pytest.param(Add(V, layer=0, tokens=[99]), [False] * 4, id="none-that-is-here"),
    ],
)
def test_a_block_has_a_key_where_one_of_its_tokens_is_edited(edit, edited):
    assert [key is not None for key in _chain(_keys(edit), 16)] == edited


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        pytest.param(Add(V, layer=0), Add(np.array(V), layers=[0]), True, id="same-content"),
        pytest.param(Add(V, layer=0), Add(V, layer=0, tokens=slice(0, 4)), True, id="same-tokens"),
        pytest.param(Add(V, layer=0), Add(V, layer=0, tokens="prompt"), True, id="prompt-or-all"),
        pytest.param(
            Add(V, layer=0, tokens=Except(TokenIds(1), "generated")),
            Add(V, layer=0),
            True,
            id="picked-by-id",
        ),
        pytest.param(
            Replace([V, W], positions=[1, 9], layer=0),
            Replace([V, W], positions=[1, 5], layer=0),
            True,
            id="a-replacement-that-differs-further-on",
        ),
        pytest.param(Add(V, layer=0), Add(W, layer=0), False, id="another-vector"),
        pytest.param(Add(V, layer=0), Add(V, layer=0, scale=1.5), False, id="another-scale"),
        pytest.param(Add(V, layer=0), Add(V, layer=1), False, id="another-layer"),
        pytest.param(Add(V, layer=0), Add(V, site="resid_pre", layer=1), False, id="another-side"),
        pytest.param(Add(V, layer=0), Ablate(V, layer=0), False, id="another-kind"),
        pytest.param(Add(V, layer=0), Add(V, layer=0, tokens=[0, 1, 2]), False, id="fewer-tokens"),
        pytest.param(
            Add(V, layer=0, tokens=[1]), Add(V, layer=0, tokens=[2]), False, id="another-token"
        ),
        pytest.param(
            Replace([V, W], positions=[1, 2], layer=0),
            Replace([V, W], positions=[2, 1], layer=0),
            False,
            id="rows-the-other-way-round",
        ),
    ],
)
def test_blocks_are_shared_where_the_same_edits_fall_on_the_same_tokens(one, other, same):
    assert (_keys(one).key(0, BLOCK) == _keys(other).key(0, BLOCK)) is same


def test_the_order_of_edits_is_part_of_the_key():
    add, ablate = Add(V, layer=0), Ablate(W, layer=0)
    assert _keys(add, ablate).key(0, 4) != _keys(ablate, add).key(0, 4)
    assert _keys(add, ablate).key(0, 4) != _keys(add).key(0, 4)
    # But an edit that does not fall on the block is not.
    late = Ablate(W, layer=0, tokens=[9])
    assert _keys(add, late).key(0, 4) == _keys(add).key(0, 4)


def test_a_block_that_the_prompt_ends_in_depends_on_where():
    long, short = (_keys(Add(V, layer=0, tokens="prompt"), num_prompt=n) for n in (8, 6))
    assert long.key(0, 4) == short.key(0, 4)
    assert long.key(4, 8) != short.key(4, 8)


def test_positions_from_the_prompts_end_are_other_tokens_of_another_prompt():
    long, short = (_keys(Add(V, layer=0, tokens=[-1]), num_prompt=n) for n in (8, 7))
    assert long.key(4, 8) != short.key(4, 8)
    assert long.key(0, 4) is short.key(0, 4) is None


def test_content_is_the_key_and_names_are_not():
    array = Array.parse(V, "")
    modules = {"a": {("resid_post", 0): array}, "b": {("resid_post", 0): Array.parse(W, "")}}
    again = {"b": {("resid_post", 0): Array(array.shape, array.data)}}
    by_name = _keys(Add("a"), modules=modules).key(0, 4)
    assert by_name == _keys(Add("b"), modules=again).key(0, 4) == _keys(Add(V, layer=0)).key(0, 4)
    assert by_name != _keys(Add("b"), modules=modules).key(0, 4)


def _edits_in(program: Program) -> tuple[Any, ...]:
    """What changes a token's row: a check does not."""
    edits = ((b, tuple(op for op in ops if op.code != OP_CHECK)) for b, ops in program.taps)
    return tuple((boundary, ops) for boundary, ops in edits if ops)


@given(
    st.lists(edits(2, 4), min_size=1, max_size=3),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
)
def test_equal_keys_mean_that_the_same_happens_to_each_token(some, one_prompt, other_prompt):
    resolved = Spec(edits=tuple(some)).resolve(SITES)
    found = []
    for prompt in (one_prompt, other_prompt):
        ids = np.array(prompt, np.int64)
        program = RequestProgram.compile(
            resolved, SITES, frozenset(SITES.boundaries), len(ids), ids
        )
        taps = [()] * 16
        for offset, length, one in runs(program, 0, 16):
            taps[offset : offset + length] = [_edits_in(one)] * length
        blocks = [tuple(taps[start : start + BLOCK]) for start in range(0, 16, BLOCK)]
        found.append((_chain(BlockKeys(resolved.edits, len(ids), ids), 16), blocks))
    (keys, blocks), (other_keys, other_blocks) = found
    for key, block, other_key, other_block in zip(
        keys, blocks, other_keys, other_blocks, strict=True
    ):
        assert (key is None) == (not any(block))
        if key == other_key:
            assert block == other_block
        elif len(some) == 1 and some[0].kind != "replace":
            # With one edit the key says no more than what happens.
            assert block != other_block


def test_a_block_key_costs_the_distinct_selectors_and_not_the_edits():
    """256 edits at all of 16 layers, and replacements of 1,000 positions each."""
    sites = Sites(16, 4, "float32", tuple(range(33)))
    rows = np.arange(1.0, 4001.0).reshape(1000, 4)
    adds = [Add([1.0 + i, 0, 0, 0], layers="all", tokens=[i % 16, 700]) for i in range(128)]
    replaced = [Replace(rows * i, positions=range(1000), layer=i % 16) for i in range(1, 65)]
    edits = Spec(edits=(*adds, *replaced)).resolve(sites).edits
    keys = BlockKeys(edits, 1024, np.ones(1024, np.int64))
    keys.key(0, 16)
    took = []
    for start in range(16, 960, 16):
        started = time.thread_time()
        assert keys.key(start, start + 16) is not None
        took.append(time.thread_time() - started)
    assert sorted(took)[len(took) // 2] < 1e-3


def _memory_of_blocks(specs: Iterable[Resolved], lengths: tuple[int, ...], blocks: range) -> int:
    """Bytes that stay when requests of these specs have ended."""
    gc.collect()
    tracemalloc.start()
    for asked in specs:
        for num_prompt in lengths:
            ids = np.ones(num_prompt, np.int64)
            keys = BlockKeys(asked.edits, num_prompt, ids, shared=asked.shared)
            for block in blocks:
                keys.key(16 * block, 16 * block + 16)
    del asked, keys
    gc.collect()
    found, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return found


def test_what_is_kept_of_blocks_for_other_requests_is_bounded_for_the_whole_process(monkeypatch):
    known = Remembered(1 << 18)
    monkeypatch.setattr(block_keys, "_known", known)
    each = [Spec(edits=(Add(V, layer=0, tokens=[1 + i]),)).resolve(SITES) for i in range(40)]
    assert _memory_of_blocks(each, (1024, 1040, 1056, 1072), range(64)) < 1 << 19
    assert 0 < known.num_bytes <= 1 << 18


def test_blocks_for_which_there_is_no_room_have_the_same_keys(monkeypatch):
    known = Remembered(1)  # holds the last value
    monkeypatch.setattr(block_keys, "_known", known)
    monkeypatch.setattr(block_keys, "MOST_BYTES", 6000)
    asked = Spec(edits=(Add(V, layer=0, tokens=slice(0, 200, 3)),)).resolve(SITES)
    ids = np.ones(64, np.int64)
    pairs = [
        [BlockKeys(asked.edits, length, ids[:length], shared=s) for s in (asked.shared, None)]
        for length in (61, 62)
    ]
    for start in range(0, 128, 16):
        for keys, alone in pairs:
            for _ in range(2):
                assert keys.key(start, start + 16) == alone.key(start, start + 16)
    assert 3000 < known.num_bytes <= 6000


@pytest.mark.long
@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(lambda i, j: [300 + i], id="equal-picks"),
        pytest.param(lambda i, j: [300 + i + 1000 * j], id="one-position-each"),
        pytest.param(lambda i, j: [16 + k + i * j for k in range(8)], id="eight-positions-each"),
        pytest.param(
            lambda i, j: Union(*(slice(1000 + i, 9999 + j, 1 + k) for k in range(36))), id="slices"
        ),
        pytest.param(
            lambda i, j: Except(Positions(1000 + i) | slice(3, 2000 + j), slice(1, 9999, 7)),
            id="nested",
        ),
    ],
)
@pytest.mark.parametrize("blocks", [range(1, 2), range(60, 64)], ids=["one-block", "four"])
def test_what_is_kept_of_blocks_takes_no_more_than_is_counted(tokens, blocks, monkeypatch):
    known = Remembered(1 << 30)
    monkeypatch.setattr(block_keys, "_known", known)

    def specs() -> Iterator[Resolved]:
        for i in range(50):
            edits = (Add(V, layer=0, tokens=tokens(i, j)) for j in range(block_keys.MOST_EDITS))
            yield Spec(edits=tuple(edits)).resolve(SITES)

    assert 0 < _memory_of_blocks(specs(), (2048,), blocks) < known.num_bytes
