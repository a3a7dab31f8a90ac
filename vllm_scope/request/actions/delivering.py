"""What takes rows or scores of them, and leaves the rows as they are.

Owns:  Read, Probe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import (
    MEMORY,
    Action,
    Layers,
    When,
    checked_name,
    number,
    one_of,
    vector_or_module,
)  # fmt: skip
from vllm_scope.request.arrays import Array
from vllm_scope.request.encoding import CodecChoice
from vllm_scope.request.sites import SITES


@dataclass(frozen=True)
class Read(Action):
    """Return the rows of a site, at some layers, of some tokens.

    Args:
        site: `resid_pre`, `resid_mid`, `resid_post` (aliases `pre_attn`, `post_attn`,
            `post_block`) or `embed`. `resid_post` at layer k is Hugging Face's
            `hidden_states[k + 1]`; the last layer's is the stream before the final norm.
            Where the engine taps them, `q`, `k` (after norms and rotary embedding), `v`
            and `z` (what comes out, before its projection), per head; `attn_out` and
            `mlp_out`, what the attention and the MLP add to the stream.
        layers: layer numbers from 0, or "all" for every tapped layer.
            `embed` takes none.
        tokens: which tokens, see `vllm_scope.request.selectors`. "all" by default.
        when: "after" the edits of its own site, or "before" them.
        to: "memory" (the rows come back with the request's result), or a sink that the
            engine was started with: "filesystem", or a plugin's name.
        tag, name: what a sink may call the request: a folder for requests that belong
            together, and the request's own name. Not for "memory".
        codec: how the rows are encoded on the device, before they are copied anywhere:
            a name, or an object such as {"name": "rp8", "k": 128, "seed": 3}. They come
            back decoded; what each codec loses: docs/codecs.md.

    Raises:
        SpecError: a wrong type, an unknown site, an empty or negative layer list, an
            unknown codec or option.
    """

    kind: ClassVar[str] = "read"
    sites: ClassVar[tuple[str, ...]] = SITES
    fields: ClassVar[tuple[str, ...]] = ("when", "to", "tag", "name", "codec")

    site: str
    layers: Layers = None
    tokens: Any = "all"
    when: When = "after"
    layer: Layers = field(default=None, repr=False, compare=False, kw_only=True)
    to: str = field(default=MEMORY, kw_only=True)
    tag: str | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    codec: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._place(self.layer)
        object.__setattr__(self, "layer", None)
        object.__setattr__(self, "codec", CodecChoice.parse(self.codec, "Read.codec"))
        if not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(sorted(self.layers)))  # type: ignore[arg-type]
        one_of(self.when, ("after", "before"), "Read.when")
        checked_name(self.to, "Read.to")
        for word in ("tag", "name"):
            value = getattr(self, word)
            if value is None:
                continue
            checked_name(value, f"Read.{word}")
            if self.to == MEMORY:
                raise SpecError(
                    f"Read.{word} is {shown(value)}, and the rows go to memory; it is for "
                    "sinks, such as to='filesystem'."
                )


@dataclass(frozen=True)
class Probe(Action):
    """Score each token's row: `x.weight + bias`, computed on the device.

    Args:
        weight: [hidden_size], or the name of a steering module that the engine holds,
            which has a vector there.
        bias: added to each score.
        site, layer: where; one layer.
        name: of the scores in the result.
        tokens: which tokens.
        to: as for `Read`; only some sinks take scores, "filesystem" does not.

    Raises:
        SpecError: a wrong type or shape, no name, or not exactly one layer.
    """

    kind: ClassVar[str] = "probe"
    fields: ClassVar[tuple[str, ...]] = ("weight", "bias", "name", "to")

    weight: Any
    bias: float = 0.0
    site: str = "resid_post"
    layer: Layers = field(default=None, repr=False)
    name: str = ""
    tokens: Any = "all"
    layers: Layers = field(default=None, kw_only=True)
    to: str = field(default=MEMORY, kw_only=True)

    def __post_init__(self) -> None:
        checked_name(self.to, "Probe.to")
        object.__setattr__(self, "weight", vector_or_module(self.weight, "Probe.weight"))
        if isinstance(self.weight, Array) and len(self.weight.shape) != 1:
            raise SpecError(
                f"Probe.weight has shape {self.weight.shape}; it is one vector, [hidden_size]."
            )
        object.__setattr__(self, "bias", number(self.bias, "Probe.bias"))
        checked_name(self.name, "Probe.name")
        given = self.layer if self.layers is None else self.layers
        self._place(self.layer)
        if self.layer_numbers is None or len(self.layer_numbers) != 1:
            raise SpecError(f"Probe.layers is {shown(given)}; a probe has one layer.")
        object.__setattr__(self, "layer", None)
