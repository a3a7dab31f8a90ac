"""The steering recipe on the toy world, with plain forward hooks on Hugging Face's model.

What it finds is what it is to find through an engine as well.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from examples.probes import Reading, best_of, fit_layer
from examples.steering import (
    PROBED_STREAM,
    STEERED_STREAM,
    ablate_sentiment,
    flip_reviews,
    move_capitals,
    sentiment_directions,
)
from tests.conftest import TOYWORLD
from tests.toy_model import ToyModel
from toyworld import world
from vllm_scope.analysis.cache import ActivationCache
from vllm_scope.analysis.lens import Lens, top_tokens
from vllm_scope.vectors import SteeringModule, from_bytes, to_bytes


@pytest.fixture(scope="module")
def toy():
    return ToyModel(TOYWORLD)


@pytest.fixture(scope="module")
def directions(toy):
    return sentiment_directions(toy.read)


def test_adding_the_sentiment_direction_turns_reviews_and_keeps_their_grammar(toy, directions):
    # By way of bytes, as a server would get it.
    figures = flip_reviews(toy.generate, from_bytes(to_bytes(directions)))
    assert figures.both >= 0.9, figures


def test_without_steering_no_review_turns(toy, directions):
    figures = flip_reviews(toy.generate, directions, scale=0)
    assert figures.flipped == 0.0
    assert figures.grammatical == 1.0


def test_a_random_direction_of_the_same_length_turns_no_review(toy, directions):
    torch.manual_seed(0)
    random = torch.nn.functional.normalize(torch.randn(directions.hidden_size), dim=0)
    length = torch.tensor(directions[STEERED_STREAM]).norm()
    figures = flip_reviews(toy.generate, SteeringModule({STEERED_STREAM: random * length}))
    assert figures.flipped <= 0.05, figures


def test_too_much_of_the_direction_breaks_the_grammar(toy, directions):
    figures = flip_reviews(toy.generate, directions, scale=3.0, num_reviews=20)
    assert figures.grammatical <= 0.1, figures


def test_ablating_the_direction_leaves_a_probe_at_chance(toy, directions):
    figures = ablate_sentiment(toy.generate, toy.read, directions, num_prompts=100)
    assert figures.auroc >= 0.99
    assert abs(figures.auroc_ablated - 0.5) <= 0.15, figures
    assert abs(figures.auroc_refitted - 0.5) <= 0.15, figures
    assert figures.kept == 1.0
    assert figures.kept_ablated <= 0.75, figures
    assert figures.grammatical_ablated >= 0.95, figures


def test_the_country_row_moves_the_capital_until_layer_1_has_read_it(toy):
    streams = [("embed", 0), ("resid_post", 0), ("resid_post", 1)]
    moved = move_capitals(toy.generate, toy.read, toy.token_ids, streams)
    assert moved["embed", 0] == 1.0
    assert moved["resid_post", 0] >= 0.6, moved
    assert moved["resid_post", 1] == 0.0


def test_the_lens_at_the_last_layer_is_the_model(toy):
    text = "The capital of"
    base = toy.model.model
    lens = Lens(base.norm.weight, base.norm.variance_epsilon, toy.model.lm_head.weight)
    (result,) = toy.read([text], [()])
    with torch.inference_mode():
        expected = toy.model(torch.tensor([toy.token_ids(text)])).logits[0]
        torch.testing.assert_close(lens.logits(result[PROBED_STREAM]), expected)
        top = top_tokens(lens, result, k=3)
    assert sorted(top) == list(range(6))
    assert torch.equal(top[5].token_ids, expected.topk(3).indices)
    torch.testing.assert_close(top[5].log_probs, expected.log_softmax(-1).topk(3).values)


def test_a_cache_of_a_run_holds_the_streams_of_hugging_face(toy):
    text = "The capital of"
    (result,) = toy.read([text], [()])
    cache = ActivationCache(result, num_layers=6)
    with torch.inference_mode():
        ids = torch.tensor([toy.token_ids(text)])
        hidden_states = toy.model(ids, output_hidden_states=True).hidden_states
    # The last of them has the final norm applied.
    assert torch.equal(cache.accumulated_resid()[:-1], torch.stack(hidden_states[:-1]))


@pytest.mark.parametrize("label", [True, False])
def test_what_the_world_writes_about_a_thing_is_a_review(label):
    for prompt in world.sentiment_prompts(50) + world.review_openings(50):
        if prompt.label is label:
            assert world.is_review(prompt.text), prompt.text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("The story was", id="cut-short"),
        pytest.param("The story was was dull.", id="a-word-twice"),
        pytest.param("The story was France.", id="a-word-of-no-list"),
        pytest.param("The story was dull. story The", id="a-tail"),
        pytest.param("The story was dull.The story was dull.", id="no-space"),
        pytest.param("The capital of Ritova is Sanel.", id="a-fact"),
    ],
)
def test_other_text_is_no_review(text):
    assert not world.is_review(text)


def test_the_demo_fits_probes_to_rows_and_reads_texts_with_them(toy):
    def readings(split):
        prompts = world.sentiment_prompts(60, split=split)
        results = toy.read([p.text for p in prompts], [()] * len(prompts))
        return [
            Reading(("",) * num_prompt, num_prompt, prompt.label, result)
            for prompt, result in zip(prompts, results, strict=True)
            for num_prompt in (len(result[PROBED_STREAM]),)
        ]

    train, test = readings("train"), readings("test")
    layers = [fit_layer(("resid_post", k), train, test) for k in (0, 5)]
    assert best_of(layers) == 1
    probe = layers[1]
    assert probe.auroc_last >= 0.95
    assert probe.auroc_at(test, [r.num_prompt - 1 for r in test]) >= 0.95
    # An engine gives bf16 rows.
    rounded = replace(test[0], scope={PROBED_STREAM: test[0].rows(PROBED_STREAM).bfloat16()})
    torch.testing.assert_close(
        probe.probabilities(rounded), probe.probabilities(test[0]), atol=0.05, rtol=0
    )
    assert len(probe.probabilities(rounded)) == rounded.num_prompt
