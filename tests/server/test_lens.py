"""Lenses over HTTP: in an answer, in chunks, and in a file where they are many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.lens import agree, log_probs
from tests.lenses import random_lens
from vllm_scope import LensTopK, Probe, Read, SpecError

LENS = LensTopK(layers=[0, 5], top_k=4)
TEXT = "The capital of Kimar is"
OPTIONS = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def test_the_last_layer_is_the_answers_own_logprobs(client):
    out = client.complete(TEXT, LENS, logprobs=4, return_tokens_as_token_ids=True, **OPTIONS)
    body = out.raw["choices"][0]
    assert [(one["name"], one["layer"]) for one in body["scope"]["lens"]] == [
        ("lens", 0),
        ("lens", 5),
    ]
    found = out.scope.lens["lens"][5]
    top = body["logprobs"]["top_logprobs"]
    num_prompt = out.raw["usage"]["prompt_tokens"]
    assert found.positions.tolist() == list(range(num_prompt + 7))
    assert found.token_ids.shape == found.log_probs.shape == (num_prompt + 7, 4)
    for i, wanted in enumerate(top):
        known = {int(name.removeprefix("token_id:")): value for name, value in wanted.items()}
        agree(found.top(num_prompt - 1 + i), known, 1e-4)
    assert out.scope.delivered == out.scope.expected == 2 * (num_prompt + 7)
    plain = client.complete(TEXT, Read("embed"), **OPTIONS)
    assert "lens" not in plain.raw["choices"][0]["scope"]


@pytest.mark.parametrize("stream", ["scores", "rows"])
def test_chunks_carry_each_token_once(client, stream):
    actions = (LENS, Read("resid_post", layers=[0]), Probe(np.ones(256), layer=1, name="p"))
    chunks = list(client.stream(TEXT, *actions, scope_stream=stream, **OPTIONS))
    whole = client.complete(TEXT, *actions, **OPTIONS).scope.lens["lens"]
    for layer, found in whole.items():
        parts = [
            c.scope.lens["lens"][layer] for c in chunks if layer in c.scope.lens.get("lens", {})
        ]
        assert len(parts) > 2
        for field in ("positions", "token_ids"):
            joined = np.concatenate([getattr(part, field) for part in parts])
            assert joined.tolist() == getattr(found, field).tolist()
        joined = np.concatenate([part.log_probs for part in parts])
        np.testing.assert_allclose(joined, found.log_probs, rtol=0, atol=1e-4)
    assert chunks[-1].scope.status == "complete"


def test_a_named_lens_maps_the_rows_first(client, ref):
    named = LensTopK(lens="named", top_k=4)
    out = client.complete(TEXT, named, Read("resid_post", layers=[0, 4]), **OPTIONS)
    lens = random_lens("named", [0, 4], 256)
    assert list(out.scope.lens["lens"]) == [0, 4]
    for layer, found in out.scope.lens["lens"].items():
        rows = torch.from_numpy(np.array(out.scope["resid_post", layer]))
        exact = log_probs(ref, lens.map(rows, ("resid_post", layer)))
        for position in found.positions.tolist():
            agree(found.top(position), dict(enumerate(exact[position].tolist())), 1e-3)


def test_many_tokens_come_as_a_file(client):
    lenses = [LensTopK(layers=[0, 5], top_k=100, name=name) for name in ("a.b", "c")]
    out = client.complete(TEXT * 12, *lenses, **OPTIONS)
    body = out.raw["choices"][0]["scope"]
    assert body["result"] is not None
    assert "token_ids" not in body["lens"][0]
    few = client.complete(TEXT * 12, LENS, **OPTIONS).scope.lens["lens"][5]
    found = out.scope.lens["a.b"][5]
    assert found.positions.tolist() == few.positions.tolist()
    np.testing.assert_allclose(found.log_probs[:, :4], few.log_probs, rtol=0, atol=1e-4)
    assert found.token_ids.shape[1] == 100


def test_a_bad_lens_is_refused_in_one_sentence(client):
    for bad, words in (
        (LensTopK(layers=[6]), "lens[0].layers has 6; this model has layers 0 to 5"),
        (
            LensTopK(lens="x"),
            "lens[0].lens is 'x', which this engine does not hold; it holds: named",
        ),
        (LensTopK(name="monitor/x"), "lens[0].name is 'monitor/x'; names that begin with"),
    ):
        with pytest.raises(SpecError) as caught:
            client.complete(TEXT, bad, **OPTIONS)
        assert words in str(caught.value)
