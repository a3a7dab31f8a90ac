"""LLM and SamplingParams with the fork's arguments, on stock vLLM.

    from vllm_scope.compat.steering_http import LLM, SamplingParams
    llm = LLM(model, enable_steering=True, capture_consumers=[
        {"name": "filesystem", "params": {"root": "/data/captures"}},
    ])
    llm.generate(prompts, SamplingParams(steering_vectors={"post_block": {15: vector}}))

Owns:  LLM, SamplingParams, and `sink_of`, which translates the fork's consumers to sinks.
Runs:  in the front-end. This file imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import ParamSpec

import vllm
from vllm import RequestOutput

from vllm_scope.compat.steering_http.capture import layers_of, positions_of
from vllm_scope.errors import ConfigError, shown
from vllm_scope.request.sites import STREAM_SITES
from vllm_scope.sinks.options import FILESYSTEM
from vllm_scope.vectors.hooks import mapping, site_of

#: Maps options of the consumer `filesystem` to options of vllm-scope's sink `filesystem`.
_FILES = {"root": "root", "writer_threads": "threads", "fsync": "fsync"}
_LAYOUTS = {"per_file": "per_request", "packed": "packed", "sharded": "sharded"}
#: Maps options of the consumer `filesystem` to the only value that is allowed for each.
_ALWAYS = {"on_collision": "overwrite", "atomic_publish": True}
#: Options without effect. They set up queues, caches and shards that vllm-scope does not have.
_IDLE = {
    "queue_size", "timeout_seconds", "fd_cache_size", "coalesce_max_bytes", "num_shards",
    "shard_max_bytes",
}  # fmt: skip
_GLOBAL = {"global_hooks", "global_positions", "default_tag"}


#: An object that maps each hook to layers, and each layer to a vector or a list of clamps. The JSON
#: text of such an object is also possible.
Tier = Mapping[str, Mapping[int | str, object]] | str
P = ParamSpec("P")


class SamplingParams(vllm.SamplingParams):
    """vLLM's SamplingParams with the fork's fields, which the constructor moves to `extra_args`."""

    steering_vectors: Tier | None = None
    prefill_steering_vectors: Tier | None = None
    decode_steering_vectors: Tier | None = None
    steering_clamps: Tier | None = None
    prefill_steering_clamps: Tier | None = None
    decode_steering_clamps: Tier | None = None
    steering_module_ref: tuple[str, float] | str | None = None
    steering: Sequence[Mapping[str, object]] | str | None = None
    capture: Mapping[str, object] | str | None = None
    sae_clamp_specs: object = None
    sae_full_reconstruction_specs: object = None
    patch: object = None
    patch_vectors: object = None

    def __post_init__(self) -> None:
        super().__post_init__()
        own = {name: getattr(self, name) for name in SamplingParams.__annotations__}
        own = {name: value for name, value in own.items() if value is not None}
        if own:
            self.extra_args = {**(getattr(self, "extra_args", None) or {}), **own}
        for name in own:
            setattr(self, name, None)


def _with_results(method: Callable[P, list[RequestOutput]]) -> Callable[P, list[RequestOutput]]:
    """Wrap a method of vllm.LLM, so that all its outputs have `capture_results`."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> list[RequestOutput]:
        outputs = method(*args, **kwargs)
        for output in outputs:
            if not hasattr(output, "capture_results"):
                output.capture_results = {}
        return outputs

    return call


