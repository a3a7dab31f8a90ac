"""Places in a model: sites, layers, and the boundaries that carry taps.

Owns:  the names of sites, `Sites` (the taps of one engine), boundaries and points.
Runs:  in every process. No torch, no vLLM.

A boundary is a number that stands for one location in the model that can carry a tap. On the
residual stream, boundary 2k is the entry of layer k and the exit of layer k - 1. Boundary 2k + 1 is
between the attention and the MLP of layer k.

Two sites can share a boundary, such as `resid_post` of layer k - 1 and `resid_pre` of layer k. The
edits of `resid_post` apply before the edits of `resid_pre`. Therefore a shared boundary has three
points at which the stream can be read: level 0 is before all edits, level 1 is between the edits of
the two sites, and level 2 is after all edits. At a boundary of only one site, level 0 is before the
site's edits, and level 1 is after them. The number of a point combines the boundary and the level.

Sites inside a layer (INNER_SITES) and `ln_final` are not on the stream. Each of these sites is a
kind of its own, with an index in KINDS. At layer k, the boundary of such a site is the index times
65,536, plus k. The stream is the kind 0. All rows of one kind have the same width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

from vllm_scope.errors import SpecError, shown

#: The sites on the residual stream, with the names that TransformerLens uses. All sites can be read
#: and probed.
STREAM_SITES = ("embed", "resid_pre", "resid_mid", "resid_post")
#: The sites that a lens can read: the model's final norm can be applied to their rows. (`embed` is
#: not in this list, because it is `resid_pre` of layer 0.)
LENS_SITES = ("resid_pre", "resid_mid", "resid_post")
#: The sites inside the attention.
ATTENTION_SITES = ("q", "k", "v", "z")
#: The outputs of a layer's attention and MLP. The layer adds these outputs to the stream.
BRANCH_SITES = ("attn_out", "mlp_out")
#: The input of the MLP's second projection.
MLP_SITE = "mlp_post"
#: The router's logits for the experts, in layers that have experts.
ROUTER_SITE = "router_logits"
#: The inputs of a layer's attention and of its MLP, after their norms.
BLOCK_SITES = ("attn_in", "mlp_in")
INNER_SITES = (*ATTENTION_SITES, *BRANCH_SITES, MLP_SITE, ROUTER_SITE, *BLOCK_SITES)
#: The output of the norm after the last layer.
FINAL_SITE = "ln_final"
SITES = (*STREAM_SITES, *INNER_SITES, FINAL_SITE)
#: The sites that a model has one time, and not in each layer. The `Place` of such a site has layer
#: 0.
MODEL_SITES = ("embed", FINAL_SITE)
#: The sites that can be edited, which are all sites except ln_final.
EDIT_SITES = tuple(site for site in SITES if site != FINAL_SITE)
#: The words with which an action names the embedding output, for errors about layers.
EMBEDDING = "site='embed'"
#: The sites that other tools have and this package lacks, and how to get their values.
ELSEWHERE = {
    "pattern": "patterns follow from q and k, by vllm_scope.analysis.attention.attention_pattern",
    "logits": "vLLM itself returns logits: start vLLM with logprobs_mode='raw_logits' and "
    "max_logprobs=-1, and ask for logprobs=-1",
}
#: The names of some sites in other tools, with the site that each name stands for.
ALIASES = {"pre_attn": "resid_pre", "post_attn": "resid_mid", "post_block": "resid_post"}

#: A `Place` in the form that callers write: (site, layer). For a site in MODEL_SITES, the layer is
#: 0.
SiteLayer = tuple[str, int]
#: Whether a read takes the row before or after the edits of its site.
Phase = Literal["before", "after"]

#: The largest number of layers of one action. The number of a layer is below MAX_LAYER.
MAX_LAYERS, MAX_LAYER = 4096, 1 << 31
#: The number of points of one boundary.
LEVELS = 3
#: The kinds of sites. A kind's index is part of the wire format. New kinds must be appended.
KINDS = (
    "stream", *ATTENTION_SITES, *BRANCH_SITES, MLP_SITE, FINAL_SITE, ROUTER_SITE, *BLOCK_SITES
)  # fmt: skip
STREAM = 0
#: Kind k has the boundaries k * _SPAN to (k + 1) * _SPAN - 1.
_SPAN = 1 << 16


def point_of(boundary: int, level: int) -> int:
    return boundary * LEVELS + level


def boundary_of_point(point: int) -> int:
    return point // LEVELS


class Place(NamedTuple):
    """A site at one layer. The rows of a `Place` are a stream. A `Place` equals (site, layer)."""

    site: str
    layer: int

    @property
    def boundary(self) -> int:
        first, step = _BOUNDARIES[self.site]
        return first + step * self.layer

    @property
    def group(self) -> int:
        """1 for `resid_pre`, whose edits apply after the edits of `resid_post`. Otherwise 0."""
        return 1 if self.site == "resid_pre" else 0

    def point(self, phase: Phase = "after") -> int:
        """The point at which a read or a probe of this `Place` takes its row."""
        return point_of(self.boundary, self.group + (1 if phase == "after" else 0))


#: For each site: (its boundary at layer 0, the distance to its boundary at the next layer).
_BOUNDARIES = {"embed": (0, 2), "resid_pre": (0, 2), "resid_mid": (1, 2), "resid_post": (2, 2)} | {
    kind: (number * _SPAN, 1) for number, kind in enumerate(KINDS) if number != STREAM
}


def place_at(boundary: int) -> Place:
    """The `Place` of a boundary. If two sites share the boundary, the `Place` of the site whose
    edits apply first."""
    kind, layer = divmod(boundary, _SPAN)
    if kind != STREAM:
        return Place(KINDS[kind], layer)
    if boundary == 0:
        return Place("embed", 0)
    layer, middle = divmod(boundary, 2)
    return Place("resid_mid", layer) if middle else Place("resid_post", layer - 1)


def kind_of(boundary: int) -> int:
    """The kind of a boundary, as an index into KINDS."""
    return boundary // _SPAN


def kind_of_point(point: int) -> int:
    return kind_of(boundary_of_point(point))


def canonical_site(site: object, where: str) -> str:
    """The site that a name or an alias stands for.

    Raises:
        SpecError: `site` is not a string, or not the name of a site that a tap can read.
    """
    if not isinstance(site, str):
        raise SpecError(f"{where} is {shown(site)}; a site is a string, one of {', '.join(SITES)}.")
    name = ALIASES.get(site, site)
    if name in SITES:
        return name
    if name in ELSEWHERE:
        raise SpecError(
            f"{where} is {shown(site)}, which is not a site: {ELSEWHERE[name]}. Sites are "
            f"{', '.join(SITES)}."
        )
    raise SpecError(f"{where} is {shown(site)}; sites are {', '.join(SITES)}.")


def layer_of(site: object, layer: int | None) -> int:
    """The layer of a stream that a caller reads from a result. If the site has no layers, `layer`
    can be None, and the result is 0.

    Raises:
        KeyError: the site has layers, and `layer` is None.
    """
    if layer is not None:
        return layer
    name = ALIASES.get(str(site), site)
    if name in SITES and name not in MODEL_SITES:
        raise KeyError(f"{site!r} has rows in each layer; name one, as in [{site!r}, 3].")
    return 0


def embedding_hint(way: str | None) -> str:
    """The last sentence of an error about a layer, which says how to name the embedding output.
    `way` is the argument `embedding` of `parse_layers`. If it is None, returns an empty string."""
    return "" if way is None else f" For the embedding output use {way}."


def parse_layers(
    layers: object, site: str, where: str, embedding: str | None = EMBEDDING
) -> tuple[int, ...] | None:
    """The distinct layers in the caller's order, or None for every tapped layer.

    Args:
        embedding: the words with which the caller can name the embedding output, for error texts.
            None if the caller cannot name it.

    Raises:
        SpecError: a wrong type, no layer, too many layers, or a layer that is out of range.
    """
    if hasattr(layers, "tolist"):  # a numpy array or a torch tensor
        layers = layers.tolist()
    if site in MODEL_SITES:
        one = list(layers) if isinstance(layers, list | tuple) else [layers]
        if layers in ("all", None) or (len(one) == 1 and type(one[0]) is int and one[0] == 0):
            return (0,)
        raise SpecError(
            f"{where} is {shown(layers)}; site {site!r} has no layers, leave the layer out."
        )
    if layers is None or (isinstance(layers, str) and layers == "all"):
        return None
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    if isinstance(layers, range):
        layers = list(layers)
    if isinstance(layers, str | bytes | Mapping) or not isinstance(layers, Iterable):
        raise SpecError(
            f"{where} is {shown(layers)}; it must be a list of layer numbers, or 'all'."
        )
    found = list(layers)
    if len(found) > MAX_LAYERS:
        raise SpecError(f"{where} has {len(found):,} layers; at most {MAX_LAYERS:,}.")
    if not found:
        raise SpecError(f"{where} is empty; name at least one layer, or 'all'.")
    for layer in found:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise SpecError(f"{where} has {shown(layer)}; layers are whole numbers from 0.")
        if layer >= MAX_LAYER:
            raise SpecError(f"{where} has {layer}; layers are below {MAX_LAYER:,}.")
        if layer < 0:
            raise SpecError(
                f"{where} has {layer}; layers count from 0 and cannot be negative."
                + (embedding_hint(embedding) if layer == -1 else "")
            )
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Heads:
    """The heads of a model's attention. All layers have the same heads.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key heads, which is also the number of value heads.
        head_size: number of elements of one head's query or key.
        head_size_v: number of elements of one head's value or output.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int

    def shape(self, site: str) -> tuple[int, int]:
        """The shape (number of heads, size of each head) of a row of an attention site."""
        return (
            self.num_heads if site in ("q", "z") else self.num_kv_heads,
            self.head_size if site in ("q", "k") else self.head_size_v,
        )


