"""The operator's options of policies, and what a request may name."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.policies import Follow, install
from vllm_scope import Add, ConfigError, Policy, Probe, Spec, SpecError, scope
from vllm_scope.config import ScopeConfig
from vllm_scope.control.policy_options import (
    PolicyConfig,
    PolicyOptions,
    check_engine,
    checked,
)

PROBE = Probe([1.0] * 4, layer=0, name="p")


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)


def configs(policies):
    return ScopeConfig.parse({"policies": policies}).policy_configs()


def test_a_policy_has_options_of_its_own_and_those_of_all():
    found = configs({"follow": {"most": 3.0, "most_changes": 5}})["follow"]
    assert found.own == {"most": 3.0}
    assert (found.options.most_changes, found.options.timeout_s) == (5, 1.0)
    loaded = found.load()
    assert isinstance(loaded.plugin, Follow)
    assert loaded.plugin.most == 3.0
    assert list(configs(["script", "follow"])) == ["script", "follow"]
    assert configs({}) == configs(()) == {}


@pytest.mark.parametrize(
    ("policies", "sentence"),
    [
        pytest.param({"none": {}}, "'none', which is not installed.* follow, script", id="unknown"),
        pytest.param("follow", "policies is 'follow'; it must be an object", id="a-string"),
        pytest.param({"follow": 3}, "policies.follow is 3", id="no-options"),
        pytest.param({"follow": {"most_changes": -1}}, "most_changes is -1", id="changes"),
        pytest.param({"follow": {"timeout_s": "soon"}}, "timeout_s is 'soon'", id="timeout"),
        pytest.param({"": {}}, "is no name of a policy", id="no-name"),
    ],
)
def test_wrong_options_end_the_start(policies, sentence):
    with pytest.raises(ConfigError, match=sentence):
        configs(policies)


def test_a_plugin_that_does_not_take_its_options_ends_the_start():
    with pytest.raises(ConfigError, match="options of policy 'follow', least, are not taken"):
        configs({"follow": {"least": 1}})["follow"].load()


def test_the_error_of_a_plugin_shows_no_value_of_its_options(monkeypatch):
    def broken(url):
        raise OSError(f"no answer of {url}")

    plugin = SimpleNamespace(load=lambda: broken)
    monkeypatch.setattr("vllm_scope.control.policy_options._plugin", lambda name: plugin)
    sentence = r"options of policy 'follow', url, are not taken \(OSError: no answer of \*\*\*\)"
    with pytest.raises(ConfigError, match=sentence):
        PolicyConfig("follow", PolicyOptions(), {"url": "https://u:T0KEN@h/x"}).load()


def test_stages_and_drafts_cannot_have_policies():
    found = configs(["follow"])
    check_engine(found, 1, False)
    check_engine({}, 2, True)
    for stages, drafts, word in ((2, False, "2 pipeline stages"), (1, True, "speculative")):
        with pytest.raises(ConfigError, match=word):
            check_engine(found, stages, drafts)


def test_a_request_names_a_policy_that_checks_its_options():
    loaded = {name: one.load() for name, one in configs(["follow", "script"]).items()}
    assert checked(Policy("follow", {"gain": 2}), loaded).most_changes == 32
    for policy, sentence in (
        (Policy("other"), "policy.name is 'other'; this engine has follow, script"),
        (Policy("follow", {"x": 1}), "policy.options is .*'x': 1.* the options are gain and score"),
        (Policy("script", {"raise": "x"}), r"failed on policy.options \(KeyError\)"),
    ):
        with pytest.raises(SpecError, match=sentence):
            checked(policy, loaded)


def test_a_policy_travels_as_json():
    text = scope(PROBE, Policy("follow", {"gain": 2, "score": "p"}))["scope"]
    assert json.loads(text)["policy"] == {"name": "follow", "options": {"gain": 2, "score": "p"}}
    spec = Spec.from_json(text)
    assert spec.policy == Policy("follow", {"score": "p", "gain": 2})
    again = Spec.unpack(spec.packed, spec.arrays)
    assert again.policy == spec.policy
    other = Spec.from_json(scope(PROBE, Policy("follow", {"gain": 3}))["scope"])
    assert other.packed.digest != spec.packed.digest


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        pytest.param(3, "policy is 3; it has a name", id="a-number"),
        pytest.param({"options": {}}, "it has a name", id="no-name"),
        pytest.param({"name": "p", "code": "x"}, "it has a name", id="a-field"),
        pytest.param({"name": ""}, "policy.name is ''", id="empty"),
        pytest.param({"name": "p", "options": [1]}, "policy.options is .1.", id="a-list"),
        pytest.param(
            {"name": "p", "options": {"x": "y" * 5000}}, "policy.options has 5,", id="long"
        ),
    ],
)
def test_a_wrong_policy_is_refused_with_its_path(policy, sentence):
    body = {**json.loads(scope(PROBE)["scope"]), "policy": policy}
    with pytest.raises(SpecError, match=sentence):
        Spec.from_json(json.dumps(body))


def test_a_request_has_one_policy_at_most():
    with pytest.raises(SpecError, match="2 policies; a request has at most one"):
        scope(PROBE, Policy("a"), Policy("b"))


def test_what_json_cannot_hold_is_no_option():
    for options in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises(SpecError, match="JSON cannot hold"):
            Policy("p", options)


def test_a_name_of_an_add_is_no_part_of_what_it_does():
    from vllm_scope.request.sites import Sites

    sites = Sites(2, 4, "float32", (0, 2, 4))
    one, other = (
        Spec(edits=(Add([1.0] * 4, layer=0, name=name),)).resolve(sites).edits[0].digest
        for name in ("a", None)
    )
    assert one == other
