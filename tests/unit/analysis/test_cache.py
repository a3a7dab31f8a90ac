"""Results as TransformerLens's cache, and the logit lens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.toy_model import TensorResult
from tests.unit.roads import SITES
from vllm_scope import Add, Read, Spec
from vllm_scope.analysis.cache import ActivationCache
from vllm_scope.analysis.hook_names import hook_of, stream_of_key
from vllm_scope.analysis.lens import Lens, top_tokens
from vllm_scope.batch.by_position import Part
from vllm_scope.errors import SpecError
from vllm_scope.request.sites import MODEL_SITES, Place
from vllm_scope.request.sites import SITES as SITES_OF_MODELS
from vllm_scope.results.result import ScopeResult

EMBED = ("embed", 0)


def rows_of(number: float, num_positions: int = 3) -> torch.Tensor:
    """[num_positions, 2]: [number, position]."""
    return torch.stack(
        [torch.full((num_positions,), number), torch.arange(float(num_positions))], dim=1
    )


def result_of(*streams, num_positions: int = 3) -> TensorResult:
    """Row p of the i-th stream is [i, p]."""
    return TensorResult({stream: rows_of(i, num_positions) for i, stream in enumerate(streams)})


FULL = result_of(EMBED, ("resid_post", 0), ("resid_post", 1), ("resid_mid", 0), ("resid_mid", 1))


@pytest.mark.parametrize(
    ("key", "number"),
    [
        pytest.param("hook_embed", 0, id="embed"),
        pytest.param("embed", 0, id="embed-short"),
        pytest.param("blocks.0.hook_resid_pre", 0, id="first-entry-is-the-embedding"),
        pytest.param("blocks.1.hook_resid_pre", 1, id="entry-is-the-exit-before"),
        pytest.param("blocks.1.hook_resid_post", 2, id="exit"),
        pytest.param("blocks.1.hook_resid_mid", 4, id="middle"),
        pytest.param(("resid_post", 1), 2, id="pair"),
        pytest.param(("post_block", 1), 2, id="alias"),
        pytest.param(("resid_post", -1), 2, id="from-the-end"),
        pytest.param(("resid_pre", -2), 0, id="entry-from-the-end"),
    ],
)
def test_a_name_finds_its_rows(key, number):
    cache = ActivationCache(FULL, num_layers=2)
    assert key in cache
    assert torch.equal(cache[key], rows_of(number)[None])


def test_an_exit_is_derived_from_the_entry_after():
    cache = ActivationCache(result_of(("resid_pre", 0), ("resid_pre", 3)))
    assert torch.equal(cache["resid_post", 2], rows_of(1)[None])
    assert torch.equal(cache["hook_embed"], rows_of(0)[None])
    assert set(cache) == {
        "blocks.0.hook_resid_pre", "hook_embed", "blocks.3.hook_resid_pre",
        "blocks.2.hook_resid_post",
    }  # fmt: skip


POST, PRE = ("resid_post", 0), ("resid_pre", 1)


@pytest.mark.parametrize(
    ("read", "when", "edited", "same"),
    [
        (POST, "after", POST, True), (POST, "before", POST, False), (POST, "after", PRE, False),
        (PRE, "after", PRE, False), (PRE, "before", PRE, True), (PRE, "after", POST, True),
        (EMBED, "after", ("resid_pre", 0), False), (EMBED, "after", EMBED, True),
    ],
)  # fmt: skip
def test_a_name_does_not_find_rows_from_the_other_side_of_an_edit(read, when, edited, same):
    spec = Spec(
        (Read(read[0], layer=read[1], when=when),),
        (),
        (Add([1.0] * 4, site=edited[0], layer=edited[1]),),
    )
    at = np.arange(3)
    result = ScopeResult(
        spec.resolve(SITES), SITES, [1, 2, 3, 4], 3,
        {None: {Place(*read).point(when): [Part(at, at, torch.ones(3, 4))]}}, "complete", None,
    )  # fmt: skip
    other = {POST: PRE, PRE: POST, EMBED: ("resid_pre", 0)}[read]
    cache = ActivationCache(result)
    assert len(cache) == 1 + same
    assert ((other[0], other[1]) in [_stream_of(name) for name in cache]) == same


def test_a_name_does_not_find_rows_from_before_a_change_by_the_model():
    sites = replace(SITES, moved=(1,))
    spec, at = Spec((Read("resid_post", layers=[0, 1]), Read("embed"))), np.arange(3)
    places = (Place("embed", 0), Place("resid_post", 0), Place("resid_post", 1))
    result = ScopeResult(
        spec.resolve(sites), sites, [1, 2, 3, 4], 3,
        {None: {place.point(): [Part(at, at, torch.ones(3, 4))] for place in places}},
        "complete", None,
    )  # fmt: skip
    cache = ActivationCache(result, num_layers=2)
    assert torch.equal(cache["resid_post", 0], torch.ones(1, 3, 4))
    assert "blocks.1.hook_resid_pre" not in set(cache)
    for ask in (lambda: cache["blocks.1.hook_resid_pre"], cache.accumulated_resid):
        with pytest.raises(KeyError, match=r"blocks\.1\.hook_resid_pre was not read"):
            ask()
    assert "blocks.0.hook_resid_pre" in set(cache)


def test_router_logits_have_a_name_beside_the_other_rows():
    cache = ActivationCache(result_of(EMBED, ("router_logits", 1)))
    assert torch.equal(cache["blocks.1.router_logits"], rows_of(1)[None])
    assert torch.equal(cache["router_logits", 1], rows_of(1)[None])


@pytest.mark.parametrize("site", SITES_OF_MODELS)
def test_every_site_has_a_name_that_finds_it(site):
    stream = (site, 0 if site in MODEL_SITES else 3)
    assert stream_of_key(hook_of(stream)) == stream


def _stream_of(name: str) -> tuple[str, int]:
    if name == "hook_embed":
        return EMBED
    _, layer, hook = name.split(".")
    return hook.removeprefix("hook_"), int(layer)


def test_rows_that_were_read_under_both_names_stay_apart():
    cache = ActivationCache(result_of(("resid_post", 0), ("resid_pre", 1)))
    assert cache["resid_post", 0][0, 0, 0] == 0
    assert cache["resid_pre", 1][0, 0, 0] == 1


def test_every_key_has_a_value_and_the_last_exit_begins_nothing():
    cache = ActivationCache(FULL, num_layers=2)
    assert "blocks.2.hook_resid_pre" not in set(cache)
    assert [value.shape for value in cache.values()] == [(1, 3, 2)] * len(cache)
    assert len(cache) == 7


@pytest.mark.parametrize("mode", ["both", ["attn"], None])
def test_an_unknown_mode_of_components_is_named(mode):
    with pytest.raises(SpecError, match=r"^mode is .*; it must be one of all, attn, mlp\.$"):
        ActivationCache(FULL, num_layers=2).decompose_resid(mode=mode)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        pytest.param(("resid_post", 7), r"blocks\.7\.hook_resid_post was not read", id="unread"),
        pytest.param("blocks.0.attn.hook_q", "names no stream", id="another-hook"),
        pytest.param(
            "blocks.0.attn.hook_pattern",
            r"follows from blocks\.0\.attn\.hook_rot_q and blocks\.0\.attn\.hook_rot_k; read q",
            id="a-pattern-without-queries",
        ),
        pytest.param("resid_post", "names no stream", id="no-layer"),
        pytest.param(("resid_post", None), "names no stream", id="none-as-the-layer"),
    ],
)
def test_a_stream_that_was_not_read_is_a_key_error(key, message):
    with pytest.raises(KeyError, match=message):
        ActivationCache(FULL, num_layers=2)[key]


def test_counting_from_the_end_needs_the_number_of_layers():
    cache = ActivationCache(FULL)
    for ask in (lambda: cache["resid_post", -1], cache.accumulated_resid):
        with pytest.raises(SpecError, match="num_layers"):
            ask()
    assert cache.stack_activation("resid_mid", 2).shape == (2, 1, 3, 2)


def test_several_results_make_a_batch_padded_on_the_right():
    results = [result_of(EMBED, num_positions=2), result_of(EMBED, num_positions=4)]
    cache = ActivationCache(results)
    embed = cache["embed"]
    assert embed.shape == (2, 4, 2)
    assert cache.lengths.tolist() == [2, 4]
    assert cache.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert torch.equal(embed[0, :2], rows_of(0, 2))
    assert not embed[~cache.mask].any()
    assert torch.equal(embed[1], rows_of(0, 4))


@pytest.mark.parametrize(
    ("results", "message"),
    [
        pytest.param([], "no results", id="none"),
        pytest.param(
            TensorResult({EMBED: rows_of(0)}, {EMBED: [1, 2, 3]}), r"positions \[1, 2, 3\]",
            id="not-from-the-start",
        ),
        pytest.param(
            TensorResult({EMBED: rows_of(0)}, {EMBED: [0, 1, 3]}), "tokens='all'", id="a-gap"
        ),
        pytest.param(result_of(EMBED, num_positions=0), r"positions \[\]", id="no-rows"),
        pytest.param(
            TensorResult({EMBED: rows_of(0, 3), ("resid_post", 0): rows_of(0, 2)}),
            "different lengths", id="uneven-streams",
        ),
        pytest.param(
            [result_of(EMBED), result_of(("resid_post", 0))], r"results\[1\] has other streams",
            id="other-streams",
        ),
        pytest.param(
            [result_of(EMBED), TensorResult({EMBED: rows_of(0)}, status="streaming")],
            r"results\[1\] is 'streaming'", id="still-running",
        ),
    ],
)  # fmt: skip
def test_a_cache_of_some_positions_is_refused(results, message):
    with pytest.raises(SpecError, match=message):
        ActivationCache(results)


@pytest.mark.parametrize(
    ("options", "labels", "numbers"),
    [
        pytest.param({}, ["0_pre", "1_pre", "final_post"], [0, 1, 2], id="all"),
        pytest.param({"layer": -1}, ["0_pre", "1_pre", "final_post"], [0, 1, 2], id="minus-one"),
        pytest.param({"layer": 1}, ["0_pre", "1_pre"], [0, 1], id="up-to-a-layer"),
        pytest.param({"layer": 0}, ["0_pre"], [0], id="the-embedding"),
        pytest.param(
            {"incl_mid": True}, ["0_pre", "0_mid", "1_pre", "1_mid", "final_post"],
            [0, 3, 1, 4, 2], id="with-middles",
        ),
        pytest.param(
            {"layer": 1, "incl_mid": True}, ["0_pre", "0_mid", "1_pre"], [0, 3, 1],
            id="middles-before-the-layer",
        ),
    ],
)  # fmt: skip
def test_the_accumulated_stream_is_labelled_as_in_transformer_lens(options, labels, numbers):
    cache = ActivationCache(FULL, num_layers=2)
    stack, found = cache.accumulated_resid(**options, return_labels=True)
    assert found == labels
    assert stack[:, 0, 0, 0].tolist() == numbers
    assert torch.equal(stack, cache.accumulated_resid(**options))


# --- The lens ----------------------------------------------------------------


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("biased", [False, True])
def test_the_lens_norms_and_unembeds(norm, biased):
    torch.manual_seed(0)
    weight, bias, unembedding = torch.randn(4), torch.randn(4), torch.randn(6, 4)
    rows = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    lens = Lens(weight, 1e-3, unembedding, norm, bias if biased else None)
    x = rows.double()
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + biased * bias
    expected = (normed @ unembedding.double().T).float()
    torch.testing.assert_close(lens.logits(rows), expected, rtol=1e-4, atol=1e-5)


def test_top_tokens_are_those_of_each_position_that_was_read():
    lens = Lens(torch.ones(2), 0.0, torch.eye(2))
    stream = ("resid_post", 3)
    result = TensorResult({stream: torch.tensor([[0.0, 1.0], [1.0, 0.0]])}, {stream: [4, 9]})
    top = top_tokens(lens, result, k=2)
    assert list(top) == [3]
    assert top[3].positions.tolist() == [4, 9]
    assert top[3].token_ids.tolist() == [[1, 0], [0, 1]]
    torch.testing.assert_close(top[3].log_probs.exp().sum(-1), torch.ones(2))


def test_a_lens_that_does_not_fit_is_refused():
    with pytest.raises(SpecError, match=r"norm_weight has shape \[3\]"):
        Lens(torch.ones(3), 0.0, torch.eye(2))
    with pytest.raises(SpecError, match="norm is 'batch'"):
        Lens(torch.ones(2), 0.0, torch.eye(2), "batch")
    with pytest.raises(SpecError, match="for size 2"):
        Lens(torch.ones(2), 0.0, torch.eye(2)).logits(torch.ones(1, 3))
    with pytest.raises(SpecError, match="has no 'resid_post'"):
        top_tokens(Lens(torch.ones(2), 0.0, torch.eye(2)), result_of(EMBED), k=1)
    for k in (0, 3):
        with pytest.raises(SpecError, match=f"k is {k}; it must be from 1 to 2"):
            top_tokens(Lens(torch.ones(2), 0.0, torch.eye(2)), result_of(EMBED), k)


@pytest.mark.parametrize(
    "act",
    [
        lambda cache: cache.accumulated_resid(-2),
        lambda cache: cache.stack_activation("resid_post", 0),
        lambda cache: cache.stack_activation("resid_post", -3),
    ],
)
def test_a_wrong_number_of_layers_is_refused(act):
    with pytest.raises(SpecError, match="layer"):
        act(ActivationCache(FULL, num_layers=2))
