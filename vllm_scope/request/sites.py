"""Places in a model: sites, layers, and the boundaries that carry taps.

Owns:  the names of sites, `Sites` (what one engine taps), boundaries and points.
Runs:  everywhere. No torch, no vLLM.

A boundary is the number of a place that can carry a tap. On the residual stream, 2k is the entry
of layer k (and the exit of layer k - 1), and 2k + 1 lies between layer k's attention and its MLP.

Two sites may share a boundary: `resid_post` of layer k - 1 and `resid_pre` of layer k. The edits of
the first apply before the edits of the second. So the stream can be read at three points of a
boundary: before all edits (level 0), between the edits of the two sites (level 1) and after all
edits (level 2).

Sites inside a layer (INNER_SITES) and `ln_final` are not on the stream. Each has an index in KINDS;
its boundary at layer k is that index in the upper bits and k in the lower 16. All sites of one kind
have rows of one width. At such a site, level 0 is before the edits and level 1 after them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

from vllm_scope.errors import SpecError, shown

#: Sites on the residual stream, by TransformerLens's names. All sites can be read and probed.
STREAM_SITES = ("embed", "resid_pre", "resid_mid", "resid_post")
#: Sites whose rows the model's final norm takes. (`embed` is `resid_pre` of layer 0.)
LENS_SITES = ("resid_pre", "resid_mid", "resid_post")
#: Sites inside the attention.
ATTENTION_SITES = ("q", "k", "v", "z")
#: The outputs that a layer's attention and its MLP add to the stream.
BRANCH_SITES = ("attn_out", "mlp_out")
#: Between the two projections of the MLP.
MLP_SITE = "mlp_post"
#: The output of the router's gate, in layers with experts.
ROUTER_SITE = "router_logits"
#: The inputs of a layer's attention and of its MLP, after their norms.
BLOCK_SITES = ("attn_in", "mlp_in")
INNER_SITES = (*ATTENTION_SITES, *BRANCH_SITES, MLP_SITE, ROUTER_SITE, *BLOCK_SITES)
#: The output of the norm after the last layer.
FINAL_SITE = "ln_final"
SITES = (*STREAM_SITES, *INNER_SITES, FINAL_SITE)
#: Sites that a model has once, at no layer. Their Place has layer 0.
MODEL_SITES = ("embed", FINAL_SITE)
#: Sites that edits take: all but ln_final.
EDIT_SITES = tuple(site for site in SITES if site != FINAL_SITE)
#: How an action names the embedding output, for errors about layers.
EMBEDDING = "site='embed'"
#: Sites of other tools that are not sites here -> where to find their values.
ELSEWHERE = {
    "pattern": "patterns follow from q and k, by vllm_scope.analysis.attention.attention_pattern",
    "logits": "vLLM returns them itself: start it with logprobs_mode='raw_logits' and "
    "max_logprobs=-1, and ask for logprobs=-1",
}
#: Name in other tools -> site.
ALIASES = {"pre_attn": "resid_pre", "post_attn": "resid_mid", "post_block": "resid_post"}

#: A place as callers write it: (site, layer). MODEL_SITES have layer 0.
SiteLayer = tuple[str, int]
#: Whether a read takes its row before or after the edits of its site.
Phase = Literal["before", "after"]

#: The largest number of layers that one action may name, and a number larger than any layer's
#: number.
MAX_LAYERS, MAX_LAYER = 4096, 1 << 31
#: Number of points of one boundary.
LEVELS = 3
#: Site kinds. The index is part of the wire format: append only.
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
    """A site at a layer: where one stream of rows comes from. Equal to the pair (site, layer)."""

    site: str
    layer: int

    @property
    def boundary(self) -> int:
        if self.site in KINDS:
            return KINDS.index(self.site) * _SPAN + self.layer
        return 2 * self.layer + _ON_STREAM[self.site]

    @property
    def group(self) -> int:
        """1 for `resid_pre`, whose edits apply after those of the boundary's other site; else 0."""
        return 1 if self.site == "resid_pre" else 0

    def point(self, phase: Phase = "after") -> int:
        """The point at which a read or a probe of this place takes its row."""
        return point_of(self.boundary, self.group + (1 if phase == "after" else 0))


#: Site on the stream -> its boundary at layer 0.
_ON_STREAM = {"embed": 0, "resid_pre": 0, "resid_mid": 1, "resid_post": 2}


def place_at(boundary: int) -> Place:
    """The Place of a boundary. If two sites share it, the site whose edits apply first is taken."""
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
    """The site that a name or an alias means.

    Raises:
        SpecError: not a string, or not the name of a site that a tap can read.
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
    """The layer of a stream that a caller takes from a result; 0 for a site without layers.

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
    """The last sentence of an error about a layer; empty if `way` is None."""
    return "" if way is None else f" For the embedding output use {way}."


