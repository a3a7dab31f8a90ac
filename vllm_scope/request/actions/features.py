"""Actions that change features of a sparse autoencoder in a row.

Owns:  SetFeature, ScaleFeature, FeatureRows (the encoder and decoder rows that these edits need).
To:    resolve_edits.

Let f be the feature's activation in the row x, and D the feature's row of the decoder:

    SetFeature    x + (value - f) * D, or x + value * D with `add`
    ScaleFeature  x + (factor - 1) * f * D

With `only_if_active`, SetFeature does not set a feature whose activation f is 0. Only the named
features change: the rest of the row, also the part that the SAE does not reconstruct, stays the
same. All features of one action are computed from the same row x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import checked_name, feature_numbers, held, number, sae_rows
from vllm_scope.request.actions.edits import COMMON, Edit
from vllm_scope.request.arrays import Array
from vllm_scope.request.sites import MODEL_SITES, canonical_site

#: The largest number of features of one edit.
MAX_FEATURES = 16


@dataclass(frozen=True)
class FeatureRows:
    """The parts of an SAE with which one edit computes and changes features.

    For a row x, a feature is f = s if s > threshold, else 0, where s = x . encoder + bias.

    Args:
        encoder, decoder: arrays [num_features, width of a row].
        bias: the bias of each feature. All constants of the SAE are already added to the bias.
        threshold: the threshold of each feature, 0 or above.

    Raises:
        SpecError: the shapes do not fit together, there are more than MAX_FEATURES features, a
            number is not finite, or a threshold is below 0.
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
                    f"sae.{name} has shape {found.shape}; it must be [num_features, width of a "
                    f"row], of at most {MAX_FEATURES} features."
                )
            object.__setattr__(self, name, found)
        if self.encoder.shape != self.decoder.shape:
            raise SpecError(
                f"sae.encoder has shape {self.encoder.shape} and sae.decoder "
                f"{self.decoder.shape}; they must be equal."
            )
        for name in ("bias", "threshold"):
            numbers = _numbers(getattr(self, name), self.count, f"sae.{name}")
            object.__setattr__(self, name, numbers)
        if min(self.threshold) < 0:
            raise SpecError(f"sae.threshold has {min(self.threshold):g}; it must be 0 or more.")

    @property
    def count(self) -> int:
        return int(self.encoder.shape[0])

    @staticmethod
    def of(sae: Any, index: object, where: str) -> FeatureRows:
        """The encoder and decoder rows of some features of a loaded Sae.

        Raises:
            SpecError: the SAE does not have one of the features, or the SAE is a transcoder or a
                TopK SAE. (Whether a feature of a TopK SAE is active depends on all features.)
        """
        indices = _indices(index, where)
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
        """Parse a JSON object with the four fields. A FeatureRows is returned without changes."""
        allowed = "an SAE that vllm_scope.saes loaded; in JSON, an object with"
        return sae_rows(FeatureRows, value, where, allowed)

    def to_json(self) -> dict[str, object]:
        return {
            "encoder": self.encoder.to_json(), "decoder": self.decoder.to_json(),
            "bias": list(self.bias), "threshold": list(self.threshold),
        }  # fmt: skip


def _indices(index: object, where: str) -> tuple[int, ...]:
    limit = f"an edit has 1 to {MAX_FEATURES}. Send several edits."
    return feature_numbers(index, where, MAX_FEATURES, limit)