class LLM(vllm.LLM):
    """vllm.LLM with the fork's arguments. Requests can steer and capture at every hook, except if
    `additional_config` names other sites.

    Args:
        model, vllm_kwargs: the arguments of vllm.LLM.
        enable_steering, max_steering_configs: arguments without effect. Every request can steer.
            A request waits until there is room for its vectors. The option
            additional_config["scope"].vectors_mib sets the size of this room.
        capture_consumers: the sinks, each as {"name", "params"}. The params of `filesystem` have
            the fork's names. The params of any other sink are this sink's own options, as in
            additional_config["scope"].sinks.

    Raises:
        ConfigError: two sinks have one name.
        ConfigError, SpecError: as in `sink_of`, for one of the consumers.
    """

    generate = _with_results(vllm.LLM.generate)
    chat = _with_results(vllm.LLM.chat)

    def __init__(
        self,
        model: str,
        *,
        enable_steering: bool = False,
        max_steering_configs: int | None = None,
        capture_consumers: Sequence[Mapping[str, object]] | None = None,
        additional_config: Mapping[str, Mapping[str, object]] | None = None,
        **vllm_kwargs: object,
    ) -> None:
        options = dict(additional_config or {})
        scope = {"sites": STREAM_SITES, **options.get("scope", {})}
        for one in capture_consumers or ():
            kind, name, sink = sink_of(one)
            known = mapping(scope.get(kind), f"scope.{kind}")
            if name in known:
                raise ConfigError(
                    f"capture_consumers has {shown(name)}, and there already is a sink of this "
                    f"name in {kind}; name each sink once, in capture_consumers or in "
                    f"additional_config['scope'].{kind}."
                )
            scope[kind] = {**known, name: sink}
        super().__init__(model, additional_config={**options, "scope": scope}, **vllm_kwargs)


def sink_of(consumer: object) -> tuple[str, str, dict[str, object]]:
    """Translate a consumer to a sink.

    Returns:
        The config key ("sinks" or "global_sinks"), the sink's name, and the sink's options.

    Raises:
        ConfigError: `consumer` is not {"name", "params"}, or an option is not supported.
        SpecError: a hook in `global_hooks`, its layers, or `global_positions` is wrong.
    """
    where = "capture_consumers"
    known = {"name", "params", "instance_name"}
    if not isinstance(consumer, Mapping) or "name" not in consumer or not set(consumer) <= known:
        raise ConfigError(f"{where} has {shown(consumer)}; each must be {{name, params}}.")
    name, params = consumer["name"], consumer.get("params") or {}
    if not isinstance(name, str) or not isinstance(params, Mapping):
        raise ConfigError(
            f"{where} has the name {shown(name)} and the params {shown(params)}; a name is a text, "
            "and params is an object of options."
        )
    params = dict(params)
    if consumer.get("instance_name") not in (None, name):
        raise ConfigError(
            f"{where} has the instance_name {shown(consumer['instance_name'])}; a sink has one "
            "instance, called by its own name. Leave it out."
        )
    if name != FILESYSTEM:
        return "sinks", name, params
    kind, sink = _files(params, f"{where}.{name}")
    return kind, name, sink


def _files(params: Mapping[str, object], where: str) -> tuple[str, dict[str, object]]:
    """The config key and the options of a sink of files, from the params of `filesystem`."""
    allowed = [*_FILES, "default_layout", *_ALWAYS, *sorted(_IDLE), *sorted(_GLOBAL)]
    if unknown := sorted(set(params) - set(allowed), key=str):
        raise ConfigError(f"{where} has {shown(unknown[0])}; its params are {', '.join(allowed)}.")
    for option, value in _ALWAYS.items():
        if params.get(option, value) != value:
            raise ConfigError(
                f"{where}.{option} is {shown(params[option])}; a file is always published "
                f"whole, and replaces a file of its name, so the value must be {value!r}."
            )
    sink: dict[str, object] = {_FILES[key]: params[key] for key in _FILES if key in params}
    layout = params.get("default_layout", "per_file")
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ConfigError(
            f"{where}.default_layout is {shown(layout)}; it must be {', '.join(_LAYOUTS)}."
        )
    sink["layout"] = _LAYOUTS[layout]
    if params.get("global_hooks") is None:
        return "sinks", sink
    tokens = positions_of(params.get("global_positions", "last_prompt"), where)
    hooks = mapping(params["global_hooks"], f"{where}.global_hooks")
    if params.get("default_tag", "default") != "default":
        raise ConfigError(
            f"{where}.default_tag is {shown(params['default_tag'])}; files of global hooks have "
            "no tag. Give these files a root of their own."
        )
    sink["reads"] = [
        {"site": site_of(hook, where), "layers": layers_of(layers, where), "tokens": tokens}
        for hook, layers in hooks.items()
    ]
    return "global_sinks", sink