def parse_layers(
    layers: object, site: str, where: str, embedding: str | None = EMBEDDING
) -> tuple[int, ...] | None:
    """Distinct layers in the given order, or None for every tapped layer.

    Args:
        embedding: how the caller names the embedding output; None if the caller cannot.

    Raises:
        SpecError: a wrong type, an empty list, or a negative number.
    """
    if hasattr(layers, "tolist"):  # an array of numpy or torch
        layers = layers.tolist()
    if site in MODEL_SITES:
        one = list(layers) if isinstance(layers, list | tuple) else [layers]
        if layers in ("all", None) or (len(one) == 1 and type(one[0]) is int and one[0] == 0):
            return (0,)
        raise SpecError(f"{where} is {shown(layers)}; site {site!r} has no layers, leave it out.")
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
    """The heads of a model's attention, the same in all layers.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key heads, and of value heads.
        head_size: size of a query, and of a key.
        head_size_v: size of a value, and of one head's output.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int

    def shape(self, site: str) -> tuple[int, int]:
        """(number of heads, size of each head) of a row of a site inside the attention."""
        return (
            self.num_heads if site in ("q", "z") else self.num_kv_heads,
            self.head_size if site in ("q", "k") else self.head_size_v,
        )


@dataclass(frozen=True)
class Sites:
    """What an engine taps: its layers, and the boundaries that carry a tap.

    Attributes:
        dtype: dtype of the stream's rows, without "torch.".
        boundaries: the boundaries that carry a tap, ascending.
        heads: None if no site inside the attention is tapped.
        mlp_size: how many numbers a row of `mlp_post` has; None if `mlp_post` is not tapped.
        num_experts: how many numbers a row of `router_logits` has; None if it is not tapped.
        kernels: layer -> arguments of the attention kernel besides q, k and v (`scale`,
            `sliding_window`, ...), for the layers whose attention is tapped.
        guard: the last boundary of the stream, if the configuration does not name it. The engine
            taps it to check edited rows for overflow, and no action may use it. None if the
            configuration names it, or names nothing to tap.
        step_tokens: how many positions of a generating request one step may compute: 1 plus the
            drafts.
        moved: layers before which the model changes the stream: `resid_pre` of such a layer is not
            `resid_post` of the layer before.
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
        # Without cached properties.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @staticmethod
    def from_body(body: Mapping[str, Any], boundaries: Iterable[int]) -> Sites:
        """Sites from a `body` that `dataclasses.asdict` made, with other boundaries."""
        heads = body["heads"]
        given = {
            "boundaries": tuple(sorted(boundaries)),
            "heads": None if heads is None else Heads(**heads),
            "kernels": {int(layer): kernel for layer, kernel in body["kernels"].items()},
            "moved": tuple(body["moved"]),
        }
        return Sites(**{**body, **given})

    def row_shape(self, site: str) -> tuple[int, ...]:
        """[hidden_size], [mlp_size], [num_experts], or [number of heads, size of each head]."""
        if site in (MLP_SITE, ROUTER_SITE):
            size = self.mlp_size if site == MLP_SITE else self.num_experts
            assert size is not None
            return (size,)
        if site not in ATTENTION_SITES:
            return (self.hidden_size,)
        assert self.heads is not None
        return self.heads.shape(site)

    def row_size(self, site: str) -> int:
        """How many numbers one row has."""
        return math.prod(self.row_shape(site))

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """`row_size` of each kind, up to the last kind that is tapped. 0 for the attention's sites
        if none of them is tapped; likewise for `mlp_post` and for `router_logits`."""
        last = kind_of(max(self.boundaries, default=0))
        unknown = {*(ATTENTION_SITES if self.heads is None else ())}
        sizes_of_parts = {MLP_SITE: self.mlp_size, ROUTER_SITE: self.num_experts}
        unknown |= {site for site, size in sizes_of_parts.items() if size is None}
        sizes = (0 if site in unknown else self.row_size(site) for site in KINDS[1 : last + 1])
        return (self.hidden_size, *sizes)

    @property
    def vector_size(self) -> int:
        """How many numbers a row of the table of vectors has: as many as the widest row."""
        return max(self.row_sizes)

    @cached_property
    def readable(self) -> set[int]:
        """The boundaries that actions may use."""
        return set(self.boundaries) - {self.guard}

    @cached_property
    def of_lenses(self) -> tuple[Place, ...]:
        """The places that lenses may read: actions may use them, and the final norm takes their
        rows."""
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
        """The places of a site at these layers; None means every tapped layer.

        Args:
            embedding: as for `parse_layers`.

        Raises:
            SpecError: the model does not have a layer, or the engine does not tap the site there.
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
                    f"Start it with {site!r} and that layer in "
                    "additional_config={'scope': {'sites': ..., 'layers': ...}}."
                )
        return tuple(Place(site, layer) for layer in layers)