def _each(value: object, count: int) -> list[object]:
    """The items of a list or an array. Any other value is repeated for all `count` features."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else [value] * count


def _numbers(value: object, count: int, where: str) -> tuple[float, ...]:
    """One number for each feature."""
    given = _each(value, count)
    if len(given) != count:
        raise SpecError(f"{where} has {len(given)} numbers for {count} features.")
    return tuple(number(one, where) for one in given)


def _flags(value: object, count: int, where: str) -> tuple[bool, ...]:
    """One bool for each feature."""
    given = _each(value, count)
    flags = tuple(one for one in given if isinstance(one, bool))
    if not len(given) == len(flags) == count:
        raise SpecError(
            f"{where} is {shown(value)}; it must be true or false, or a list with one for each of "
            f"the {count} features."
        )
    return flags


@dataclass(frozen=True)
class _FeatureEdit(Edit):
    """The base class of SetFeature and ScaleFeature.

    `fields[2]` is the name of the field with one number for each feature. If `sae` is a name,
    `of_engine` makes a new edit with the rows of the SAE. The checks that need the SAE are made at
    that time.
    """

    sae: Any
    index: Any = None
    #: If `site` is empty, the SAE's own site is used. For FeatureRows, `resid_post` is used.
    site: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        kind, name = type(self).__name__, self.fields[2]
        rows = self.sae
        if isinstance(rows, str):
            self._place_named()
            return
        if hasattr(rows, "feature"):  # an Sae
            self._set(site=self._given("site", rows.place.site))
            if self._given_layers() is None and self.site not in MODEL_SITES:
                self._set(layer=rows.place.layer)
            rows = FeatureRows.of(rows, self.index, f"{kind}.index")
        elif self.index is not None:
            raise SpecError(
                f"{kind}.index is {shown(self.index)}, and {kind}.sae is not an SAE that was "
                "loaded; give a loaded SAE, or the features' rows without an index."
            )
        rows = FeatureRows.parse(rows, f"{kind}.sae")
        self._set(site=self._given("site", "resid_post"))
        self._set(sae=rows, index=None)
        self._set(**{name: _numbers(getattr(self, name), rows.count, f"{kind}.{name}")})
        self._set_flags(rows.count)
        self._place_edit()
        if self.dose is not None and rows.count > 1:
            raise SpecError(
                f"{kind}.dose is {shown(self.dose)}, and there are {rows.count} features; a dose "
                "needs one feature. Leave the dose out, or send one edit for each feature."
            )

    def _place_named(self) -> None:
        kind, name = type(self).__name__, self.fields[2]
        checked_name(self.sae, f"{kind}.sae")
        site, given = self.site, self._given_layers()
        indices = _indices(self.index, f"{kind}.index")
        numbers = _numbers(getattr(self, name), len(indices), f"{kind}.{name}")
        self._set(index=indices, **{name: numbers})
        self._set_flags(len(indices))
        # `_place_edit` needs a site and a layer. If the caller did not give one of them, it is set
        # for this call, and then reset.
        self._set(site=canonical_site(self._given("site", "resid_post"), f"{kind}.site"))
        if given is None and self.site not in MODEL_SITES:
            self._set(layer=0)
        self._place_edit()
        if given is None:
            self._set(layer=None, layers=None)
        self._set(site=site and self.site)

    def _set_flags(self, count: int) -> None:
        """Check and set the fields that are true or false for each feature."""

    @property
    def num_named(self) -> int:
        return len(self.index) if isinstance(self.sae, str) else 0

    def of_engine(self, saes: Mapping[str, Any]) -> Edit:
        if not isinstance(self.sae, str):
            return self
        sae = held(self.sae, saes, f"{type(self).__name__}.sae", "SAE", "saes")
        return replace(self, sae=sae)

    @property
    def changes(self) -> tuple[tuple[float, float, bool], ...]:
        """The numbers (a, d, active) of each feature. For a feature with the activation f, the edit
        adds (a + d * f) times the decoder's row. If `active` is True and f is 0, the edit adds
        nothing."""
        raise NotImplementedError


@dataclass(frozen=True)
class SetFeature(_FeatureEdit):
    """Set features of an SAE in the row: `x + (value - f) * decoder`.

    Args:
        sae: a `vllm_scope.saes.sae.Sae`, the name of an engine's SAE, or FeatureRows. A transcoder
            and a TopK SAE are refused.
        index: the feature's number, or a list of at most 16 numbers. None for FeatureRows.
        value: the new activation of the feature, or a list of activations, one for each feature.
        add: if True, `value` is added to the activation. `add` can also be a list of bools, one for
            each feature.
        only_if_active: if True, a feature whose activation is 0 is not changed. It can also be a
            list of bools, one for each feature.
        site, layer: the `Place` of the edit. The default is the SAE's own `Place`.
        tokens, gate, dose: the same arguments as in `Add`. An edit with a dose must have exactly
            one feature.

    Raises:
        SpecError: a wrong type or shape, or a feature that the SAE does not have.
    """

    kind: ClassVar[str] = "set_feature"
    fields: ClassVar[tuple[str, ...]] = (
        "sae", "index", "value", "add", "only_if_active", *COMMON,
    )  # fmt: skip

    value: Any = 0.0
    _: KW_ONLY
    add: Any = False
    only_if_active: Any = False

    def _set_flags(self, count: int) -> None:
        for name in ("add", "only_if_active"):
            self._set(**{name: _flags(getattr(self, name), count, f"SetFeature.{name}")})

    @property
    def changes(self) -> tuple[tuple[float, float, bool], ...]:
        each = zip(self.value, self.add, self.only_if_active, strict=True)
        return tuple((value, 0.0 if add else -1.0, active) for value, add, active in each)


@dataclass(frozen=True)
class ScaleFeature(_FeatureEdit):
    """Scale features of an SAE in the row: `x + (factor - 1) * f * decoder`.

    Args:
        factor: a number, or a list with one factor for each feature. 0 removes the feature.
        sae, index, site, layer, tokens, gate, dose: the same arguments as in `SetFeature`.
    """

    kind: ClassVar[str] = "scale_feature"
    fields: ClassVar[tuple[str, ...]] = ("sae", "index", "factor", *COMMON)

    factor: Any = 0.0

    @property
    def changes(self) -> tuple[tuple[float, float, bool], ...]:
        return tuple((0.0, factor - 1, False) for factor in self.factor)
