"""The action that delivers rows.

Owns:  Read.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

from vllm_scope.errors import SpecError, checked_word, shown
from vllm_scope.request.actions.base import MEMORY, Action, checked_name
from vllm_scope.request.heads import CodecChoice

WHEN = ("after", "before")


@dataclass(frozen=True)
class Read(Action):
    """Return the rows of one site, at the named layers, for the selected tokens.

    Args:
        site: a site that the engine taps.
            The sites on the residual stream are `resid_pre`, `resid_mid`, `resid_post` (aliases
            `pre_attn`, `post_attn`, `post_block`) and `embed`. `resid_post` at layer k is Hugging
            Face's `hidden_states[k + 1]`, except at the last layer. There, `resid_post` is the row
            before the final norm. The sites with one vector for each attention head are `q` and `k`
            (after norms and rotary embedding), `v`, and `z` (the attention's output before the
            output projection).
            `attn_in` and `mlp_in`: the inputs of the attention and of the MLP, after the norms.
            `attn_out` and `mlp_out`: the outputs that the layer adds to the stream.
            `mlp_post`: the input of the MLP's down projection. `ln_final`: the output of the
            final norm. `router_logits`: the router's logits for the experts, in layers that have
            experts.
        layer, layers: two names of one argument, which is a number, a list of numbers from 0, or
            "all" (the default) for every tapped layer. `embed` and `ln_final` have no layer.
        tokens: a selector (`vllm_scope.request.selectors`). "all" by default.
        when: "after" for the row after the edits of the same site, or "before" for the row before
            the edits of the same site.
        to: the destination of the rows. With "memory", the request's result has the rows. Other
            destinations are sinks of the engine: "filesystem", or the name of a plugin.
        tag, name: only for sinks. `tag` names the folder for a group of requests. `name` names this
            request in the folder.
        codec: the codec that makes rows smaller on the device, before they are copied to the host.
            It is a codec's name, or an object such as {"name": "rp8", "k": 128, "seed": 3}. The
            result has decoded rows. docs/codecs.md describes the loss of each codec.

    Raises:
        SpecError: a wrong type, an unknown site, codec or option, an empty list of layers, a
            negative layer, or a tag or name for rows that go to memory.
    """

    kind: ClassVar[str] = "read"
    fields: ClassVar[tuple[str, ...]] = ("when", "to", "tag", "name", "codec")

    site: str = field(kw_only=False)
    _: KW_ONLY
    when: Literal["after", "before"] = "after"
    to: str = MEMORY
    tag: str | None = None
    name: str | None = None
    codec: Any = None

    def __post_init__(self) -> None:
        self._place()
        self._sort_layers()
        self._set(codec=CodecChoice.parse(self.codec, "Read.codec"))
        checked_word(self.when, WHEN, "Read.when")
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
