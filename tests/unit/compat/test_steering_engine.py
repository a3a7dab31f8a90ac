"""The steering fork's SamplingParams and LLM, without an engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import vllm

from vllm_scope import ConfigError
from vllm_scope.compat import KEYS
from vllm_scope.compat.steering_http import engine
from vllm_scope.compat.steering_http.engine import LLM, SamplingParams, sink_of

TIER = {"post_block": {1: [1.0, 2.0]}}


def test_the_forks_fields_become_keys_of_extra_args():
    params = SamplingParams(
        max_tokens=3, steering_vectors=TIER, steering_module_ref=("formal", 1.5),
        extra_args={"mine": 1},
    )  # fmt: skip
    keys = {"steering_vectors": TIER, "steering_module_ref": ("formal", 1.5)}
    assert params.extra_args == {"mine": 1, **keys}
    assert params.clone().extra_args == params.extra_args
    assert params.steering_vectors is None
    assert SamplingParams(max_tokens=3).extra_args is None


def test_every_field_is_a_key_of_the_face():
    assert set(SamplingParams.__annotations__) <= set(KEYS["steering_http"])


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_a_method_of_llm_has_vllms_signature(method):
    assert inspect.signature(getattr(LLM, method)) == inspect.signature(getattr(vllm.LLM, method))


def test_every_output_has_capture_results():
    found = {"filesystem": object()}
    outputs = [SimpleNamespace(), SimpleNamespace(capture_results=found)]
    call = engine._with_results(lambda *args, **options: outputs)
    assert [output.capture_results for output in call("prompt", use_tqdm=False)] == [{}, found]


def test_consumers_and_sites_become_options_of_the_engine(monkeypatch):
    given = {}
    monkeypatch.setattr(vllm.LLM, "__init__", lambda self, model, **options: given.update(options))
    LLM(
        "m", enable_steering=True, seed=3,
        capture_consumers=[{"name": "filesystem", "params": {"root": "/a"}}, {"name": "mine"}],
        additional_config={"scope": {"sinks": {"other": {}}}, "else": {}},
    )  # fmt: skip
    scope = given["additional_config"].pop("scope")
    assert given == {"seed": 3, "additional_config": {"else": {}}}
    assert set(scope["sites"]) >= {"resid_pre", "resid_mid", "resid_post"}
    files = {"root": "/a", "layout": "per_request"}
    assert scope["sinks"] == {"other": {}, "filesystem": files, "mine": {}}


FILES = {"name": "filesystem", "params": {"root": "/a"}}
GLOBAL = {"name": "filesystem", "params": {"root": "/b", "global_hooks": {"post_block": [1]}}}


@pytest.mark.parametrize(
    ("consumers", "config", "words"),
    [
        pytest.param([FILES, FILES], {}, "'filesystem', and there .* name in sinks", id="twice"),
        pytest.param([GLOBAL, GLOBAL], {}, "in global_sinks", id="twice-for-all-requests"),
        pytest.param(
            [{"name": "mine"}], {"sinks": {"mine": {}}}, "'mine'.* once, in", id="in-the-config"
        ),
    ],
)
def test_no_consumer_replaces_a_sink_of_its_name(consumers, config, words, monkeypatch):
    monkeypatch.setattr(vllm.LLM, "__init__", lambda *args, **options: None)
    with pytest.raises(ConfigError, match=words):
        LLM("m", capture_consumers=consumers, additional_config={"scope": config})


def test_a_consumer_for_a_request_and_one_for_all_requests_may_have_one_name(monkeypatch):
    given = {}
    monkeypatch.setattr(vllm.LLM, "__init__", lambda self, model, **options: given.update(options))
    LLM("m", capture_consumers=[FILES, GLOBAL])
    scope = given["additional_config"]["scope"]
    assert scope["sinks"]["filesystem"]["root"] == "/a"
    assert scope["global_sinks"]["filesystem"]["root"] == "/b"


@pytest.mark.parametrize(
    ("consumer", "words"),
    [
        pytest.param({"name": ["x"]}, r"has the name \['x'\]", id="name"),
        pytest.param({"name": "filesystem", "params": [1]}, r"the params \[1\]", id="params"),
        pytest.param(
            {"name": "filesystem", "params": {"default_layout": []}},
            r"default_layout is \[\]; it must be per_file", id="layout",
        ),
        pytest.param(
            {"name": "filesystem", "params": {1: 2, "a": 3}}, "has 1; its params are", id="keys"
        ),
    ],
)  # fmt: skip
def test_a_consumer_of_another_form_is_refused(consumer, words):
    with pytest.raises(ConfigError, match=words):
        sink_of(consumer)
