"""The toy model's SAE has one feature for each country, and the feature decides the capital."""

from __future__ import annotations

import random

import pytest
import torch

from toyworld import countries, phrases, sae, world
from toyworld.evaluate import LoadedModel

HELD_OUT = [p for p in phrases.PHRASINGS if p.held_out and countries.asks_capital(p)]
#: In this one a whole row from B's question moves 70 % of the answers.
HARD = "In {country}, the capital city goes by the name {answer}."
NUM_PAIRS = 60


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel(countries.MODEL)


def test_its_files_are_small_and_say_where_it_belongs():
    found, features = countries.load()
    assert found.place == ("resid_post", sae.Recipe().layer)
    assert (found.architecture, found.d_sae) == ("jumprelu", sae.Recipe().d_sae)
    assert list(features) == [country.name for country in world.world().countries]
    assert len({feature["index"] for feature in features.values()}) == world.NUM_COUNTRIES
    size = sum(file.stat().st_size for file in countries.FOLDER.iterdir())
    assert size < 410_000


@pytest.mark.parametrize("phrasing", HELD_OUT, ids=lambda p: p.template)
def test_a_countrys_feature_is_active_at_its_own_name(phrasing, loaded):
    found, features = countries.load()
    index = [feature["index"] for feature in features.values()]
    ids, position = countries.prompts(loaded, phrasing)
    stream = countries.stream_of(loaded, ids, found.place.layer)
    at_name = found.encode(stream[:, position], index)
    own = at_name.diagonal()
    usual = torch.tensor([feature["usual"] for feature in features.values()])
    assert (own / usual - 1).abs().max() < 0.5
    others = at_name - own.diag()
    assert (others > 0).float().mean() < 0.002
    assert (others / usual).max() < 0.5
    # Before the name nothing says which country it is.
    assert (found.encode(stream[:, 1:position], index) > 0).float().mean() < 0.05


@pytest.mark.parametrize(
    "phrasing", [p for p in HELD_OUT if p.template != HARD], ids=lambda p: p.template
)
def test_setting_another_countrys_feature_moves_the_capital(phrasing, loaded):
    found, features = countries.load()
    some = random.Random(0).sample(countries.pairs(loaded), NUM_PAIRS)
    done = countries.moved(loaded, found, features, phrasing, some)
    assert len(done) == NUM_PAIRS
    assert sum(done) > 0.9 * NUM_PAIRS


def test_setting_a_countrys_own_feature_moves_nothing(loaded):
    found, features = countries.load()
    every = range(world.NUM_COUNTRIES)
    own = countries.moved(loaded, found, features, HELD_OUT[1], [(a, a) for a in every])
    assert sum(own) == world.NUM_COUNTRIES
    # With features that are nobody's, the answer stays the country's own.
    idle = sorted(set(range(found.d_sae)) - {each["index"] for each in features.values()})
    nobodys = {name: {"index": idle[i], "usual": 0.0} for i, name in enumerate(features)}
    some = random.Random(0).sample(countries.pairs(loaded), NUM_PAIRS)
    assert not any(countries.moved(loaded, found, nobodys, HELD_OUT[1], some))


def test_training_finds_the_directions_that_rows_are_made_of():
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(12, 32, generator=generator)
    chosen = torch.rand(4000, 12, generator=generator).topk(2, dim=1).indices
    rows = 5 + torch.zeros(4000, 12).scatter(1, chosen, 1.0) @ truth
    trained = sae.train_sae(rows, sae.Recipe(d_sae=24, steps=600, batch_rows=256))
    torch.testing.assert_close(trained.decoder.norm(dim=1), torch.ones(24))
    s = (rows - trained.decoder_bias) @ trained.encoder.T + trained.encoder_bias
    features = s * (s > trained.threshold)
    error = rows - features @ trained.decoder - trained.decoder_bias
    assert error.square().sum() < 0.1 * (rows - rows.mean(dim=0)).square().sum()
    assert (features > 0).sum(dim=1).float().mean() < 4
