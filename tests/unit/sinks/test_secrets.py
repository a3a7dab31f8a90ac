"""What an operator gives to sinks and monitors, tokens among it, stands in no log."""

from __future__ import annotations

import json
import logging
import pickle
from types import SimpleNamespace

import pytest

from tests.conftest import TOYWORLD
from tests.unit.recording import Live, install, side
from vllm_scope import ConfigError
from vllm_scope.config import KEY, ScopeConfig
from vllm_scope.sinks import options
from vllm_scope.sinks.options import without_secrets

SINKS = {
    "mine": {"url": "https://hooks.example/T0KEN", "retries": 3, "threads": 2},
    "filesystem": {"root": "/data/captures", "layout": "npz", "queue_mib": 8},
}
SCOPE = {
    "layers": [1],
    "policies": {"mine": {"token": "T0KEN"}},
    "monitors": {
        "told": {"layers": [1], "threshold": 2, "action": "escalate", "url": "hooks.example/T0KEN"},
        "misspelt": {"threshold": 2, "urls": "https://hooks.example/T0KEN"},
    },
    "sinks": SINKS,
    "global_sinks": {
        "mine": {"token": "T0KEN", "reads": [{"site": "embed"}]},
        "filesystem": {"root": "s3://key:T0KEN@bucket/x", "storage": {"secret": "T0KEN"}},
    },
}


def test_values_of_own_options_of_sinks_and_policies_and_urls_of_monitors_are_left_out():
    found = without_secrets(SCOPE)
    assert found == {
        "layers": [1],
        "policies": {"mine": "***"},
        "monitors": {
            "told": {"layers": [1], "threshold": 2, "action": "escalate", "url": "***"},
            "misspelt": {"threshold": 2, "urls": "***"},
        },
        "sinks": {
            "mine": {"url": "***", "retries": "***", "threads": 2},
            "filesystem": {"root": "/data/captures", "layout": "npz", "queue_mib": 8},
        },
        "global_sinks": {
            "mine": {"token": "***", "reads": [{"site": "embed"}]},
            "filesystem": {"root": "***", "storage": "***"},
        },
    }
    assert "T0KEN" in json.dumps(SCOPE), "what the engine gets is as it was"


@pytest.mark.parametrize(
    "body",
    [
        None, 3, [], {"sinks": 3}, {"sinks": {"x": "T0KEN"}}, {"monitors": ["T0KEN"]},
        {"monitors": {"x": "T0KEN"}},
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_logged_without_its_values(body):
    assert "T0KEN" not in repr(without_secrets(body))


def test_vllms_log_of_its_arguments_has_no_token(caplog, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    from vllm_scope.engine import plugin, wrapping

    (startup, *_) = wrapping.owners("redact_sensitive_args")
    monkeypatch.setattr(startup, "redact_sensitive_args", startup.redact_sensitive_args)
    monkeypatch.setattr(startup.logger, "level", logging.INFO)
    plugin.wrap_log()
    args = EngineArgs(str(TOYWORLD), additional_config={KEY: SCOPE, "other": 5})
    with caplog.at_level(logging.INFO, startup.logger.name):
        startup.log_non_default_args(args)
    # vLLM 0.30 logs it twice.
    (text,) = {r.getMessage() for r in caplog.records if "non-default args" in r.getMessage()}
    assert "T0KEN" not in text
    for shown in ("'url': '***'", "/data/captures", "'other': 5", str(TOYWORLD)):
        assert shown in text
    assert args.additional_config[KEY] is SCOPE
    assert pickle.loads(pickle.dumps(args.additional_config)) == {KEY: SCOPE, "other": 5}


def test_the_error_of_a_plugin_names_its_options_without_values(monkeypatch):
    match = r"of sink 'mine', colour, url, are not taken \(TypeError: .* unexpected keyword"
    with (
        pytest.raises(ConfigError, match=match) as caught,
        side(monkeypatch, {"mine": {"url": "T0KEN", "colour": "T0KEN"}}, mine=Live),
    ):
        pass
    assert "T0KEN" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        pytest.param(OSError("no https://u:T0KEN@h/x"), "OSError: no ***", id="url"),
        pytest.param(AttributeError("host u%3AT0KEN."), "%3A***.", id="a-part-of-a-url"),
        pytest.param(KeyError("S3CRET"), "KeyError: '***'", id="in-a-list"),
        pytest.param(RuntimeError("4711 is no pin"), "RuntimeError: *** is no pin", id="number"),
        pytest.param(ValueError("-" * 485 + "T0KEN"), "-***).", id="at-the-cut"),
        pytest.param(ValueError(), "ValueError: ", id="no-text"),
    ],
)
def test_each_error_of_a_plugins_constructor_is_a_configuration_error(error, says, monkeypatch):
    class Broken(Live):
        def __init__(self, **_options):
            raise error

    own = {"url": "https://u:T0KEN@h/x", "pin": 4711, "more": {"keys": ["S3CRET"]}, "on": True}
    with pytest.raises(ConfigError) as caught, side(monkeypatch, {"mine": own}, mine=Broken):
        pass
    text = str(caught.value)
    assert "the options of sink 'mine', more, on, pin, url, are not taken" in text
    assert f"{type(error).__name__}: " in text
    assert says in text
    for secret in ("T0KE", "S3CRET", "4711"):
        assert secret not in text


def test_each_error_of_a_plugins_import_is_a_configuration_error(monkeypatch):
    install(monkeypatch, {"mine": Live})

    def fail():
        raise AttributeError("module 'm' has no attribute 'Sink'")

    monkeypatch.setattr(options, "_plugin", lambda *_: SimpleNamespace(load=fail))
    match = "the sink 'mine' cannot be imported .AttributeError: module 'm' has no .*; repair its"
    with pytest.raises(ConfigError, match=match), side(monkeypatch, {"mine": {}}, mine=Live):
        pass


def test_the_error_of_a_configuration_has_no_option_values(monkeypatch):
    install(monkeypatch, {"mine": Live})
    with pytest.raises(ConfigError) as caught:
        ScopeConfig.parse({"sinks": {"mine": {"url": "T0KEN", "threads": 0}}})
    assert "T0KEN" not in str(caught.value)
