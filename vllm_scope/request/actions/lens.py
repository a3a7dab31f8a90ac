"""The action that delivers the likeliest tokens at any layer: the logit lens.

Owns:  LensTopK.
To:    resolve.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import MEMORY, Action, checked_name
from vllm_scope.request.actions.sparse import MAX_TOP_K

#: Rows that the model's final norm takes. (`embed` is `resid_pre` of layer 0.)
LENS_SITES = ("resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True)
class LensTopK(Action):
    """Deliver the likeliest next tokens by the row of each token, at some layers.

    The model's own final norm and unembedding are applied to the row on the device, with the soft
    cap and the scale of its logits; then log-softmax over the whole vocabulary, in float32. At
    `resid_post` of the last layer these are the model's own log-probabilities.

    Args:
        layer, layers: one argument: a number, a list of numbers from 0, or "all" (the default)
            for every tapped layer.
        top_k: how many tokens of each row and layer, at most 1,024.
        site: "resid_post" (the default), "resid_mid" or "resid_pre".
        tokens: which tokens.
        name: of the lens in the result.
        to: "memory", or a sink that takes scores.

    Raises:
        SpecError: wrong types, or another site.
    """

    kind: ClassVar[str] = "lens"
    fields: ClassVar[tuple[str, ...]] = ("top_k", "name", "to")

    _: KW_ONLY
    top_k: int = 10
    name: str = "lens"
    to: str = MEMORY

    def __post_init__(self) -> None:
        self._place()
        if self.site not in LENS_SITES:
            raise SpecError(
                f"LensTopK.site is {shown(self.site)}; it is one of {', '.join(LENS_SITES)}."
            )
        if type(self.top_k) is not int or not 1 <= self.top_k <= MAX_TOP_K:
            raise SpecError(
                f"LensTopK.top_k is {shown(self.top_k)}; it is a whole number from 1 to "
                f"{MAX_TOP_K:,}."
            )
        checked_name(self.name, "LensTopK.name")
        checked_name(self.to, "LensTopK.to")
        if self.layer_numbers is not None:
            layers = tuple(sorted(self.layer_numbers))
            self._set(layer=layers[0] if len(layers) == 1 else layers, layers=layers)
