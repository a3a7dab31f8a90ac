"""The operator's policies: `additional_config={"scope": {"policies": {...}}}`.

    "policies": {"hold": {"most": 2.0}, "watch": {"timeout_s": 0.1}}

Owns:  PolicyConfig (one policy), Loaded (a policy with its plugin), and the look-up of plugins.
Runs:  every process parses the options. Front-ends load plugins to check options of requests. The
       worker of rank 0 loads plugins to call running policies.

Promise: a process loads only code that the operator has installed and named.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from vllm_scope.control.policy import PolicyPlugin
from vllm_scope.errors import ConfigError, SpecError, shown
from vllm_scope.request.actions import MAX_NAME, Policy
from vllm_scope.request.options import Number
from vllm_scope.sinks.options import installed, not_taken, take_options
from vllm_scope.sinks.reports import plain

logger = logging.getLogger("vllm.vllm_scope")

GROUP = "vllm_scope.policies"


class PolicyOptions(BaseModel):
    """The options that every policy has. A policy can also have its own options.

    Attributes:
        most_changes: the largest number of changes of scales in one request. A request waits until
            the device tables have room for all these changes.
        timeout_s: the longest time, in seconds, that all calls of a running policy can take in one
            step. If the calls take longer, the running policy is not called again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    most_changes: StrictInt = Field(default=32, ge=0, le=512)
    timeout_s: Number = Field(default=1.0, gt=0)


@dataclass(frozen=True)
class PolicyConfig:
    """One policy of an engine.

    Attributes:
        own: the policy's own options.
    """

    name: str
    options: PolicyOptions
    own: Mapping[str, Any]

    def load(self) -> Loaded:
        """Import the plugin's class or function, and call it with the policy's own options.

        Raises:
            ConfigError: the plugin cannot be imported, refuses its options, or lacks a method.
        """
        try:
            made = _plugin(self.name).load()
        except Exception as error:
            raise ConfigError(
                f"the policy {self.name!r} cannot be imported ({type(error).__name__}: {error}); "
                "repair its package, or leave it out."
            ) from error
        try:
            plugin = made(**self.own)
        except Exception as error:
            raise not_taken(f"policy {self.name!r}", self.own, error) from None
        for method in ("check", "start"):
            if not callable(getattr(plugin, method, None)):
                raise ConfigError(
                    f"the policy {self.name!r} has no method {method!r}; a plugin has 'check' and "
                    "'start' (vllm_scope.control.PolicyPlugin)."
                )
        return Loaded(self.name, self.options, plugin)


@dataclass(frozen=True)
class Loaded:
    """A policy of an engine, with its plugin."""

    name: str
    options: PolicyOptions
    plugin: PolicyPlugin


def parse_policies(body: object) -> dict[str, PolicyConfig]:
    """Parse the option `policies`, and return the PolicyConfigs by name. The option is a JSON
    object with the options of each policy by the policy's name, or an array of names.

    Raises:
        ConfigError: a policy or an option is wrong. The error's text names the policy or option,
            the given value and the allowed values.
    """
    if isinstance(body, list | tuple) and all(isinstance(name, str) for name in body):
        body = {name: {} for name in body}
    if not isinstance(body, Mapping):
        raise ConfigError(
            f"policies is {shown(body)}; it must be an object with a field for each policy, or a "
            "list of names."
        )
    return {name: _parse_one(name, one) for name, one in body.items()}


def check_engine(policies: Mapping[str, PolicyConfig], num_stages: int, drafts: bool) -> None:
    """Raises ConfigError if an engine with policies has several pipeline stages or decodes
    speculatively."""
    if policies and (num_stages > 1 or drafts):
        what = f"{num_stages} pipeline stages" if num_stages > 1 else "speculative decoding"
        raise ConfigError(
            f"additional_config['scope'].policies has {', '.join(policies)}, and this engine has "
            f"{what}, with which policies cannot work; start it without one of the two."
        )


def _parse_one(name: object, body: object) -> PolicyConfig:
    if not isinstance(name, str) or not name or plain(name, MAX_NAME) != name:
        raise ConfigError(
            f"{shown(name)} is no name of a policy, which is a string of 1 to {MAX_NAME} "
            "characters."
        )
    if not isinstance(body, Mapping):
        raise ConfigError(f"policies.{name} is {shown(body)}; it must be an object of options.")
    own = dict(body)
    options = take_options(PolicyOptions, own, f"policies.{name}")
    _plugin(name)
    return PolicyConfig(name, options, own)


def _plugin(name: str) -> EntryPoint:
    found = installed(GROUP)
    if name not in found:
        raise ConfigError(
            f"policies has {shown(name)}, which is not installed; installed are "
            f"{', '.join(sorted(found)) or 'none'}. A policy is a package with an entry point in "
            f"the group {GROUP!r}."
        )
    return found[name]


def checked(policy: Policy, loaded: Mapping[str, Loaded]) -> PolicyOptions:
    """Check a request's options for its policy. Returns the options that the operator has set for
    this policy.

    Raises:
        SpecError: the engine does not have the policy, or the policy refuses the options.
    """
    found = loaded.get(policy.name)
    if found is None:
        raise SpecError(
            f"policy.name is {shown(policy.name)}; this engine has "
            f"{', '.join(sorted(loaded)) or 'no policies'}. The operator adds policies in "
            "additional_config['scope'].policies."
        )
    try:
        found.plugin.check(policy.options)
    except ValueError as error:
        raise SpecError(
            f"policy.options is {shown(dict(policy.options))}, which the policy "
            f"{shown(policy.name)} does not take: {plain(str(error))}"
        ) from None
    except Exception as error:
        logger.exception("vllm-scope: the policy %r failed on a request's options", policy.name)
        raise SpecError(
            f"the policy {shown(policy.name)} failed on policy.options ({type(error).__name__}); "
            "the log says why."
        ) from None
    return found.options
