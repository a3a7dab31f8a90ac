"""The engine's options: `additional_config={"scope": {...}}`.

Owns:  ScopeConfig, its defaults and its checks.
Runs:  in every process of an engine. The front-end also fills in defaults and `graph_key`.

Promise: every option that changes the compiled graph is in `additional_config["scope"]`. This dict
also has `graph_key`, a digest of the code of the tap. The key of vLLM's compile cache contains a
hash of `additional_config`. Therefore an engine never loads a graph with other taps, or without
taps, from the cache.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from vllm_scope.control.policy_options import PolicyConfig, parse_policies
from vllm_scope.errors import ConfigError, SpecError
from vllm_scope.request.options import Number, checked
from vllm_scope.request.sites import (
    ATTENTION_SITES,
    INNER_SITES,
    MODEL_SITES,
    Place,
    canonical_site,
)
from vllm_scope.sinks.options import SinkConfig, parse_sinks

#: The key of this package's options in vLLM's `additional_config`.
KEY = "scope"


class ScopeConfig(BaseModel):
    """The engine's options.

    Attributes:
        sites: the sites that can be read and edited. Each site gets a tap (an op in the compiled
            graph) in each of `layers`, even if no request uses the site. (`embed` and `ln_final`
            are not in layers, and get one tap each.) `ln_final` can be read, but not edited.
        layers: the layers that have taps, or "all".
        arena_mib: device memory for rows that wait for their copy to the host. If `arena_mib` is
            None, vllm-scope sets the size. On a GPU, this memory then has room for at least three
            times the rows of the largest step that runs as a CUDA graph.
        vectors_mib: device memory for the vectors of edits and probes of running requests. If this
            memory is full, a new request waits.
        states_mib: device memory for the states of gates (Gate.state). A gate with a state needs 12
            bytes for each token that its request can generate. If this memory is full, a new
            request waits.
        monitors: probes that the operator runs on every request. The option maps a name to the
            fields of a probe with a threshold (docs/monitors.md).
        controller: for a server, the name of a Python entry point in the group
            `vllm_scope.controller`. The entry point makes a Controller, which changes server-wide
            edits (docs/control.md).
        scores_mib: host memory of each worker for scores of tokens whose KV is in the prefix cache.
            If a request has only probes, it can use the prefix cache for tokens whose scores are
            stored. If `scores_mib` is 0, no scores are stored, and such a request computes all its
            tokens.
        modules: maps the name of a steering module to its file, which the engine loads at start.
        saes: maps the name of a sparse autoencoder to its file or folder (vllm_scope.saes).
            Requests can name these sparse autoencoders.
        saes_mib: device memory of each worker for the encoders of `saes`. If the encoders need
            more, the engine does not start. If `saes_mib` is 0, requests cannot read the strongest
            features.
        saes_dtype: dtype of the encoders of `saes`. "auto" is the model's dtype. "fp8" is
            float8_e4m3fn with a scale for each feature. "fp8" takes half of the memory of bf16, and
            more time.
        lenses: maps the name of a lens to its file or folder, or to {"path", "sha256"}
            (vllm_scope.lenses). Such a lens maps rows before the model's own norm and unembedding
            are applied.
        lenses_mib: device memory of each worker for the maps of `lenses`. If the maps need more,
            the engine does not start.
        unembedding_mib: only for tensor parallelism, in which each rank has a part of the
            unembedding. A lens needs all parts on the first rank. The option is the device memory
            of the first rank for the other ranks' parts. If these parts need more, the engine does
            not start. With tensor parallelism and the value 0, requests cannot have a lens.
        lens_rows: the largest number of rows to which the lenses of one request are applied. A
            lens is applied to a row for each of its layers and each selected token. Tokens that the
            request can still generate also count. If `lens_rows` is 0, requests cannot have a lens.
        lens_rows_running: the same limit for all running requests together. A request that would
            exceed this limit waits. If no other request runs, the request does not wait.
        moments_mib: device memory of each worker for the sums of Moments. If a request's sums do
            not fit when the request enters, the request is refused. If the sums do not fit when the
            request begins to run, its rows count as missing. If `moments_mib` is 0, requests cannot
            have Moments.
        deliver_timeout_s: two limits in seconds. If the rows of a finished request have not arrived
            after `deliver_timeout_s`, the request is returned as incomplete. If a front-end reads
            no rows for `deliver_timeout_s`, the workers stop waiting, and its rows are lost.
        road: the transport of rows from a worker to the front-end. "shared" is shared memory. "tcp"
            is encrypted TCP. "auto" is shared memory if a test at start succeeds, otherwise TCP.
        road_host: the address, or the name of the interface, at which the front-end listens for
            rows over TCP. Workers must be able to reach this address. If `road_host` is None, the
            front-end uses the address that vLLM's own workers use (VLLM_HOST_IP, or else the
            address of the default route).
        policies: the operator's policies that requests can name. The option maps a name to options,
            or is a list of names (`control.policy_options`).
        sinks: maps the name of a sink to its options (`sinks.options`). Reads can name these sinks,
            in addition to `memory`.
        global_sinks: sinks that get rows of every request. The form is that of `sinks`. Each of
            them also has `reads`, which are added to every request.
        graph_key: a text that identifies the code of the taps. vllm-scope sets this option.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sites: tuple[str, ...] = ("embed", "resid_post")
    layers: Literal["all"] | tuple[StrictInt, ...] = "all"
    arena_mib: Number | None = Field(default=None, gt=0)
    vectors_mib: Number = Field(default=128.0, gt=0)
    states_mib: Number = Field(default=16.0, ge=0)
    scores_mib: Number = Field(default=256.0, ge=0)
    monitors: dict[str, Any] = Field(default_factory=dict)
    controller: str | None = None
    modules: dict[str, str] = Field(default_factory=dict)
    saes: dict[str, str] = Field(default_factory=dict)
    saes_mib: Number = Field(default=4096.0, ge=0)
    saes_dtype: Literal["auto", "fp8"] = "auto"
    lenses: dict[str, Any] = Field(default_factory=dict)
    lenses_mib: Number = Field(default=4096.0, ge=0)
    unembedding_mib: Number = Field(default=0.0, ge=0)
    lens_rows: StrictInt = Field(default=1 << 16, ge=0)
    lens_rows_running: StrictInt = Field(default=1 << 20, gt=0)
    moments_mib: Number = Field(default=0.0, ge=0)
    deliver_timeout_s: Number = Field(default=60.0, gt=0)
    road: Literal["auto", "shared", "tcp"] = "auto"
    road_host: str | None = None
    policies: dict[str, Any] | tuple[str, ...] = ()
    sinks: dict[str, Any] = Field(default_factory=dict)
    global_sinks: dict[str, Any] = Field(default_factory=dict)
    graph_key: str = ""

    @field_validator("sites")
    @classmethod
    def _known_sites(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        if not sites:
            raise ValueError("name at least one site")
        try:
            return tuple(sorted({canonical_site(site, "sites") for site in sites}))
        except SpecError as error:
            raise ConfigError(str(error)) from None

    @field_validator("layers", mode="wrap")
    @classmethod
    def _sane_layers(cls, came: Any, parse: ValidatorFunctionWrapHandler) -> Any:
        try:
            layers = parse(came)
        except ValidationError:  # pydantic has an error for each type of the union
            layers = ()
        if layers == "all":
            return layers
        if not layers or min(layers) < 0:
            raise ValueError("name layers from 0, or 'all'")
        return tuple(sorted(set(layers)))

    @field_validator("sinks", "global_sinks")
    @classmethod
    def _sane_sinks(cls, sinks: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        parsed = parse_sinks(sinks, str(info.field_name), info.field_name == "global_sinks")
        timeout_s = info.data.get("deliver_timeout_s", math.inf)
        for name, sink in parsed.items():
            if info.field_name == "sinks" and sink.options.flush_s >= timeout_s:
                raise ConfigError(
                    f"sinks.{name}.flush_s is {sink.options.flush_s:g}; it must be less than "
                    f"deliver_timeout_s, {timeout_s:g}: callers wait at most this time for rows."
                )
        return sinks

    @field_validator("policies", mode="before")
    @classmethod
    def _known_policies(cls, policies: Any) -> Any:
        parse_policies(policies)
        return policies

    @field_validator("road_host")
    @classmethod
    def _one_interface(cls, host: str | None) -> str | None:
        # A worker could not connect to a wildcard address.
        if host in ("", "*", "0.0.0.0", "::", "[::]"):
            raise ValueError("name one address or interface of the front-end's host")
        return host

    @staticmethod
    def parse(body: object) -> ScopeConfig:
        """Parse the dict. Raises a ConfigError that names the option, if an option is wrong."""
        if not isinstance(body, Mapping):
            raise ConfigError(f"additional_config['scope'] is {body!r}; it must be an object.")
        return checked(ScopeConfig, body, f"additional_config['{KEY}'].", unsaid=("graph_key",))

    def check_files(self) -> None:
        """Raises ConfigError if an option names a file or a folder that does not exist."""
        paths: dict[str, object] = {}
        for option in ("modules", "saes", "lenses", "monitors"):
            for name, one in getattr(self, option).items():
                where = f"{option}[{name!r}]"
                if isinstance(one, Mapping):
                    paths |= {f"{where}.{field}": one.get(field) for field in ("path", "file")}
                elif option != "monitors":  # engine.monitors refuses other forms of a monitor
                    paths[where] = one
        for where, path in paths.items():
            if isinstance(path, str) and not Path(path).exists():
                raise ConfigError(
                    f"additional_config['{KEY}'].{where} is {path!r}, which is not there; give the "
                    "path of a file or folder of this machine."
                )

    def sink_configs(self) -> dict[str, SinkConfig]:
        """The sinks that requests can name."""
        return parse_sinks(self.sinks, "sinks", False)

    def policy_configs(self) -> dict[str, PolicyConfig]:
        """The policies that requests can name."""
        return parse_policies(self.policies)

    def global_sink_configs(self) -> dict[str, SinkConfig]:
        """The sinks that every request delivers to."""
        return parse_sinks(self.global_sinks, "global_sinks", True)

    def with_graph_key(self) -> dict[str, object]:
        """The options with their `graph_key`, as plain JSON for `additional_config`."""
        return self.model_copy(update={"graph_key": graph_key()}).model_dump(mode="json")

    @property
    def attention_sites(self) -> tuple[str, ...]:
        """The `sites` that are inside the attention."""
        return tuple(site for site in ATTENTION_SITES if site in self.sites)

    def boundaries(self, num_layers: int) -> tuple[int, ...]:
        """The boundaries (numbers of places in the model, request.sites) that carry a tap.

        Raises:
            ConfigError: `layers` has a layer that the model does not have.
        """
        layers = range(num_layers) if self.layers == "all" else self.layers
        found: set[int] = set()
        for layer in layers:
            if layer >= num_layers:
                raise ConfigError(
                    f"additional_config['scope'].layers has {layer}; this model has layers "
                    f"0 to {num_layers - 1}."
                )
            if "resid_post" in self.sites:
                found.add(2 * layer + 2)
            if "resid_mid" in self.sites:
                found.add(2 * layer + 1)
            if "resid_pre" in self.sites:
                found.add(2 * layer)
            found |= {Place(site, layer).boundary for site in INNER_SITES if site in self.sites}
        found |= {Place(site, 0).boundary for site in MODEL_SITES if site in self.sites}
        return tuple(sorted(found))


@cache
def graph_key() -> str:
    """The package's version, and a digest of the sources that are traced into the model's graph."""
    import vllm_scope

    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted((here / "graph").rglob("*.py")):
        digest.update(source.read_bytes())
    return f"{vllm_scope.__version__}+{digest.hexdigest()[:12]}"
