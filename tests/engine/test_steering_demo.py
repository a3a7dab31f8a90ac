"""The steering recipe through vLLM: what hooks on Hugging Face's model find, edits find."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from examples import steered
from examples.steering import (
    ABLATED_STREAM,
    PROBED_STREAM,
    STEERED_STREAM,
    AblationFigures,
    Edit,
    SteeringFigures,
    flip_reviews,
    move_capitals,
    sentiment_directions,
)
from examples.with_vllm import VllmModel, as_action
from tests.conftest import TOYWORLD, local_engine
from toyworld import world

pytestmark = pytest.mark.long

EMBED = ("embed", 0)


@pytest.fixture(scope="module")
def model():
    with local_engine(TOYWORLD, max_model_len=256, skip_tokenizer_init=None) as llm:
        yield VllmModel(llm)


@pytest.fixture(scope="module")
def directions(model):
    return sentiment_directions(model.read, num_prompts=80)


def test_adding_the_sentiment_turns_reviews_and_keeps_their_sentences_whole(model, directions):
    figures = flip_reviews(model.generate, directions, num_reviews=40)
    assert figures.both >= 0.9, figures


def test_a_scale_of_zero_turns_no_review(model, directions):
    figures = flip_reviews(model.generate, directions, scale=0, num_reviews=40)
    assert (figures.flipped, figures.grammatical) == (0.0, 1.0)


def test_what_is_read_under_an_ablation_has_nothing_along_the_direction(model, directions):
    texts = [prompt.text for prompt in world.sentiment_prompts(4, split="test")]
    vector = torch.tensor(directions[ABLATED_STREAM])
    unit = vector / vector.norm()
    (plain, *_), (ablated, *_) = (
        model.read(texts, [edits] * 4) for edits in ((), [Edit("ablate", ABLATED_STREAM, vector)])
    )
    along = (plain[ABLATED_STREAM].float() @ unit).abs().max()
    left = (ablated[ABLATED_STREAM].float() @ unit).abs().max()
    assert left < 0.05 * along, (left, along)
    assert torch.equal(plain["resid_post", 0], ablated["resid_post", 0])
    assert not torch.equal(plain[PROBED_STREAM], ablated[PROBED_STREAM])


def test_the_country_row_moves_the_capital(model):
    moved = move_capitals(model.generate, model.read, model.token_ids, [EMBED])
    assert moved[EMBED] >= 0.9, moved


def test_rows_are_set_at_named_positions_only():
    row = torch.ones(4)
    action = as_action(Edit("set", EMBED, row, positions=(2, 5)))
    assert (action.positions, action.values.shape) == ((2, 5), (2, 4))
    with pytest.raises(ValueError, match="name its positions"):
        as_action(Edit("set", STEERED_STREAM, row))


AS_PROMISED = steered.Figures(
    plain=SteeringFigures(0.0, 1.0, 0.0),
    steered=SteeringFigures(1.0, 0.9, 0.9),
    ablated=AblationFigures(1.0, 0.45, 0.55, 1.0, 0.5, 1.0),
    moved=0.9,
)


def test_figures_as_promised_pass():
    steered.check(AS_PROMISED)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"steered": SteeringFigures(1.0, 0.8, 0.8)}, "turned 80 %", id="grammar"),
        pytest.param(
            {"ablated": replace(AS_PROMISED.ablated, auroc=0.8)}, "of 0.800 on rows", id="no-probe"
        ),
        pytest.param(
            {"ablated": replace(AS_PROMISED.ablated, auroc_ablated=0.8)}, "of 0.800", id="left"
        ),
        pytest.param(
            # A probe that is always wrong knows the answer.
            {"ablated": replace(AS_PROMISED.ablated, auroc_refitted=0.2)}, "of 0.200", id="turned",
        ),
        pytest.param({"moved": 0.5}, "50 % of the countries", id="capitals"),
    ],
)  # fmt: skip
def test_a_figure_that_falls_short_ends_the_demo_with_a_sentence(changes, sentence):
    with pytest.raises(AssertionError, match=sentence):
        steered.check(replace(AS_PROMISED, **changes))
