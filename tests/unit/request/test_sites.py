"""What an engine taps: the sites that were configured, and where edits are checked."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from vllm_scope.config import ScopeConfig
from vllm_scope.engine.model import sites_of
from vllm_scope.errors import SpecError
from vllm_scope.request.sites import KINDS, Place, Sites, place_at


def _sites(**options: object) -> Sites:
    model = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 4, get_hidden_size=lambda: 8, dtype="torch.float32"
    )
    config = SimpleNamespace(model_config=model, num_speculative_tokens=0)
    return sites_of(config, ScopeConfig.parse(options))


@pytest.mark.parametrize(
    ("options", "boundaries", "guard"),
    [
        pytest.param({}, (0, 2, 4, 6, 8), None, id="by-default-the-last-exit-is-there"),
        pytest.param({"layers": [1]}, (0, 4, 8), 8, id="a-layer"),
        pytest.param({"sites": ["resid_pre"]}, (0, 2, 4, 6, 8), 8, id="entries"),
        pytest.param({"sites": ["embed"]}, (0, 8), 8, id="the-embedding"),
        pytest.param({"sites": ["resid_post"], "layers": [3]}, (8,), None, id="the-last-one"),
        pytest.param(
            {"sites": ["attn_out"], "layers": [3]}, (8, Place("attn_out", 3).boundary), 8,
            id="inside-a-layer",
        ),
    ],
)  # fmt: skip
def test_where_the_stream_is_tapped_edits_are_checked_at_its_end(options, boundaries, guard):
    sites = _sites(**options)
    assert (sites.boundaries, sites.guard) == (boundaries, guard)
    assert sites.readable == set(boundaries) - {guard}
    assert Sites.from_body(asdict(sites), sites.boundaries) == sites


def test_nothing_can_be_asked_for_where_edits_are_only_checked():
    sites = _sites(layers=[1])
    assert sites.last_of_stream == 8
    assert sites.find("resid_post", None, "reads[0]") == (("resid_post", 1),)
    with pytest.raises(SpecError, match="layers has 3; this engine does not tap 'resid_post'"):
        sites.find("resid_post", (3,), "reads[0]")


def test_a_boundary_is_named_by_its_first_site():
    named = [place_at(boundary) for boundary in range(5)]
    assert named == [
        ("embed", 0), ("resid_mid", 0), ("resid_post", 0), ("resid_mid", 1), ("resid_post", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("site", [*KINDS[1:], "resid_mid", "resid_post"])
def test_a_boundary_has_the_place_that_it_was_made_of(site):
    for layer in (0, 1, 80):
        assert place_at(Place(site, layer).boundary) == (site, layer)


def test_where_the_model_changes_the_stream_a_layers_entry_cannot_be_named():
    sites = replace(_sites(), moved=(2,))
    assert Sites.from_body(asdict(sites), sites.boundaries) == sites
    assert sites.find("resid_pre", None, "reads[0]") == tuple(("resid_pre", k) for k in (0, 1, 3))
    with pytest.raises(
        SpecError, match=r"layers has 2; this model changes .* resid_post of layer 1"
    ):
        sites.find("resid_pre", (1, 2), "reads[0]")
    assert sites.find("resid_post", (1, 2), "reads[0]") == (("resid_post", 1), ("resid_post", 2))
