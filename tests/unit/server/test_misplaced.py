"""A scope in a place of the body that nobody reads is refused with a sentence."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from vllm import LLM

from vllm_scope import SpecError
from vllm_scope.engine import monitors
from vllm_scope.engine.frontend import requests, translators
from vllm_scope.engine.http import serving as http
from vllm_scope.server.answer import Answer, current
from vllm_scope.server.options import ScopeOptions

SCOPE = '{"reads": [{"site": "embed"}]}'
ANSWER = object()
#: An engine's configuration without monitors.
SERVED = SimpleNamespace(additional_config={"scope": {}}, parallel_config=None)


def create(body, xargs=None, path="/v1/completions"):
    """The result of a request with fields that vLLM does not know."""
    request = SimpleNamespace(model_extra=body, vllm_xargs=xargs)

    async def original(self, request, raw_request):
        return ANSWER

    async def run():
        current.set(path)
        state = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=SERVED), scope=None)
        raw = SimpleNamespace(app=SimpleNamespace(state=state), url=SimpleNamespace(path=path))
        return await http._create(original, None, request, raw)

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _a_word(monkeypatch):
    monkeypatch.setattr(translators, "has_keys", lambda extra: "steer" in extra)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        pytest.param({"scope": SCOPE}, "scope", id="scope"),
        pytest.param({"extra_args": {"scope": SCOPE}}, "extra_args", id="extra_args"),
        pytest.param({"extra_args": {"steer": 1}}, "extra_args", id="a-faces-word"),
    ],
)
def test_a_scope_beside_vllm_xargs_is_refused(body, word):
    with pytest.raises(SpecError, match=f"the body has '{word}'.*vllm_xargs"):
        create(body)


@pytest.mark.parametrize(
    "body", [None, {}, {"extra_args": {"top_a": 1}}, {"extra_args": "x"}, {"other": {"scope": 1}}]
)
def test_unknown_fields_of_a_body_pass(body):
    assert create(body) is ANSWER


def search(place):
    """The result of a beam search of vLLM's server."""
    serving = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=SERVED))
    token = current.set(place)
    try:
        return http._beam_search(lambda self, prompt: prompt, serving, prompt=ANSWER)
    finally:
        current.reset(token)


def test_beam_search_is_refused_while_monitors_are_set(monkeypatch):
    """vLLM makes a request for each token. A monitor could not stop such requests."""
    assert search("/invocations") is search("/v1/completions") is ANSWER
    names = [SimpleNamespace(name=name) for name in ("mood", "risk")]
    for module in (http, monitors, requests):
        monkeypatch.setattr(module, "monitors_of", lambda config: names)
    said = "^beam search cannot be tapped, .* every request for its monitors 'mood', 'risk'; sample"
    for path in ("/v1/completions", "/invocations"):
        with pytest.raises(SpecError, match=said):
            search(path)
    requests.wrap_llm()
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SERVED))
    with pytest.raises(SpecError, match=said):
        LLM.beam_search(llm, ["a"], None)


def test_beam_search_with_a_scope_is_refused():
    with pytest.raises(SpecError, match=r"^beam search cannot be tapped; sample instead\.$"):
        search(Answer(ScopeOptions(), None, 0, "", 1, False))


@pytest.mark.parametrize("xargs", [{"scope": SCOPE}, {"top_a": 1}, None])
def test_a_scope_of_speech_is_refused(xargs):
    """Also with a beam search, whose requests would not have the scope."""
    request = SimpleNamespace(model_extra={}, vllm_xargs=xargs, use_beam_search=True)
    raw = SimpleNamespace(url=SimpleNamespace(path="/v1/audio/translations"))

    def create():
        return http._create_speech(lambda self, *given: given, None, b"", request, raw, 1)

    if xargs is None or "scope" not in xargs:
        assert create() == (b"", request, raw, 1)
        return
    with pytest.raises(SpecError, match="/v1/audio/translations have no field for a scope"):
        create()
