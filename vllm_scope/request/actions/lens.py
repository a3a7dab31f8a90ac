"""The action that delivers the likeliest next tokens at any layer, by a lens.

Owns:  LensTopK.
To:    resolve.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from vllm_scope.errors import SpecError, checked_count, checked_word, shown
from vllm_scope.request.actions.base import MEMORY, Action, checked_name, held
from vllm_scope.request.actions.sparse import MAX_TOP_K
from vllm_scope.request.sites import LENS_SITES, Place


@dataclass(frozen=True)
class LensTopK(Action):
    """Deliver the likeliest next tokens, computed from the row of each token at each named layer.

    The device applies the model's own final norm and unembedding to the row. If the model has a
    soft cap or a scale of logits, the device applies these too. Then the device computes the
    log-softmax over the whole vocabulary, in float32. If `lens` is None, the values at `resid_post`
    of the last layer are the model's own log-probabilities.

    Args:
        layer, layers: two names of one argument, which is a number, a list of numbers from 0, or
            "all" (the default) for every tapped layer. With a named lens, "all" means every tapped
            layer for which the lens has a map.
        lens: the name of a tuned lens or a Jacobian lens of the engine, which has an affine map for
            each layer. The map is applied to the row first. If None, no map is applied.
        top_k: number of tokens for each row and layer, at most 1,024.
        site: "resid_post" (the default), "resid_mid" or "resid_pre".
        tokens: a selector of the tokens.
        name: the name of the delivered tokens in the result.
        to: "memory", or a sink that accepts scores.

    Raises:
        SpecError: a wrong type, a wrong `top_k`, or a site that is none of the three sites above.
    """

    kind: ClassVar[str] = "lens"
    fields: ClassVar[tuple[str, ...]] = ("top_k", "lens", "name", "to")
    embedding: ClassVar[str] = "site='resid_pre' of layer 0"

    _: KW_ONLY
    top_k: int = 10
    lens: str | None = None
    name: str = "lens"
    to: str = MEMORY

    def __post_init__(self) -> None:
        self._place()
        checked_word(self.site, LENS_SITES, "LensTopK.site")
        checked_count(self.top_k, MAX_TOP_K, "LensTopK.top_k")
        if self.lens is not None:
            checked_name(self.lens, "LensTopK.lens")
        checked_name(self.name, "LensTopK.name")
        checked_name(self.to, "LensTopK.to")
        self._sort_layers()

    def of_engine(self, lenses: Mapping[str, Collection[Place]]) -> LensTopK:
        """If the action names a lens but no layers, returns an action with all layers for which the
        lens has a map. Otherwise returns the action itself.

        Args:
            lenses: by the name of a lens, each tapped `Place` for which the lens has a map.

        Raises:
            SpecError: the lens is not known, or the lens has no map for one of the layers.
        """
        if self.lens is None:
            return self
        places = held(self.lens, lenses, "LensTopK.lens", "lens", "lenses")
        mapped = sorted(layer for site, layer in places if site == self.site)
        wrong = [layer for layer in self.layer_numbers or () if layer not in mapped]
        if wrong or not mapped:
            there = f"layers {', '.join(map(str, mapped))}" if mapped else "no layer"
            raise SpecError(
                f"LensTopK.layers {f'has {wrong[0]}' if wrong else 'is all'}; the lens "
                f"{shown(self.lens)} has maps of {self.site} at {there} that this engine taps."
            )
        return self if self.layer_numbers else replace(self, layers=mapped, layer=None)
