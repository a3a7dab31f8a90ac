"""How a tap advances the states of gates."""

from __future__ import annotations

import pytest
import torch

from tests.unit.walking import NUMBERS, advanced
from vllm_scope.graph.tap.definition import tap_rows
from vllm_scope.program.operations import ADVANCING, OP_EMA, OP_HYSTERESIS, OP_PID

SCORES = torch.randn(24, generator=torch.Generator().manual_seed(3))


def test_every_state_is_tested():
    assert set(NUMBERS) == set(ADVANCING)


@pytest.mark.parametrize("code", ADVANCING)
def test_one_row_at_a_time_and_several_give_the_same_bits(code):
    whole = advanced(tap_rows, code, SCORES, [1] * 24)
    for sizes in ([24], [5, 1, 7, 1, 10], [3] * 8):
        assert torch.equal(advanced(tap_rows, code, SCORES, sizes), whole)


@pytest.mark.parametrize("code", ADVANCING)
def test_a_token_that_has_its_state_replays_it(code):
    whole = advanced(tap_rows, code, SCORES, [1] * 24)
    for replays in (1, 12, 23):
        assert torch.equal(advanced(tap_rows, code, SCORES, [12, 11, 1], replays=replays), whole)


@pytest.mark.parametrize("code", ADVANCING)
def test_drafts_that_are_rejected_leave_nothing(code):
    whole = advanced(tap_rows, code, SCORES, [1] * 24)
    for sizes in ([1] * 24, [2, 1, 4, 1, 3, 2, 1, 4, 3, 3]):
        found = advanced(tap_rows, code, SCORES, sizes, rejected=3)
        assert torch.equal(found, whole)


def test_states_are_what_their_formulas_say():
    scores = SCORES.double()
    mean = total = 0.0
    is_open, last, wanted = 0.0, None, {code: [] for code in ADVANCING}
    for score in scores.tolist():
        mean = score if last is None else 0.9 * mean + 0.1 * score
        wanted[OP_EMA].append(1 / (1 + 2.718281828459045 ** (-1.7 * (mean - 0.1))))
        is_open = 1.0 if score > 0.8 else 0.0 if score < -0.3 else is_open
        wanted[OP_HYSTERESIS].append(is_open)
        error = score - 0.1
        total = min(max(total + error, -9.0), 9.0)
        change = 0.0 if last is None else error - last
        wanted[OP_PID].append(min(max(0.37 * error + 0.11 * total - 0.21 * change, 0.0), 1.0))
        last = error
    for code, values in wanted.items():
        assert len(set(values)) > 3 or code == OP_HYSTERESIS
        found = advanced(tap_rows, code, SCORES, [24])[:, 0]
        torch.testing.assert_close(found, torch.tensor(values), rtol=1e-5, atol=1e-6)
    assert set(wanted[OP_HYSTERESIS]) == {0.0, 1.0}


def test_no_state_is_kept_beyond_the_places_of_a_request():
    """The last place then has the state of the last token."""
    whole = advanced(tap_rows, OP_PID, SCORES, [1] * 24)
    few = advanced(tap_rows, OP_PID, SCORES, [1] * 24, num_tokens=20)
    assert torch.equal(few[:19], whole[:19])
    assert few[19].any()
    assert not few[20:].any()
