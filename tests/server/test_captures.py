"""Reads that go to the operator's sinks: whose files they are, and what callers are told."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import vllm_scope
from tests.server.conftest import ADMIN_KEY, API_KEY, OTHER_KEY
from vllm_scope import Read, scope
from vllm_scope.server.store import owner_of

BODY = {"model": "toyworld", "max_tokens": 2, "temperature": 0}
SECRETS = ("captures", "/tmp", "Traceback")


def ask(http, prompt, *reads, headers=None, **more):
    body = BODY | {"prompt": prompt, "vllm_xargs": scope(*reads)} | more
    response = http.post("/v1/completions", json=body, headers=headers or {})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["scope"], response.text


def read(**more):
    return Read("resid_post", layers=[1], tokens="prompt", to="filesystem", **more)


def test_a_caller_is_told_counts_and_names_and_the_operator_the_paths(server):
    captures = server.results.parent / "captures"
    with server.http() as http:
        told, text = ask(http, [5] * 7, read(tag="mine", name="told"))
        known, _ = ask(http, [5] * 7, read(tag="mine", name="told"),
                       headers={"X-Scope-Admin-Key": ADMIN_KEY})  # fmt: skip
    assert (told["status"], told["expected"], told["delivered"]) == ("complete", 0, 0)
    found = {"status": "ok", "reason": None, "expected": 7, "delivered": 7, "dropped": 0,
             "names": ["told.safetensors"]}  # fmt: skip
    assert told["sinks"] == {"filesystem": found}
    assert not any(secret in text for secret in SECRETS)
    (details,) = known["sinks"]["filesystem"].pop("details")
    assert known["sinks"]["filesystem"] == found
    assert details["root"] == str(captures)
    (path,) = details["paths"]
    assert path.startswith(str(captures))
    assert len(vllm_scope.open(path)[0]["resid_post", 1]) == 7


def test_no_key_replaces_what_another_has_captured(server):
    """The same tag and name, and two keys."""
    captures = server.results.parent / "captures"
    for key, length in ((API_KEY, 5), (OTHER_KEY, 9)):
        with server.http(key) as http:
            ask(http, [5] * length, read(tag="shared", name="same"))
    found = {}
    for key, length in ((API_KEY, 5), (OTHER_KEY, 9)):
        folder = captures / f"key-{owner_of(f'Bearer {key}')}" / "shared"
        (found[key],) = vllm_scope.open(folder)
        assert len(found[key]["resid_post", 1]) == length
        assert (folder.stat().st_mode & 0o777) == 0o700
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    rows = [found[key]["resid_post", 1][0].numpy() for key in (API_KEY, OTHER_KEY)]
    np.testing.assert_allclose(*rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_sink_that_fails_is_told_without_its_words(stream, server):
    """Its folder is in the way: a file of that name."""
    captures = server.results.parent / "captures"
    folder = captures / f"key-{owner_of(f'Bearer {API_KEY}')}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "blocked").touch()
    body = BODY | {"prompt": [5] * 4, "stream": stream, "vllm_xargs": scope(read(tag="blocked"))}
    written = server.log.stat().st_size
    with server.http() as http:
        text = http.post("/v1/completions", json=body).text
    assert "sink 'filesystem' failed; the server's log says why" in text
    assert '"status":"error"' in text.replace(" ", "")
    assert not any(secret in text for secret in SECRETS)
    assert b"blocked" in server.log.read_bytes()[written:]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        pytest.param(
            {"vllm_xargs": scope(Read("embed", to="elsewhere"))},
            "reads[0].to is 'elsewhere'; this engine has memory, filesystem. Its operator sets up "
            "others in additional_config['scope'].sinks.", id="a-sink-that-is-not-there",
        ),
        pytest.param(
            {"extra_args": scope(Read("embed"))}, "the body has 'extra_args'", id="extra_args"
        ),
        pytest.param(
            {"vllm_xargs": {"scope": '{"reads": [{"site": "embed", "to": "filesystem", '
                                     '"tag": "\\ud800"}]}'}},
            "is not JSON", id="half-a-surrogate-as-tag",
        ),
        pytest.param(
            {"vllm_xargs": {"scope": '{"probes": [{"site": "resid_post", "layers": [1], '
                                     '"weight": [1.0], "name": "\\ud800"}]}'}},
            "is not JSON", id="half-a-surrogate-as-name",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_with_a_sentence(body, sentence, stream, server):
    with server.http() as http:
        answer = http.post("/v1/completions", json=BODY | {"prompt": "x", "stream": stream} | body)
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["error"]["message"]
    assert "codec can't" not in answer.text


def test_the_limits_that_are_documented_are_those_that_are_told(client):
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    limits = client.info()["limits"]
    assert limits
    for name in limits:
        assert re.search(rf"^\| .*`{name}`.* \|", page, re.MULTILINE), name
