"""Actions that change features of a sparse autoencoder in a row.

Owns:  SetFeature, ScaleFeature, FeatureRows (the rows of an SAE that they need).
To:    resolve_edits.

With f the feature's activation in the row x, and D its row of the decoder:

    SetFeature    x + (value - f) * D
    ScaleFeature  x + (factor - 1) * f * D

What the SAE does not explain of the row stays as it is. All features of one action see the same
row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import number
from vllm_scope.request.actions.edits import COMMON, Edit
from vllm_scope.request.arrays import Array

#: Features of one action.
MAX_FEATURES = 16


@dataclass(frozen=True)
class FeatureRows:
    """The features of one action: f = s if s > threshold, else 0, with s = x . encoder + bias.

    Args:
        encoder, decoder: [num_features, width of a row].
        bias: of each feature, with all constants of the SAE folded in.
        threshold: of each feature, 0 or above.

    Raises:
        SpecError: shapes that do not fit, or numbers that are not finite.
    """

    encoder: Any
    decoder: Any
    bias: tuple[float, ...]
    threshold: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("encoder", "decoder"):
            found = Array.parse(getattr(self, name), f"sae.{name}")
            if len(found.shape) != 2 or not 1 <= found.shape[0] <= MAX_FEATURES:
                raise SpecError(
                    f"sae.{name} has shape {found.shape}; it is [num_features, width of a row], of "
                    f"at most {MAX_FEATURES} features."
                )
            object.__setattr__(self, name, found)
        if self.encoder.shape != self.decoder.shape:
            raise SpecError(
                f"sae.encoder has shape {self.encoder.shape} and sae.decoder "
                f"{self.decoder.shape}; they are alike."
            )
        for name in ("bias", "threshold"):
            numbers = _numbers(getattr(self, name), self.count, f"sae.{name}")
            object.__setattr__(self, name, numbers)
        if min(self.threshold) < 0:
            raise SpecError(f"sae.threshold has {min(self.threshold):g}; it is not below 0.")

    @property
    def count(self) -> int:
        return int(self.encoder.shape[0])

    @staticmethod
    def of(sae: Any, index: object) -> FeatureRows:
        """The rows of a `vllm_scope.saes` Sae.

        Raises:
            SpecError: an index that the SAE does not have, or an SAE of which one feature cannot be
                computed without all others.
        """
        given = index.tolist() if hasattr(index, "tolist") else index
        indices = list(given) if isinstance(given, Sequence) else [given]
        if not 1 <= len(indices) <= MAX_FEATURES:
            raise SpecError(
                f"index has {len(indices)} features; an edit has 1 to {MAX_FEATURES}. Send several "
                "edits."
            )
        if len(set(indices)) < len(indices):
            raise SpecError(f"index is {shown(indices)}; it names each feature once.")
        some = [sae.feature(i) for i in indices]
        if some[0].kind == "topk":
            raise SpecError(
                f"{sae.name} is a TopK SAE: whether a feature is active depends on all others, "
                "which an edit does not compute. Take a standard, JumpReLU, BatchTopK or gated SAE."
            )
        return FeatureRows(
            np.stack([one.encoder.numpy() for one in some]),
            np.stack([one.decoder.numpy() for one in some]),
            tuple(one.encoder_bias for one in some), tuple(one.threshold or 0.0 for one in some),
        )  # fmt: skip

    @staticmethod
    def parse(value: object, where: str) -> FeatureRows:
        """Of JSON: an object with the four fields."""
        if isinstance(value, FeatureRows):
            return value
        names = ("encoder", "decoder", "bias", "threshold")
        if not isinstance(value, Mapping) or set(value) != set(names):
            raise SpecError(
                f"{where} is {shown(value)}; it is an SAE that vllm_scope.saes loaded, in JSON an "
                f"object with {', '.join(names)}."
            )
        try:
            return FeatureRows(*(value[name] for name in names))
        except SpecError as error:
            raise SpecError(str(error).replace("sae.", f"{where}.", 1)) from None

    def to_json(self) -> dict[str, object]:
        return {
            "encoder": self.encoder.to_json(), "decoder": self.decoder.to_json(),
            "bias": list(self.bias), "threshold": list(self.threshold),
        }  # fmt: skip


def _numbers(value: object, count: int, where: str) -> tuple[float, ...]:
    """One number for each feature; a single number is for all."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    given = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(given) != count:
        raise SpecError(f"{where} has {len(given)} numbers for {count} features.")
    return tuple(number(one, where) for one in given)


class _FeatureEdit(Edit):
    """`fields[1]` names the number that belongs to each feature."""

    sae: Any
    index: Any

    def _place_features(self) -> None:
        kind, name = type(self).__name__, self.fields[1]
        rows = self.sae
        if hasattr(rows, "feature"):  # an Sae
            self._set(site=self.site or rows.place.site)
            if self._given_layers() is None and self.site != "embed":
                self._set(layer=rows.place.layer)
            rows = FeatureRows.of(rows, self.index)
        elif self.index is not None:
            raise SpecError(
                f"{kind}.index is {shown(self.index)}, and {kind}.sae is not an SAE that was "
                "loaded; give one, or the features' rows without an index."
            )
        rows = FeatureRows.parse(rows, f"{kind}.sae")
        self._set(site=self.site or "resid_post")
        self._set(sae=rows, index=None)
        self._set(**{name: _numbers(getattr(self, name), rows.count, f"{kind}.{name}")})
        self._place_edit()
        if self.dose is not None and rows.count > 1:
            raise SpecError(
                f"{kind}.dose is {shown(self.dose)}, and there are {rows.count} features; a dose "
                "is of one. Leave it out, or send one edit for each feature."
            )

    @property
    def changes(self) -> tuple[tuple[float, float], ...]:
        """Of each feature (a, d): what is added is (a + d * f) times the decoder's row."""
        raise NotImplementedError


@dataclass(frozen=True)
class SetFeature(_FeatureEdit):
    """Set features of an SAE in the row: `x + (value - f) * decoder`.

    Args:
        sae: a `vllm_scope.saes.sae.Sae`; not a TopK SAE.
        index: the feature, or a list of at most 16.
        value: the activation that it gets, or a list with one for each.
        site, layer: where; the SAE's own place if no layer is given. tokens, gate: as for `Add`.

    Raises:
        SpecError: wrong types or shapes, or a feature that the SAE does not have.
    """

    kind: ClassVar[str] = "set_feature"
    fields: ClassVar[tuple[str, ...]] = ("sae", "value", *COMMON)

    sae: Any
    index: Any = None
    value: Any = 0.0
    _: KW_ONLY
    site: str = ""

    def __post_init__(self) -> None:
        self._place_features()

    @property
    def changes(self) -> tuple[tuple[float, float], ...]:
        return tuple((value, -1.0) for value in self.value)


@dataclass(frozen=True)
class ScaleFeature(_FeatureEdit):
    """Scale features of an SAE in the row: `x + (factor - 1) * f * decoder`.

    Args:
        factor: 0 removes the feature, 1 changes nothing; or a list with one for each.
        sae, index, site, layer, tokens, gate: as for `SetFeature`.
    """

    kind: ClassVar[str] = "scale_feature"
    fields: ClassVar[tuple[str, ...]] = ("sae", "factor", *COMMON)

    sae: Any
    index: Any = None
    factor: Any = 0.0
    _: KW_ONLY
    site: str = ""

    def __post_init__(self) -> None:
        self._place_features()

    @property
    def changes(self) -> tuple[tuple[float, float], ...]:
        return tuple((0.0, factor - 1) for factor in self.factor)
