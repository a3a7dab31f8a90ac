"""What a caller asks for: reads, where, on which tokens; and its JSON.

Owns:  Read, Spec, the selector language, the wire form of both.
Runs:  in the caller's process, in the front-end (validation) and in workers.
       No torch, no vLLM.
To:    program (which rows of a step to read), result (which rows to expect).

Promise: a `Spec` that exists is well formed. What only the engine knows (the
number of layers, the tapped sites) is checked by `Spec.resolve`, with the same
kind of sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_scope.errors import SpecError, shown
from vllm_scope.selectors import Selector, parse_selector

MAX_SPEC_BYTES = 1 << 20
MAX_READS = 32

#: Sites in TransformerLens words, and the aliases other tools use for them.
SITES = ("embed", "resid_pre", "resid_post")
#: Words of the field that name a site which no tap reads yet.
KNOWN_SITES = (
    *SITES, "resid_mid", "attn_out", "mlp_out", "q", "k", "v", "z", "mlp_post",
    "router_logits", "ln_final", "logits",
)  # fmt: skip
ALIASES = {"pre_attn": "resid_pre", "post_attn": "resid_mid", "post_block": "resid_post"}

#: One stream of rows: a site at a layer. `embed` has one place and uses layer 0.
SiteLayer = tuple[str, int]


def canonical_site(site: object, where: str) -> str:
    """The site's own name for a name or an alias.

    Raises:
        SpecError: not a string, or not a word for a site that a tap can read.
    """
    if not isinstance(site, str):
        raise SpecError(f"{where} is {shown(site)}; a site is a string, one of {', '.join(SITES)}.")
    name = ALIASES.get(site, site)
    if name in SITES:
        return name
    if name in KNOWN_SITES:
        raise SpecError(
            f"{where} is {shown(site)}, which this version does not tap; "
            f"it reads {', '.join(SITES)}."
        )
    raise SpecError(f"{where} is {shown(site)}; sites are {', '.join(SITES)}.")


def _parse_layers(layers: object, site: str, where: str) -> tuple[int, ...] | None:
    """Layers as sorted distinct ints, or None for every tapped layer."""
    if site == "embed":
        one = list(layers) if isinstance(layers, list | tuple) else [layers]
        if layers in ("all", None) or (len(one) == 1 and type(one[0]) is int and one[0] == 0):
            return (0,)
        raise SpecError(f"{where} is {shown(layers)}; site 'embed' has no layers, leave it out.")
    if layers is None or (isinstance(layers, str) and layers == "all"):
        return None
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    if isinstance(layers, range):
        layers = list(layers)
    if isinstance(layers, str | bytes | Mapping) or not isinstance(layers, Iterable):
        raise SpecError(f"{where} is {shown(layers)}; it is a list of layer numbers, or 'all'.")
    found = list(layers)
    if not found:
        raise SpecError(f"{where} is empty; name at least one layer, or 'all'.")
    for layer in found:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise SpecError(f"{where} has {shown(layer)}; layers are whole numbers from 0.")
        if layer < 0:
            raise SpecError(
                f"{where} has {layer}; layers count from 0 and cannot be negative."
                + (" For the embedding output use site='embed'." if layer == -1 else "")
            )
    return tuple(sorted(set(found)))


@dataclass(frozen=True)
class Read:
    """Return the rows of a site, at some layers, of some tokens.

    Args:
        site: `resid_pre`, `resid_post` (aliases `pre_attn`, `post_block`) or `embed`.
            `resid_post` at layer k is Hugging Face's `hidden_states[k + 1]`; the
            last layer's is the stream before the final norm.
        layers: layer numbers from 0, or "all" for every tapped layer.
            `embed` takes none.
        tokens: which tokens, see `vllm_scope.selectors`. "all" by default.

    Raises:
        SpecError: a wrong type, an unknown site, an empty or negative layer list.
    """

    site: str
    layers: Sequence[int] | str | int | None = "all"
    tokens: Any = "all"

    def __post_init__(self) -> None:
        site = canonical_site(self.site, "Read.site")
        object.__setattr__(self, "site", site)
        layers = _parse_layers(self.layers, site, "Read.layers")
        object.__setattr__(self, "layers", "all" if layers is None else layers)
        object.__setattr__(self, "tokens", parse_selector(self.tokens, "Read.tokens"))

    def to_json(self) -> dict[str, Any]:
        layers = self.layers if isinstance(self.layers, str) else list(self.layers or ())  # type: ignore[arg-type]
        body: dict[str, Any] = {"site": self.site, "tokens": self.tokens.to_json()}
        if self.site != "embed":
            body["layers"] = layers
        return body

    @staticmethod
    def from_json(body: object, where: str) -> Read:
        if not isinstance(body, dict):
            raise SpecError(f"{where} is {shown(body)}; it is an object with 'site' and 'layers'.")
        unknown = set(body) - {"site", "layers", "tokens"}
        if unknown:
            raise SpecError(
                f"{where} has {shown(sorted(unknown)[0])}; the fields are site, layers, tokens."
            )
        if "site" not in body:
            raise SpecError(f"{where} has no 'site'; sites are {', '.join(SITES)}.")
        try:
            return Read(body["site"], body.get("layers", "all"), body.get("tokens", "all"))
        except SpecError as error:
            raise SpecError(str(error).replace("Read.", f"{where}.")) from None


@dataclass(frozen=True)
class Spec:
    """Everything one request asks for."""

    reads: tuple[Read, ...]

    def __post_init__(self) -> None:
        if not self.reads:
            raise SpecError("the spec asks for nothing; give at least one Read.")
        if len(self.reads) > MAX_READS:
            raise SpecError(f"the spec has {len(self.reads)} reads; at most {MAX_READS}.")

    def to_json(self) -> str:
        return json.dumps({"reads": [read.to_json() for read in self.reads]})

    @staticmethod
    def from_json(text: object) -> Spec:
        """Parse what travelled in `extra_args["scope"]`.

        Raises:
            SpecError: not a string, too long, not JSON, or not a spec.
        """
        if not isinstance(text, str):
            raise SpecError(
                f"extra_args['scope'] is a {type(text).__name__}; it is a JSON string, "
                "which vllm_scope.scope(...) makes."
            )
        if len(text) > MAX_SPEC_BYTES:
            raise SpecError(
                f"extra_args['scope'] is {len(text):,} characters; at most {MAX_SPEC_BYTES:,}."
            )
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"extra_args['scope'] is not JSON: {error}.") from None
        if not isinstance(body, dict) or set(body) != {"reads"}:
            raise SpecError("extra_args['scope'] must be an object with one field, 'reads'.")
        reads = body["reads"]
        if not isinstance(reads, list):
            raise SpecError(f"reads is {shown(reads)}; it is a list of reads.")
        return Spec(tuple(Read.from_json(read, f"reads[{i}]") for i, read in enumerate(reads)))

    def resolve(self, points: Sites) -> tuple[ResolvedRead, ...]:
        """The reads as sites of this engine.

        Raises:
            SpecError: a layer that the model does not have, or a site or layer
                that this engine does not tap.
        """
        return tuple(
            ResolvedRead(points.find(read, f"reads[{i}]"), read.tokens)
            for i, read in enumerate(self.reads)
        )


@dataclass(frozen=True)
class ResolvedRead:
    """One read as the streams it means on this engine."""

    streams: tuple[SiteLayer, ...]
    tokens: Selector


@dataclass(frozen=True)
class Sites:
    """What an engine can read: its number of layers, and the tap behind each stream.

    A tap sits at a boundary of the residual stream: boundary 0 is the embedding
    output, boundary k + 1 the exit of layer k. `resid_pre` of layer k is the
    boundary k, so it needs no tap of its own.
    """

    num_layers: int
    hidden_size: int
    dtype: str
    boundaries: tuple[int, ...]

    def boundary_of(self, stream: SiteLayer) -> int:
        site, layer = stream
        return layer + 1 if site == "resid_post" else layer

    def find(self, read: Read, where: str) -> tuple[SiteLayer, ...]:
        tapped = set(self.boundaries)
        if read.site == "embed":
            if 0 not in tapped:
                raise SpecError(
                    f"{where}.site is 'embed', which this engine does not tap; start it with "
                    "additional_config={'scope': {'sites': ['embed', 'resid_post']}}."
                )
            return (("embed", 0),)
        if isinstance(read.layers, str):
            streams = tuple((read.site, layer) for layer in range(self.num_layers))
            found = tuple(s for s in streams if self.boundary_of(s) in tapped)
            if not found:
                raise SpecError(f"{where}.site is {read.site!r}, which this engine does not tap.")
            return found
        for layer in read.layers:  # type: ignore[union-attr]
            if layer >= self.num_layers:
                raise SpecError(
                    f"{where}.layers has {layer}; this model has layers 0 to "
                    f"{self.num_layers - 1}. For the embedding output use site='embed'."
                )
            if self.boundary_of((read.site, layer)) not in tapped:
                raise SpecError(
                    f"{where}.layers has {layer}; this engine does not tap {read.site!r} there. "
                    "Start it with that layer in additional_config={'scope': {'layers': ...}}."
                )
        return tuple((read.site, layer) for layer in read.layers)  # type: ignore[union-attr]


def scope(*actions: Read) -> dict[str, str]:
    """What to put in `SamplingParams(extra_args=...)`.

    Args:
        actions: one or more `Read`.

    Returns:
        A dict with one key, "scope": the spec as a JSON string (the same string
        goes into `vllm_xargs` over HTTP). Merge it with other extra_args freely.

    Raises:
        SpecError: nothing was asked for, or something that is not an action.
    """
    for i, action in enumerate(actions):
        if not isinstance(action, Read):
            raise SpecError(f"scope() argument {i} is {shown(action)}; it takes Read(...).")
    return {"scope": Spec(tuple(actions)).to_json()}
