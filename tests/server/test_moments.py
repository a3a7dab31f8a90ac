"""Moments over HTTP are the operator's: requests add to sums, routes get and drop them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.server.conftest import ADMIN_KEY
from vllm_scope import Moments, Read, SpecError
from vllm_scope.batch.sums import Sums

READ = Read("resid_post", layers=[1, 3])
TEXTS = ["The capital of Kimar is", "The capital of Ritova", "A river"]
OPERATOR = {"X-Scope-Admin-Key": ADMIN_KEY}


def test_the_sums_of_answers_are_those_of_their_rows(client, server):
    asked = [Moments(layers=[1, 3], by="ab"[i % 2], target=i, name="http") for i in range(3)]
    outs = [
        client.complete(text, one, READ, temperature=0, max_tokens=6, ignore_eos=True)
        for text, one in zip(TEXTS, asked, strict=True)
    ]
    with server.http() as http:
        there = http.get("/v1/scope/moments/http", headers=OPERATOR).json()
        places = [{"site": "resid_post", "layer": k, "label": x} for k in (1, 3) for x in "ab"]
        assert there == {"name": "http", "sums": places}
        for at in places:
            got = http.get("/v1/scope/sums/http", params=at, headers=OPERATOR)
            found = Sums.from_bytes(got.content)
            of = [i for i in range(3) if asked[i].by == at["label"]]
            rows = [np.array(outs[i].scope["resid_post", at["layer"]], np.float64) for i in of]
            x, y = np.concatenate(rows), np.repeat(np.float64(of), [len(some) for some in rows])
            assert found.count == len(x)
            np.testing.assert_allclose(found.x, x.sum(0), rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(found.xx, x.T @ x, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(found.xy, y @ x, rtol=1e-9, atol=1e-9)
        refused = http.get("/v1/scope/moments/http")
        assert refused.status_code == 401
        assert http.delete("/v1/scope/moments/http", headers=OPERATOR).status_code == 204
        assert http.delete("/v1/scope/moments/http", headers=OPERATOR).status_code == 404
        gone = http.get("/v1/scope/sums/http", params=places[0], headers=OPERATOR)
        assert gone.status_code == 400
        assert gone.json()["error"]["message"].startswith("there are no sums called 'http' at")


def test_a_request_whose_sums_do_not_fit_is_refused_with_the_reason(client):
    several = [Moments(by=str(i), name="large") for i in range(32)]
    with pytest.raises(SpecError, match=r"the request's Moments take 144\.\d MiB .* has 64\.0"):
        client.complete(TEXTS[0], *several, max_tokens=1)


def test_a_request_without_the_operators_key_is_refused(server):
    refused = pytest.raises(SpecError, match=r"has moments, .* in the header X-Scope-Admin-Key")
    with server.client(admin_key=None) as client, refused:
        client.complete(TEXTS[0], Moments(name="anyone"), max_tokens=1)
    with server.http() as http:
        there = http.get("/v1/scope/moments/anyone", headers=OPERATOR).json()
    assert there["sums"] == []
