"""Features over HTTP: in an answer, in chunks, and in a file where they are many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.conftest import TOYWORLD
from vllm_scope import Features, Probe, Read, SpecError
from vllm_scope.saes.load import load_sae

READ = Read("resid_post", layers=[0])
TOP, SOME = Features("toy", top_k=16), Features("toy", indices=[5, 100, 3], name="some")
TEXT = "The capital of Kimar is"
OPTIONS = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def check(features, rows, positions) -> None:
    exact = load_sae(TOYWORLD / "sae").encode(torch.from_numpy(np.array(rows)))
    best = exact.topk(16)
    top = features["toy"]
    assert top.tokens.tolist() == list(positions)
    for i, position in enumerate(positions):
        got = top.top(position)
        active = best.values[i] > 0
        assert [index for index, _ in got] == best.indices[i][active].tolist()
        values = torch.tensor([value for _, value in got])
        torch.testing.assert_close(values, best.values[i][active], rtol=1e-4, atol=1e-4)
    assert len(top.values)
    for index in (5, 100, 3) if "some" in features else ():
        found = torch.from_numpy(features["some"].dense(index))
        torch.testing.assert_close(found, exact[:, index], rtol=1e-4, atol=1e-4)


def test_an_answer_has_the_features_of_each_token(client):
    out = client.complete(TEXT, TOP, SOME, READ, **OPTIONS)
    positions = out.scope.positions("resid_post", 0)
    check(out.scope.features, out.scope["resid_post", 0], positions.tolist())
    body = out.raw["choices"][0]["scope"]
    assert body["result"] is None
    assert body["features"]["toy"]["spans"] == [[0, len(positions)]]
    assert out.scope.delivered == out.scope.expected == 3 * len(positions)
    top, some = out.scope.features["toy"], out.scope.features["some"]
    assert (top.num_features, top.asked, some.asked) == (384, None, (5, 100, 3))
    for found, index, words in (
        (some, 6, r"feature 6 was not read; the read named \[5, 100, 3\]"),
        (top, 384, "feature 384 is not there; the SAE has features 0 to 383"),
    ):
        with pytest.raises(KeyError, match=words):
            found.dense(index)
    plain = client.complete(TEXT, READ, **OPTIONS)
    assert "features" not in plain.raw["choices"][0]["scope"]


@pytest.mark.parametrize("stream", ["scores", "rows"])
def test_chunks_carry_each_feature_once(client, stream):
    probe = Probe(np.ones(256, np.float32), layer=1, name="p")
    actions = (TOP, SOME, READ, probe)
    chunks = list(client.stream(TEXT, *actions, scope_stream=stream, **OPTIONS))
    whole = client.complete(TEXT, *actions, **OPTIONS).scope
    for name, found in whole.features.items():
        parts = [c.scope.features[name] for c in chunks if name in c.scope.features]
        assert len(parts) > 2
        read = (384, None) if name == "toy" else (None, (5, 100, 3))
        assert {(one.num_features, one.asked) for one in (*parts, found)} == {read}
        for field in ("positions", "indices", "tokens"):
            joined = np.concatenate([getattr(part, field) for part in parts])
            assert joined.tolist() == getattr(found, field).tolist()
    assert chunks[-1].scope.status == "complete"


def test_many_features_come_as_a_file(client):
    text = TEXT + " known to every child" * 75
    # A token of the toy world has two or three active features.
    features = [Features("toy", top_k=64, name=name) for name in "abcdefghijklm"]
    out = client.complete(text, *features, READ, **OPTIONS)
    body = out.raw["choices"][0]["scope"]
    assert body["result"] is not None
    assert "values" not in body["features"]["b"]
    positions = out.scope.positions("resid_post", 0).tolist()
    assert len(positions) > 300
    assert out.scope.features["b"].tokens.tolist() == positions
    with pytest.raises(KeyError, match="the SAE has features 0 to 383"):
        out.scope.features["b"].dense(384)
    exact = load_sae(TOYWORLD / "sae").encode(torch.from_numpy(out.scope["resid_post", 0]))
    for index in exact.sum(0).topk(5).indices.tolist():
        kept = exact[:, index] >= exact.topk(64).values[:, -1]
        found = torch.from_numpy(out.scope.features["b"].dense(index))
        torch.testing.assert_close(found, exact[:, index] * kept, rtol=1e-4, atol=1e-4)


def test_bad_features_are_refused_in_one_sentence(client):
    for bad, words in (
        (Features("no"), "features[0].sae is 'no'"),
        (Features("toy", layer=3), "features[0].layers is 3; the SAE 'toy' is of 'resid_post' 0"),
        (Features("toy", top_k=400), "features[0].top_k is 400; the SAE 'toy' has 384 features"),
        (Features("toy", name="a.tokens"), "over HTTP no name ends in '.tokens'"),
    ):
        with pytest.raises(SpecError) as caught:
            client.complete(TEXT, bad, **OPTIONS)
        assert words in str(caught.value)
