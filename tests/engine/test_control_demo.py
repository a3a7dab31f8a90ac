"""The gated edit of the example: it turns lies of speakers that it was not fitted to, and honest
speakers keep their token ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.control import LAYERS, fit, outcome, speak, speakers, split
from tests.conftest import TOYWORLD, local_engine

pytestmark = pytest.mark.long

#: The place and the scale that the example chooses.
STREAM, SCALE = ("resid_mid", 2), 1.5
NUM_TRAIN, NUM_TEST = 300, 100


@pytest.fixture(scope="module")
def said():
    """Of test speakers, by the edit."""
    sites = {"scope": {"sites": ["embed", *LAYERS]}}
    with local_engine(
        TOYWORLD, max_model_len=256, skip_tokenizer_init=None, additional_config=sites
    ) as llm:
        known = speakers(NUM_TRAIN + 100, "train")
        controls = fit(llm, known[:NUM_TRAIN], known[NUM_TRAIN:])
        (control,) = [replace(c, scale=SCALE) for c in controls if c.stream == STREAM]
        edits = {"none": [], "gated": [control.edit()], "always": [control.edit(gated=False)]}
        test = speakers(NUM_TEST, "test")
        return {name: speak(llm, test, *edit) for name, edit in edits.items()}


def test_the_gated_edit_turns_lies_and_honest_speakers_keep_their_tokens(said):
    honest, lying = map(len, split(said["none"]))
    before, after = (outcome(said[name], said["none"]) for name in ("none", "gated"))
    assert (before.lies, before.honest) == (lying, honest)
    assert after.turned >= 0.9 * lying
    assert after.kept >= 0.97 * honest


def test_without_the_gate_honest_speakers_have_other_tokens(said):
    honest, _ = split(said["none"])
    assert outcome(said["always"], said["none"]).kept <= 0.1 * len(honest)


def test_a_speaker_whose_gate_stays_closed_has_the_tokens_of_no_edit(said):
    closed = [
        (gated, plain)
        for gated, plain in zip(said["gated"], said["none"], strict=True)
        if not gated.opened.any()
    ]
    assert len(closed) >= 0.4 * NUM_TEST
    assert all(gated.token_ids == plain.token_ids for gated, plain in closed)
    assert all(not gated.scores("dose").any() for gated, _ in closed)