@dataclass(frozen=True)
class Sites:
    """The boundaries that one engine taps, the model's number of layers, and the sizes of rows.

    Attributes:
        dtype: dtype of the stream's rows, without "torch.".
        boundaries: the boundaries that carry a tap, ascending.
        heads: the heads of the attention, or None if no site inside the attention is tapped.
        mlp_size: number of elements of a row of `mlp_post`. None if `mlp_post` is not tapped.
        num_experts: number of elements of a row of `router_logits`. None if `router_logits` is not
            tapped.
        kernels: for each layer whose attention is tapped, the arguments of the attention kernel
            (`scale`, `sliding_window`, ...) except q, k and v.
        guard: the last boundary of the stream, if the configuration does not name that boundary.
            The engine taps it only to check edited rows for overflow, and actions cannot use it.
            None if the configuration names the last boundary, or names no boundary.
        step_tokens: the largest number of positions of one request in a decode step, which is 1
            plus the number of drafts.
        moved: layers before which the model changes the stream, so that `resid_pre` of the layer
            differs from `resid_post` of the layer before.
    """

    num_layers: int
    hidden_size: int
    dtype: str
    boundaries: tuple[int, ...]
    heads: Heads | None = None
    mlp_size: int | None = None
    kernels: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, compare=False)
    guard: int | None = None
    step_tokens: int = 1
    moved: tuple[int, ...] = ()
    num_experts: int | None = None

    def __getstate__(self) -> dict[str, object]:
        # The state for pickle does not contain the cached properties.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @staticmethod
    def from_body(body: Mapping[str, Any], boundaries: Iterable[int]) -> Sites:
        """Make Sites from `body`, the result of `dataclasses.asdict` for a Sites object. The
        argument `boundaries` takes the place of the boundaries in `body`."""
        heads = body["heads"]
        given = {
            "boundaries": tuple(sorted(boundaries)),
            "heads": None if heads is None else Heads(**heads),
            "kernels": {int(layer): kernel for layer, kernel in body["kernels"].items()},
            "moved": tuple(body["moved"]),
        }
        return Sites(**{**body, **given})

    def row_shape(self, site: str) -> tuple[int, ...]:
        """The shape of a row of a site: [hidden_size], [mlp_size], [num_experts], or
        [number of heads, size of each head]."""
        if site in (MLP_SITE, ROUTER_SITE):
            size = self.mlp_size if site == MLP_SITE else self.num_experts
            assert size is not None
            return (size,)
        if site not in ATTENTION_SITES:
            return (self.hidden_size,)
        assert self.heads is not None
        return self.heads.shape(site)

    def row_size(self, site: str) -> int:
        """The number of elements of one row of a site."""
        return math.prod(self.row_shape(site))

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """The `row_size` of each kind, up to the last kind that is tapped. If `heads`, `mlp_size`
        or `num_experts` is None, the size of the kind is not known, and is 0 here."""
        last = kind_of(max(self.boundaries, default=0))
        unknown = {*(ATTENTION_SITES if self.heads is None else ())}
        sizes_of_parts = {MLP_SITE: self.mlp_size, ROUTER_SITE: self.num_experts}
        unknown |= {site for site, size in sizes_of_parts.items() if size is None}
        sizes = (0 if site in unknown else self.row_size(site) for site in KINDS[1 : last + 1])
        return (self.hidden_size, *sizes)

    @property
    def vector_size(self) -> int:
        """The width of the device table of vectors, which is the width of the widest row."""
        return max(self.row_sizes)

    @cached_property
    def readable(self) -> set[int]:
        """The boundaries that actions can use."""
        return set(self.boundaries) - {self.guard}

    @cached_property
    def of_lenses(self) -> tuple[Place, ...]:
        """Each `Place` that a lens can read."""
        every = (Place(site, i) for site in LENS_SITES for i in range(self.num_layers))
        return tuple(
            place for place in every
            if place.boundary in self.readable
            and not (place.site == "resid_pre" and place.layer in self.moved)
        )  # fmt: skip

    @cached_property
    def last_of_stream(self) -> int | None:
        """The last boundary on the stream that carries a tap, or None."""
        return max((b for b in self.boundaries if kind_of(b) == STREAM), default=None)

    def find(
        self, site: str, layers: tuple[int, ...] | None, where: str,
        embedding: str | None = EMBEDDING,
    ) -> tuple[Place, ...]:  # fmt: skip
        """Each `Place` of a site at these layers. None stands for every tapped layer.

        Args:
            embedding: the same argument as in `parse_layers`.

        Raises:
            SpecError: the model does not have one of the layers, or the engine does not tap the
                site there.
        """
        tapped = self.readable
        moved = self.moved if site == "resid_pre" else ()
        if site == "embed":
            if 0 not in tapped:
                raise SpecError(
                    f"{where}.site is 'embed', which this engine does not tap; start it with "
                    "additional_config={'scope': {'sites': ['embed', 'resid_post']}}."
                )
            return (Place("embed", 0),)
        if layers is None or site in MODEL_SITES:
            every = (Place(site, layer) for layer in range(self.num_layers))
            found = tuple(p for p in every if p.boundary in tapped and p.layer not in moved)
            if not found:
                raise SpecError(
                    f"{where}.site is {site!r}, which this engine does not tap; start it with "
                    f"{site!r} among additional_config={{'scope': {{'sites': ...}}}}."
                )
            return found
        for layer in layers:
            if layer >= self.num_layers:
                raise SpecError(
                    f"{where}.layers has {layer}; this model has layers 0 to "
                    f"{self.num_layers - 1}.{embedding_hint(embedding)}"
                )
            if layer in moved:
                raise SpecError(
                    f"{where}.layers has {layer}; this model changes the stream before that layer, "
                    f"where no tap is. Name resid_post of layer {layer - 1}, or other layers."
                )
            if Place(site, layer).boundary not in tapped:
                raise SpecError(
                    f"{where}.layers has {layer}; this engine does not tap {site!r} there. "
                    f"Start the engine with {site!r} and that layer in "
                    "additional_config={'scope': {'sites': ..., 'layers': ...}}."
                )
        return tuple(Place(site, layer) for layer in layers)
