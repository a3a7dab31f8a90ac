"""Which tokens a selector means, and what may be said before everything is known."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import VOCAB, decided_selectors, is_selected, selectors
from vllm_scope import Except, Positions, Read, SpecError, TokenIds, Union
from vllm_scope.request.selectors import Tokens, parse_selector


@dataclass(frozen=True)
class Sequence:
    """A request that has ended."""

    num_prompt: int
    ids: tuple[int, ...]

    @property
    def num_processed(self) -> int:
        return len(self.ids)

    def tokens(self, ids_known: list[bool] | None = None, ended: bool = True) -> Tokens:
        ids = np.array(self.ids, np.int64)
        if ids_known is not None:
            generated = np.arange(len(ids)) >= self.num_prompt
            ids[generated & ~np.array(ids_known)] = -1
        positions = np.arange(len(ids), dtype=np.int64)
        return Tokens(positions, self.num_prompt, ids, self.num_processed if ended else None)


@st.composite
def sequences(draw) -> Sequence:
    num_prompt = draw(st.integers(1, 8))
    total = num_prompt + draw(st.integers(0, 10))
    ids = draw(st.lists(st.integers(0, VOCAB - 1), min_size=total, max_size=total))
    return Sequence(num_prompt, tuple(ids))


def _oracle(selector, sequence: Sequence) -> list[bool]:
    form = selector.to_json()
    return [
        is_selected(form, position, sequence.num_prompt, token_id, sequence.num_processed)
        for position, token_id in enumerate(sequence.ids)
    ]


def _positions(selector, tokens: Tokens) -> list[int]:
    return tokens.positions[selector.select(tokens).certain].tolist()


# A prompt of five tokens, 10 11 12 10 13; then 10, 11 and 14 were generated and 14 was
# never processed.
ENDED = Sequence(5, (10, 11, 12, 10, 13, 10, 11))


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [
        pytest.param("all", [0, 1, 2, 3, 4, 5, 6], id="all"),
        pytest.param("prompt", [0, 1, 2, 3, 4], id="prompt"),
        pytest.param("generated", [5, 6], id="generated"),
        pytest.param("last_prompt", [4], id="last_prompt"),
        pytest.param("last", [6], id="last"),
        pytest.param([0, 5], [0, 5], id="positions"),
        pytest.param([-1, -5], [0, 4], id="positions-from-the-prompt's-end"),
        pytest.param(np.array([5, 0]), [0, 5], id="positions-in-an-array"),
        pytest.param(torch.tensor([5, 0]), [0, 5], id="positions-in-a-tensor"),
        pytest.param([np.int64(5), torch.tensor(0)], [0, 5], id="positions-of-numpy-and-torch"),
        pytest.param(np.int64(-1), [4], id="one-position-of-numpy"),
        pytest.param([3, 50], [3], id="a-position-that-never-came"),
        pytest.param(slice(4, 6), [4, 5], id="slice-across-the-prompt's-end"),
        pytest.param(slice(None, None, 3), [0, 3, 6], id="slice-every-third"),
        pytest.param(slice(-2, None), [3, 4, 5, 6], id="slice-from-the-prompt's-end"),
        pytest.param(slice(None, -3), [0, 1], id="slice-up-to-the-prompt's-end"),
        pytest.param(slice(-50, 2), [0, 1], id="slice-from-before-the-start"),
        pytest.param(slice(-49, None, 3), [0, 3, 6], id="every-third-from-before-the-start"),
        pytest.param(slice(0, 0), [], id="empty-slice"),
        pytest.param(TokenIds(10, 14), [0, 3, 5], id="token-ids"),
        pytest.param(TokenIds(*np.array([10, 14])), [0, 3, 5], id="token-ids-of-numpy"),
        pytest.param(Union("last", [0], "last_prompt"), [0, 4, 6], id="union"),
        pytest.param(Except("prompt", TokenIds(10)), [1, 2, 4], id="except"),
        pytest.param(Except(Union("generated", [1]), "last"), [1, 5], id="except-of-a-union"),
        pytest.param(Except("all", Except("all", "last")), [6], id="except-of-an-except"),
    ],
)
def test_a_selector_picks_these_positions(tokens, positions):
    assert _positions(parse_selector(tokens, "tokens"), ENDED.tokens()) == positions


@given(selectors(), sequences())
def test_with_everything_known_both_masks_are_the_token_by_token_answer(selector, sequence):
    masks = selector.select(sequence.tokens())
    assert masks.certain.tolist() == _oracle(selector, sequence)
    assert masks.possible.tolist() == _oracle(selector, sequence)


@given(selectors(), sequences(), st.data())
def test_nothing_that_is_certain_in_the_end_was_impossible_before(selector, sequence, data):
    size = sequence.num_processed
    known = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    for ids_known, ended in ((known, True), (known, False), ([False] * size, False)):
        masks = selector.select(sequence.tokens(ids_known, ended))
        final = np.array(_oracle(selector, sequence))
        assert not (masks.certain & ~masks.possible).any()
        assert not (masks.certain & ~final).any()
        assert not (final & ~masks.possible).any()


@given(selectors(), sequences(), st.data())
def test_a_token_is_answered_alike_alone_and_among_others(selector, sequence, data):
    # A chunk of a prompt is a part of the sequence; so is one decoded token.
    tokens = sequence.tokens([False] * sequence.num_processed, ended=False)
    first = data.draw(st.integers(0, sequence.num_processed))
    last = data.draw(st.integers(first, sequence.num_processed))
    part = Tokens(tokens.positions[first:last], tokens.num_prompt, tokens.ids[first:last], None)
    whole, alone = selector.select(tokens), selector.select(part)
    assert alone.possible.tolist() == whole.possible[first:last].tolist()
    assert alone.certain.tolist() == whole.certain[first:last].tolist()


@given(selectors(), sequences())
def test_the_first_position_is_never_above_one_that_is_selected(selector, sequence):
    prompt_ids = np.array(sequence.ids[: sequence.num_prompt], np.int64)
    first = selector.first_position(sequence.num_prompt, prompt_ids)
    assert not any(_oracle(selector, sequence)[:first])
    assert 0 <= first <= sequence.num_prompt


@pytest.mark.parametrize(
    ("tokens", "first"),
    [
        pytest.param("all", 0, id="all"),
        pytest.param("last_prompt", 4, id="last_prompt"),
        pytest.param("last", 4, id="last-may-be-the-prompt's"),
        pytest.param("generated", 5, id="generated-lets-the-whole-prompt-hit"),
        pytest.param("prompt", 0, id="prompt"),
        pytest.param(TokenIds(12), 2, id="a-token-of-the-prompt"),
        pytest.param(TokenIds(99), 5, id="a-token-that-the-prompt-lacks"),
        pytest.param(Except("all", slice(0, 3)), 3, id="all-but-the-first-three"),
    ],
)
def test_a_prefix_cache_hit_may_reach_up_to_the_first_position(tokens, first):
    ids = np.array(ENDED.ids[:5], np.int64)
    assert parse_selector(tokens, "tokens").first_position(5, ids) == first


@given(selectors(), sequences())
def test_a_uniform_selector_answers_by_phase_alone(selector, sequence):
    if not selector.uniform:
        return
    answers = _oracle(selector, sequence)
    assert len(set(answers[: sequence.num_prompt])) == 1
    assert len(set(answers[sequence.num_prompt :])) <= 1


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        pytest.param([-6], ["-6", "5 tokens", "-5 is its first"], id="before-the-prompt"),
        pytest.param([9], ["9", "last position", "is 8"], id="past-the-end"),
        pytest.param(Union("all", [9]), ["9", "is 8"], id="inside-a-union"),
        pytest.param(Except([9], "all"), ["9", "is 8"], id="inside-an-except"),
        pytest.param(Except("all", [9]), ["9", "is 8"], id="excluded"),
    ],
)
def test_a_position_that_cannot_come_is_refused(tokens, words):
    selector = parse_selector(tokens, "tokens")
    with pytest.raises(SpecError) as caught:
        selector.check(num_prompt=5, max_position=8, where="reads[2].tokens")
    assert all(word in str(caught.value) for word in ["reads[2].tokens has", *words])


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param([-5, 8], id="the-first-and-the-last"),
        pytest.param("last", id="a-word"),
        pytest.param(slice(0, 100), id="a-slice-past-the-end"),
        pytest.param(Union([0], TokenIds(3)), id="union"),
    ],
)
def test_positions_that_can_come_are_accepted(tokens):
    parse_selector(tokens, "tokens").check(num_prompt=5, max_position=8, where="tokens")


# Selectors put together


@pytest.mark.parametrize(
    ("made", "same"),
    [
        pytest.param(Positions(0, 3) | "generated", Union([0, 3], "generated"), id="or-a-word"),
        pytest.param("generated" | Positions(0, 3), Union("generated", [0, 3]), id="a-word-or"),
        pytest.param([0] | TokenIds(7) | slice(4, 6), Union([0], TokenIds(7), slice(4, 6)), id="3"),
        pytest.param(np.array([0, 3]) | TokenIds(7), Union([0, 3], TokenIds(7)), id="an-array-or"),
        pytest.param("prompt" - TokenIds(7), Except("prompt", TokenIds(7)), id="a-word-less"),
        pytest.param(TokenIds(7) - "generated", Except(TokenIds(7), "generated"), id="less-a-word"),
        pytest.param(np.arange(3) - Positions(1), Except([0, 1, 2], [1]), id="an-array-less"),
        pytest.param(
            Positions(range(4)) | "generated" - TokenIds(7),
            Union([0, 1, 2, 3], Except("generated", TokenIds(7))),
            id="minus-binds-more-than-or",
        ),
    ],
)
def test_selectors_compose_with_or_and_minus(made, same):
    assert made == same
    assert made.to_json() == same.to_json()
    assert parse_selector(json.loads(json.dumps(made.to_json())), "tokens") == made


@given(selectors(), selectors(), sequences())
def test_or_is_in_any_and_minus_is_in_one_and_not_the_other(one, other, sequence):
    a, b = np.array(_oracle(one, sequence)), np.array(_oracle(other, sequence))
    tokens = sequence.tokens()
    assert ((one | other).select(tokens).certain == (a | b)).all()
    assert ((one - other).select(tokens).certain == (a & ~b)).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda: TokenIds(7) | "first", "Union[1] is 'first'; the words", id="a-word"),
        pytest.param(lambda: 1.5 - TokenIds(7), "Except[0] is 1.5; give one of", id="a-number"),
        pytest.param(lambda: Positions(), "Positions is empty", id="no-positions"),
        pytest.param(
            lambda: Positions(1.5), "Positions has 1.5; its items must be whole", id="a-float"
        ),
        pytest.param(
            lambda: Positions("last"), "Positions has 'last'; its items must", id="a-name"
        ),
    ],
)
def test_what_is_no_selector_does_not_compose(call, words):
    with pytest.raises(SpecError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "made",
    [Positions(5, -1, 5), Positions([5, -1]), Positions((-1, 5)), Positions(np.array([-1, 5]))],
)
def test_positions_are_the_same_in_any_spelling(made):
    assert made == parse_selector([5, -1], "tokens")
    assert Positions(range(2, 4)) == parse_selector([2, 3], "tokens")


# Edits


@pytest.mark.parametrize(
    ("tokens", "decided"),
    [
        pytest.param("all", True, id="all"),
        pytest.param("prompt", True, id="prompt"),
        pytest.param("generated", True, id="generated"),
        pytest.param("last_prompt", True, id="last_prompt"),
        pytest.param([0, -1, 7], True, id="positions"),
        pytest.param(slice(2, None, 3), True, id="slice"),
        pytest.param(Except(TokenIds(10), "generated"), True, id="ids-of-the-prompt"),
        pytest.param(Union("generated", TokenIds(10)), True, id="ids-where-all-else-is-taken"),
        pytest.param(Except("prompt", TokenIds(10)), True, id="the-prompt-without-ids"),
        pytest.param("last", False, id="last"),
        pytest.param(TokenIds(10), False, id="ids-anywhere"),
        pytest.param(TokenIds(99), False, id="ids-that-the-prompt-lacks"),
        pytest.param(Except("all", "last"), False, id="all-but-the-last"),
        pytest.param(Except("all", TokenIds(10)), False, id="all-but-ids"),
        pytest.param(Union([0], "last"), False, id="a-position-and-the-last"),
    ],
)
def test_an_edit_must_know_its_tokens_when_they_are_processed(tokens, decided):
    selector, ids = parse_selector(tokens, "tokens"), np.array(ENDED.ids[:5], np.int64)
    if decided:
        selector.check_decided(5, ids, 8, "edits[3].tokens")
        return
    with pytest.raises(SpecError) as caught:
        selector.check_decided(5, ids, 8, "edits[3].tokens")
    text = str(caught.value)
    assert text.startswith("edits[3].tokens depends on tokens that are not known yet")
    assert "Except(TokenIds(...), 'generated')" in text


@pytest.mark.parametrize("tokens", ["last", TokenIds(10)], ids=["last", "ids"])
def test_without_generated_tokens_ids_are_decided_and_the_last_is_not(tokens):
    # max_tokens=1: the prompt alone is processed, but an edit of "last" would have to
    # know that the request ends there.
    selector, ids = parse_selector(tokens, "tokens"), np.array(ENDED.ids[:5], np.int64)
    if tokens == "last":
        with pytest.raises(SpecError, match="not known yet"):
            selector.check_decided(5, ids, 4, "tokens")
    else:
        selector.check_decided(5, ids, 4, "tokens")


@given(decided_selectors(), sequences())
def test_a_decided_selector_is_the_token_by_token_answer_from_the_start(selector, sequence):
    prompt_ids = np.array(sequence.ids[: sequence.num_prompt], np.int64)
    selector.check_decided(sequence.num_prompt, prompt_ids, len(sequence.ids), "tokens")
    unknown = [False] * sequence.num_processed
    masks = selector.select(sequence.tokens(unknown, ended=False))
    assert masks.certain.tolist() == masks.possible.tolist() == _oracle(selector, sequence)


@given(selectors(), sequences())
def test_what_is_accepted_as_decided_never_changes_its_answer(selector, sequence):
    prompt_ids = np.array(sequence.ids[: sequence.num_prompt], np.int64)
    try:
        last = max(sequence.num_processed, sequence.num_prompt) - 1
        selector.check_decided(sequence.num_prompt, prompt_ids, last, "tokens")
    except SpecError:
        return
    unknown = [False] * sequence.num_processed
    masks = selector.select(sequence.tokens(unknown, ended=False))
    assert masks.certain.tolist() == _oracle(selector, sequence)


SLICES = [{"slice": [i, None, None]} for i in range(40)]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        pytest.param({"union": [[0]] * 65}, "65 parts; at most 64", id="a-union"),
        pytest.param(
            {"union": [{"except": [{"union": SLICES}, {"union": SLICES}]}]},
            "80 parts; at most 64", id="unions",
        ),
        pytest.param(
            {"union": [list(range(40_000)), {"except": [{"token_ids": [1] * 30_000}, "last"]}]},
            "70,000 items in all; at most 65,536", id="items",
        ),
    ],
)  # fmt: skip
def test_a_selector_is_small_as_a_whole(tokens, words):
    with pytest.raises(SpecError, match=words):
        Read("embed", tokens=tokens)


def test_a_union_has_one_list_of_positions_and_one_of_ids():
    given = [[5, -1], "prompt", TokenIds(7), Union([9], TokenIds(3), slice(2)), "prompt", [5]]
    made = Union(*given)
    assert made == Union([-1, 5, 9], TokenIds(3, 7), "prompt", slice(2))
    assert len(made.parts) == 4
    assert parse_selector(json.loads(json.dumps(made.to_json())), "tokens") == made
    tokens = Tokens.running(np.arange(12), 8, [3, 1, 1, 7, 1, 1, 1, 1])
    apart = [parse_selector(part, "part").select(tokens).certain for part in given]
    assert (made.select(tokens).certain == np.logical_or.reduce(apart)).all()


def test_a_selector_of_the_most_parts_is_let_in_and_long_unions_are_not_built():
    Read("embed", tokens=Union(*[slice(i, None) for i in range(64)]))
    with pytest.raises(SpecError, match="100,000 parts"):
        Union(*[[0]] * 100_000)


@given(st.sets(st.integers(-9, 9), min_size=1), st.integers(1, 6))
def test_the_first_position_of_a_list_is_the_first_that_it_selects(positions, num_prompt):
    selector = Positions(*positions)
    tokens = Tokens.running(np.arange(num_prompt, dtype=np.int64), num_prompt, [7] * num_prompt)
    hits = np.flatnonzero(selector.select(tokens).possible)
    wanted = int(hits[0]) if hits.size else num_prompt
    assert selector.first_position(num_prompt, []) == wanted


@pytest.mark.parametrize(
    ("selector", "sees"),
    [
        (TokenIds(3), True),
        (Positions(1) | TokenIds(3), True),
        ("all" - TokenIds(3), True),
        (Positions(1, -1), False),
        (Except("prompt", slice(0, 2)), False),
    ],
)
def test_a_selector_says_whether_it_looks_at_token_ids(selector, sees):
    assert selector.sees_ids is sees
