"""The action that delivers rows, and leaves them as they are.

Owns:  Read.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import (
    MEMORY,
    Action,
    checked_name,
)
from vllm_scope.request.heads import CodecChoice

WHEN = ("after", "before")


@dataclass(frozen=True)
class Read(Action):
    """Return the rows of a site, at some layers, of some tokens.

    Args:
        site: `resid_pre`, `resid_mid`, `resid_post` (aliases `pre_attn`, `post_attn`,
            `post_block`) or `embed`. `resid_post` at layer k is Hugging Face's
            `hidden_states[k + 1]`; at the last layer it is the stream before the final norm.
            Also, if the engine taps them: per head `q`, `k` (both after norms and rotary
            embedding), `v`, and `z` (the attention's output before its projection);
            `attn_in` and `mlp_in`, the inputs of the attention and of the MLP, after their norms;
            `attn_out` and `mlp_out`, which the attention and the MLP add to the stream;
            `mlp_post`, the input of the MLP's down projection; `router_logits`, the output of the
            router's gate in layers with experts; and `ln_final`, the output of the final norm.
        layer, layers: one argument: a number, a list of numbers from 0, or "all" (the default)
            for every tapped layer. `embed` and `ln_final` take no layer.
        tokens: which tokens, see `vllm_scope.request.selectors`. "all" by default.
        when: "after" the edits of the same site, or "before" them.
        to: "memory" (the rows come back with the request's result), or a sink that the
            engine was started with: "filesystem", or a plugin's name.
        tag, name: for sinks: a folder for requests that belong together, and the request's
            own name. Not for "memory".
        codec: how the rows are encoded on the device, before they are copied anywhere:
            a name, or an object such as {"name": "rp8", "k": 128, "seed": 3}. The result
            decodes them; docs/codecs.md says what each codec loses.

    Raises:
        SpecError: a wrong type, an unknown site, an empty or negative layer list, an
            unknown codec or option.
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
        if self.layer_numbers is not None and len(self.layer_numbers) > 1:
            layers = tuple(sorted(self.layer_numbers))
            self._set(layer=layers, layers=layers)
        self._set(codec=CodecChoice.parse(self.codec, "Read.codec"))
        if self.when not in WHEN:
            raise SpecError(
                f"Read.when is {shown(self.when)}; it must be one of {', '.join(WHEN)}."
            )
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
