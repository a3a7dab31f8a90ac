"""The action that delivers features of a sparse autoencoder (SAE): their indices and values.

Owns:  Features, EncoderRows (rows of an encoder that the request contains), HeldSae (an SAE of the
       engine).
To:    resolve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from vllm_scope.errors import SpecError, checked_count, shown
from vllm_scope.request.actions.base import (
    MEMORY,
    Action,
    checked_name,
    feature_numbers,
    held,
    number,
    sae_rows,
)
from vllm_scope.request.arrays import Array
from vllm_scope.request.sites import MODEL_SITES, canonical_site

DEFAULT_TOP_K, MAX_TOP_K = 32, 1024
#: The largest number of `indices` of one request. The JSON of the indices has about 1 KiB, but the
#: encoder rows that they select can have 4 MiB.
MAX_INDICES = 256


@dataclass(frozen=True)
class HeldSae:
    """An SAE whose encoder the workers have loaded.

    Attributes:
        num_features: number of features of the SAE.
        width: number of elements of a row.
        k: for a TopK SAE, the largest number of features that are active in a row. Otherwise None.
    """

    name: str
    num_features: int
    width: int
    k: int | None


@dataclass(frozen=True)
class EncoderRows:
    """The parts of an SAE with which one action computes features.

    For a row x, a feature is f = s if s > threshold, else 0, where s = x . encoder + bias.

    Args:
        encoder: an array [num_features, width of a row].
        bias: the bias of each feature. All constants of the SAE are already added to the bias.
        threshold: the threshold of each feature, 0 or above.

    Raises:
        SpecError: the shapes do not fit together, there are more than MAX_INDICES features, a
            number is not finite, or a threshold is below 0.
    """

    encoder: Any
    bias: Any
    threshold: Any

    def __post_init__(self) -> None:
        found = Array.parse(self.encoder, "sae.encoder")
        if len(found.shape) != 2 or not 1 <= found.shape[0] <= MAX_INDICES:
            raise SpecError(
                f"sae.encoder has shape {found.shape}; it must be [num_features, width of a row], "
                f"of at most {MAX_INDICES} features."
            )
        object.__setattr__(self, "encoder", found)
        for name in ("bias", "threshold"):
            one = Array.parse(getattr(self, name), f"sae.{name}")
            if one.shape != found.shape[:1]:
                raise SpecError(
                    f"sae.{name} has shape {one.shape} for {found.shape[0]} features; it must be "
                    "[num_features]."
                )
            object.__setattr__(self, name, one)
        if self.threshold.numpy.min() < 0:
            raise SpecError("sae.threshold has a number below 0; it must be 0 or above.")

    @staticmethod
    def of(sae: Any, indices: tuple[int, ...]) -> EncoderRows:
        """The encoder rows of some features of a loaded Sae.

        Raises:
            SpecError: the SAE does not have one of the features, or the SAE is a TopK SAE.
        """
        if sae.k is not None:
            raise SpecError(
                f"{sae.name} is a TopK SAE: whether a feature is active depends on all others. "
                "Name the SAE in additional_config={'scope': {'saes': ...}}."
            )
        folded = sae.fold(indices)
        bias = folded.bias.float().numpy()
        threshold = None if folded.threshold is None else folded.threshold.float().numpy()
        return EncoderRows(
            folded.encoder.float().numpy(),
            bias,
            np.zeros_like(bias) if threshold is None else threshold,
        )

    @staticmethod
    def parse(value: object, where: str) -> EncoderRows:
        """Parse a JSON object with the three fields. An EncoderRows is returned without changes."""
        allowed = "the name of an SAE that the engine holds, an SAE that vllm_scope.saes loaded, "
        return sae_rows(EncoderRows, value, where, f"{allowed}or in JSON an object with")

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name).to_json() for name in ("encoder", "bias", "threshold")}


@dataclass(frozen=True)
class Features(Action):
    """Deliver the features that an SAE computes from each token's row, on the device.

    Args:
        sae: the name of an SAE of the engine. If `indices` is given, `sae` can also be a
            `vllm_scope.saes.sae.Sae`. The request then contains the encoder rows of these features.
        top_k: the number of strongest features to deliver for each token, at most 1,024. The
            default is 32 if `indices` is None.
        indices: the numbers of the features to deliver, in place of `top_k`. All Features of a
            request have at most 256 indices together.
        threshold: values below this number are left out. Inactive features are always left out.
        name: the name of the features in the result. The default is the SAE's name.
        site, layer: the `Place` of the rows. A named SAE accepts only its own `Place`, which is the
            default.
        tokens: a selector of the tokens.
        to: "memory", or a sink that accepts scores.

    Raises:
        SpecError: a wrong type, several layers, both `top_k` and `indices`, or `top_k` for an SAE
            that is not given by its name.
    """

    kind: ClassVar[str] = "features"
    fields: ClassVar[tuple[str, ...]] = ("sae", "top_k", "indices", "threshold", "name", "to")

    sae: Any
    _: KW_ONLY
    #: If `site` is empty, the SAE's own site is used. For EncoderRows, `resid_post` is used.
    site: str = field(default="", kw_only=True)
    top_k: int | None = None
    indices: Any = None
    threshold: float | None = None
    name: str = ""
    to: str = MEMORY

    def __post_init__(self) -> None:
        self._check_choice()
        checked_name(self.to, "Features.to")
        if self.threshold is not None:
            self._set(threshold=number(self.threshold, "Features.threshold"))
        if isinstance(self.sae, str):
            checked_name(self.sae, "Features.sae")
            self._set(name=self._given("name", self.sae))
            self._place_named()
        elif not isinstance(self.sae, HeldSae):
            self._take_rows()
        checked_name(self.name, "Features.name")
        if not isinstance(self.sae, str):
            self._place_one()

    def _check_choice(self) -> None:
        """Check and set `top_k` or `indices`."""
        if self.indices is None:
            top_k = DEFAULT_TOP_K if self.top_k is None else self.top_k
            self._set(top_k=checked_count(top_k, MAX_TOP_K, "Features.top_k"))
            return
        if self.top_k is not None:
            raise SpecError("Features has top_k and indices; give one of them.")
        limit = f"it has 1 to {MAX_INDICES}, of all Features of a request together."
        self._set(indices=feature_numbers(self.indices, "Features.indices", MAX_INDICES, limit))

    def _take_rows(self) -> None:
        """Replace an Sae object, or the JSON of EncoderRows, by EncoderRows."""
        if self.indices is None:
            raise SpecError(
                f"Features.sae is {shown(self.sae)}, and top_k needs a whole encoder on the "
                "device; name an SAE of additional_config={'scope': {'saes': ...}}, or give "
                "indices."
            )
        rows = self.sae
        if hasattr(rows, "fold"):  # an Sae
            self._set(
                site=self._given("site", rows.place.site), name=self._given("name", rows.name)
            )
            if self._given_layers() is None and self.site not in MODEL_SITES:
                self._set(layer=rows.place.layer)
            rows = EncoderRows.of(rows, self.indices)
        rows = EncoderRows.parse(rows, "Features.sae")
        if rows.encoder.shape[0] != len(self.indices):
            raise SpecError(
                f"Features.sae has {rows.encoder.shape[0]} rows for {len(self.indices)} indices; "
                "give one row for each."
            )
        self._set(sae=rows, site=self._given("site", "resid_post"))

    def _place_named(self) -> None:
        """Check the site and the layer. If the caller gave none, the fields stay empty, and
        `of_engine` sets them to the SAE's `Place`."""
        site, given = self.site, self._given_layers()
        self._set(site=canonical_site(self._given("site", "resid_post"), "Features.site"))
        if given is None and self.site not in MODEL_SITES:
            self._set(layer=0)
        self._place_one()
        if given is None and site not in MODEL_SITES:
            self._set(layer=None, layers=None)
        self._set(site=site and self.site)

    def _place_one(self) -> None:
        given = self._given_layers()
        self._place()
        if self.layer_numbers is None or len(self.layer_numbers) != 1:
            raise SpecError(
                f"Features.layers is {shown(given)}; it must be one layer. Send one Features for "
                "each layer."
            )

    def of_engine(self, saes: Mapping[str, Any]) -> Features:
        """If the action names an SAE of the engine, returns an action with the SAE's encoder rows
        (EncoderRows) or sizes (HeldSae) in place of the name. Otherwise returns the action itself.

        Args:
            saes: the SAEs that the engine has loaded, by name.

        Raises:
            SpecError: an unknown name or feature, or a site or layer that differs from the site or
                layer of the SAE.
        """
        if not isinstance(self.sae, str):
            return self
        sae = held(self.sae, saes, "Features.sae", "SAE", "saes")
        site, layer = sae.place
        for name, asked, own in (("site", self.site, site), ("layers", self.layer, layer)):
            if asked not in ("", None, own):
                raise SpecError(
                    f"Features.{name} is {shown(asked)}; the SAE {shown(self.sae)} is of {site!r} "
                    f"{layer}. Leave site and layer out, or name another SAE."
                )
        if self.top_k is not None and self.top_k > sae.d_sae:
            raise SpecError(
                f"Features.top_k is {self.top_k}; the SAE {shown(self.sae)} has {sae.d_sae:,} "
                "features."
            )
        if self.indices is not None and max(self.indices) >= sae.d_sae:
            raise SpecError(
                f"Features.indices has {max(self.indices)}; the SAE {shown(self.sae)} has features "
                f"0 to {sae.d_sae - 1:,}."
            )
        found: EncoderRows | HeldSae
        if self.indices is not None and sae.k is None:
            found = EncoderRows.of(sae, self.indices)
        else:
            found = HeldSae(self.sae, sae.d_sae, sae.d_model, sae.k)
        return replace(self, sae=found, site=site, layer=layer, layers=None)
