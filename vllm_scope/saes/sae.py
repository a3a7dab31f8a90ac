"""A sparse autoencoder: its weights, its computation, and its single features.

Owns:  Sae, Feature, Folded.
Runs:  on the CPU, in float32, anywhere with torch.
From:  load.py. To: probes, edits and heads.

Promise: `encoder` and `decoder` can be views of a file that is mapped into memory. A call reads
only the matrix rows that it needs, and checks these rows.

These formulas give feature j of a row x for each architecture, and the decoded row. W_j is row j of
`encoder`, D_j is row j of `decoder`, and b_j is number j of `encoder_bias`.

    pre_j     = (input_scale x - b_dec) . W_j + b_j      without b_dec if not apply_b_dec_to_input
    standard    relu(pre_j)
    jumprelu    pre_j if pre_j > threshold_j and pre_j > 0; else 0
    batchtopk   pre_j if pre_j > threshold_j and pre_j > 0; else 0
    topk        relu(pre_j) if pre_j is among the k largest of the row; else 0
    gated       relu(exp(gain_j) (pre_j - b_j) + b_j) if pre_j - b_j + gate_bias_j > 0; else 0
    decoded x = (sum_j feature_j D_j + b_dec) / input_scale

If `unit_decoder` is True, pre_j is multiplied by the length of D_j, and D_j is divided by this
length.

A transcoder encodes the row x of one place, and decodes to the row y of another place:

    y         = sum_j feature_j D_j + b_dec + skip x      without the last term if there is no skip
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import Place

Architecture = Literal["standard", "jumprelu", "topk", "batchtopk", "gated"]
#: The function that computes a feature from its pre-activation s. For "relu", the feature is max(s,
#: 0). For "jumprelu", the feature is s if s is above the threshold, else 0. For "topk", the feature
#: is max(s, 0) if s is among the row's k largest pre-activations, else 0.
Kind = Literal["relu", "jumprelu", "topk"]

#: The additional fields that each architecture needs. An SAE must not have additional fields that
#: its architecture does not need.
_NEEDS: Final[dict[str, set[str]]] = {
    "standard": set(),
    "jumprelu": {"threshold"},
    "batchtopk": {"threshold"},
    "topk": {"k"},
    "gated": {"gate_bias", "gain"},
}
#: The largest number of matrix elements that are in memory as float32 at the same time.
_NUMBERS_AT_ONCE: Final = 1 << 24
#: The least length of a decoder row, as in SAELens. A smaller length counts as this length.
_LEAST_NORM: Final = 1e-8

_CPU: Final = torch.device("cpu")

Pick = slice | Tensor


@dataclass(frozen=True, eq=False)
class Feature:
    """One feature as a function of the row x. The pre-activation is s = x . encoder + encoder_bias.
    `kind` names the function that computes the feature from s.

    To change the feature of a row from `old` to `new`, add (new - old) * decoder to the row.

    Attributes:
        encoder, decoder: float32 [d_model], on the CPU.
        encoder_bias: the bias of s, which includes `b_dec` and all other constants.
        threshold: a number of at least 0 if `kind` is "jumprelu"; else None.
    """

    encoder: Tensor
    encoder_bias: float
    decoder: Tensor
    threshold: float | None
    kind: Kind


class Folded(NamedTuple):
    """Encoders of several features. The pre-activations of a row x are s = x . encoder + bias. All
    tensors are float64.

    Attributes:
        encoder: [n, d_model].
        bias: [n].
        threshold: [n]. None if the kind of the features is not "jumprelu".
    """

    encoder: Tensor
    bias: Tensor
    threshold: Tensor | None


@dataclass(frozen=True, eq=False)
class Sae:
    """A sparse autoencoder of the rows of one place.

    Attributes:
        name: the SAE's name in messages.
        place: the place whose rows the SAE encodes. At the site `z`, a row is one vector with the
            values of all heads. d_model is then the number of heads times the size of a head.
        encoder: [d_sae, d_model] of a float dtype, on the CPU. The tensor can be a view of a mapped
            file.
        decoder: [d_sae, d_out] of a float dtype, on the CPU. The tensor can be a view of a mapped
            file. d_out is the width of a decoded row, which differs from d_model only in some
            transcoders.
        encoder_bias: [d_sae]. In a gated SAE, `encoder_bias` is the bias of the magnitude (see
            `gain`).
        decoder_bias: [d_out], `b_dec`.
        apply_b_dec_to_input: True if `b_dec` is subtracted from the row before the encoder.
        threshold: [d_sae], for jumprelu and batchtopk.
        k: for topk, the number of features that are kept for each row.
        gate_bias, gain: [d_sae], for gated SAEs. The gate decides whether a feature is active. The
            magnitude is the value of an active feature. The weights of the gate are `encoder`, and
            the weights of the magnitude are exp(gain) times these weights.
        input_scale: the factor by which rows are multiplied before the encoder.
        unit_decoder: True if a pre-activation is multiplied by the length of its feature's decoder
            row, and this decoder row is divided by its length.
        output: the place of the rows to which a transcoder decodes. None if the SAE is not a
            transcoder.
        skip: [d_out, d_model], the skip matrix of a transcoder. None if there is no skip matrix.

    All tensors except `encoder`, `decoder` and `skip` are copied as float32.

    Raises:
        SpecError: shapes disagree, a vector is not finite, or the fields do not fit the
            architecture.
    """

    name: str
    architecture: Architecture
    place: Place
    encoder: Tensor
    decoder: Tensor
    encoder_bias: Tensor
    decoder_bias: Tensor
    apply_b_dec_to_input: bool = True
    threshold: Tensor | None = None
    k: int | None = None
    gate_bias: Tensor | None = None
    gain: Tensor | None = None
    input_scale: float = 1.0
    unit_decoder: bool = False
    output: Place | None = None
    skip: Tensor | None = None

    def __post_init__(self) -> None:
        if self.architecture not in _NEEDS:
            raise self._wrong(
                f"architecture is {shown(self.architecture)}; it must be one of "
                f"{', '.join(get_args(Architecture))}"
            )
        given = {name for name in set().union(*_NEEDS.values()) if getattr(self, name) is not None}
        needed = _NEEDS[self.architecture]
        if given != needed:
            raise self._wrong(
                f"besides weights and biases, a {self.architecture} SAE must have "
                f"{', '.join(sorted(needed)) or 'no fields'}; this SAE has "
                f"{', '.join(sorted(given)) or 'no fields'}"
            )
        self._check_matrices()
        sizes = {"encoder_bias": self.d_sae, "decoder_bias": self.decoder.shape[1]}
        sizes |= dict.fromkeys(needed - {"k"}, self.d_sae)
        for name, size in sizes.items():
            object.__setattr__(self, name, self._vector(name, size))
        if self.k is not None and (type(self.k) is not int or not 1 <= self.k <= self.d_sae):
            raise self._wrong(f"k is {shown(self.k)}; it must be a number from 1 to {self.d_sae:,}")
        if self.architecture == "gated" and self.unit_decoder:
            raise self._wrong("unit_decoder must be False for a gated SAE")
        scale = self.input_scale
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < 1e30:
            raise self._wrong(f"input_scale is {shown(scale)}; it must be a finite number above 0")

    def __repr__(self) -> str:
        kind = self.architecture if self.k is None else f"{self.architecture}, k {self.k}"
        to = "" if self.output is None else f" to {self.output.site} {self.output.layer}"
        place = f"{self.place.site} {self.place.layer}{to}"
        return f"<Sae {self.name!r}: {self.d_sae:,} features of {place}, {kind}>"

    @property
    def d_sae(self) -> int:
        """The number of features."""
        return self.encoder.shape[0]

    @property
    def d_model(self) -> int:
        """The width of a row."""
        return self.encoder.shape[1]

    @torch.no_grad()
    def encode(self, x: Tensor, indices: Sequence[int] | Tensor | None = None) -> Tensor:
        """Compute the features of rows.

        Args:
            x: [..., d_model], in any float dtype, on the CPU.
            indices: the features to return, in this order. If None, all features are returned. A
                topk SAE always computes all features, because only then can it choose the k largest
                features.

        Returns:
            [..., d_sae] or [..., len(indices)], float32.

        Raises:
            SpecError: a shape is wrong, an index is out of range, or weights are not finite.
        """
        x = self._checked(x, self.d_model, "x")
        if self.input_scale != 1:
            x = x * self.input_scale
        if self.apply_b_dec_to_input:
            x = x - self.decoder_bias
        picks = list(self._picks(None if indices is None else self._indices(indices)))
        if self.architecture != "topk":
            return torch.cat([self._active(x, pick) for pick in picks], -1)
        assert self.k is not None
        pre = torch.cat([self._pre(x, pick) for pick in self._picks(None)], -1)
        best = pre.topk(self.k, dim=-1)
        chosen = torch.zeros_like(pre).scatter(-1, best.indices, best.values.relu())
        return torch.cat([chosen[..., pick] for pick in picks], -1)

    @torch.no_grad()
    def decode(self, features: Tensor, x: Tensor | None = None) -> Tensor:
        """Decode features to rows. The rows include `b_dec`. A transcoder decodes to rows of its
        `output`.

        Args:
            features: [..., d_sae], in any float dtype, on the CPU.
            x: [..., d_model], the rows that were encoded, if there is a skip matrix. Otherwise
                None.

        Returns:
            [..., d_out], float32.

        Raises:
            SpecError: a shape is wrong, weights are not finite, `x` is missing although there is a
                skip matrix, or `x` is given although there is no skip matrix.
        """
        features = self._checked(features, self.d_sae, "features")
        if (x is None) != (self.skip is None):
            raise self._wrong(
                "decode needs x, the rows that were encoded, if the SAE has a skip matrix, and "
                "refuses x otherwise"
            )
        rows = self.decoder_bias
        for pick in self._picks(None):
            weight = self._read("decoder", pick)
            part = features[..., pick]
            rows = rows + (part / _norms(weight) if self.unit_decoder else part) @ weight
        rows = rows.expand(*features.shape[:-1], -1)
        if x is not None:
            rows = rows + self.skipped(x)
        return rows / self.input_scale if self.output is None else rows

    @torch.no_grad()
    def skipped(self, x: Tensor) -> Tensor:
        """The product of the skip matrix with the encoded rows x, float32 [..., d_out]. The SAE
        must have a skip matrix.

        Raises:
            SpecError: the shape of `x` is wrong, or the skip matrix is not finite.
        """
        return self._checked(x, self.d_model, "x") @ self._read("skip", slice(None)).T

    @torch.no_grad()
    def feature(self, index: int) -> Feature:
        """The feature with this index. Reads only one row of each matrix.

        Raises:
            SpecError: the index is out of range, weights are not finite, or the SAE is a
                transcoder.
        """
        if self.output is not None:
            raise self._wrong(
                f"it is a transcoder from {tuple(self.place)} to {tuple(self.output)}, and its "
                "features cannot be set or scaled in the input row; use Features to read features"
            )
        pick = self._indices([index])
        folded = self._folded(pick)
        decoder = self._read("decoder", pick)[0].double()
        back = self.input_scale * (float(_norms(decoder)) if self.unit_decoder else 1.0)
        kind: Kind = "topk" if self.architecture == "topk" else "relu"
        return Feature(
            encoder=folded.encoder[0].float(),
            encoder_bias=float(folded.bias[0]),
            decoder=(decoder / back).float(),
            threshold=None if folded.threshold is None else float(folded.threshold[0]),
            kind=kind if folded.threshold is None else "jumprelu",
        )

    @torch.no_grad()
    def folded(self, device: torch.device = _CPU) -> Iterator[Folded]:
        """Yield the encoders of all features in order, in parts that fit in memory.

        Raises:
            SpecError: weights are not finite.
        """
        for pick in self._picks(None):
            yield self._folded(pick, device)

    @torch.no_grad()
    def fold(self, indices: Sequence[int]) -> Folded:
        """The encoders of the features with these indices. Reads only the matrix rows of these
        features.

        Raises:
            SpecError: an index is out of range, or weights are not finite.
        """
        return self._folded(self._indices(indices))

    def _folded(self, pick: Pick, device: torch.device = _CPU) -> Folded:
        def exact(vector: Tensor) -> Tensor:
            return vector[pick].to(device).double()

        # Compute in float64. The only error that counts is then the rounding of the result to
        # float32.
        encoder, bias = self._read("encoder", pick, device).double(), exact(self.encoder_bias)
        threshold = None if self.threshold is None else exact(self.threshold)
        factor = torch.ones_like(bias)
        if self.gate_bias is not None and self.gain is not None:
            factor = exact(self.gain).exp()
            # The condition of the gate is pre - b + gate_bias > 0. Here it becomes a threshold of
            # the magnitude exp(gain) (pre - b) + b.
            threshold = bias - factor * exact(self.gate_bias)
        elif self.unit_decoder:
            factor = _norms(self._read("decoder", pick, device).double())
            bias = factor * bias
        if self.apply_b_dec_to_input:
            bias = bias - factor * (encoder @ self.decoder_bias.to(device).double())
        # Values of features are never negative, so a threshold below 0 means the same as 0.
        threshold = None if threshold is None else threshold.clamp(min=0)
        return Folded(encoder * (factor * self.input_scale)[:, None], bias, threshold)

    def _active(self, x: Tensor, pick: Pick) -> Tensor:
        """Compute the features `pick`, for any architecture except topk. The rows of `x` are
        already scaled. If the SAE subtracts `b_dec` from rows, it is already subtracted from
        `x`."""
        pre = self._pre(x, pick)
        if self.gate_bias is not None and self.gain is not None:
            magnitude = pre * self.gain[pick].exp() + self.encoder_bias[pick]
            return magnitude.relu() * (pre + self.gate_bias[pick] > 0)
        active = pre.relu()
        return active if self.threshold is None else active * (pre > self.threshold[pick])

    def _pre(self, x: Tensor, pick: Pick) -> Tensor:
        """The pre-activations of the features `pick`. For a gated SAE, no bias is added."""
        pre = x @ self._read("encoder", pick).T
        if self.architecture == "gated":
            return pre
        pre = pre + self.encoder_bias[pick]
        return pre * _norms(self._read("decoder", pick)) if self.unit_decoder else pre

    def _read(
        self, which: Literal["encoder", "decoder", "skip"], pick: Pick, device: torch.device = _CPU
    ) -> Tensor:
        """The rows `pick` of a matrix, as float32."""
        matrix: Tensor = getattr(self, which)
        rows = matrix[pick].to(device).float()
        if not rows.isfinite().all():
            raise self._wrong(f"the {which} has a number that is not finite in float32")
        return rows

    def _picks(self, indices: Tensor | None) -> Iterator[Pick]:
        """Yield `indices` (None means all) in parts. The matrix rows of one part fit in memory."""
        size = max(1, _NUMBERS_AT_ONCE // self.d_model)
        if indices is not None:
            yield from indices.split(size)
            return
        for start in range(0, self.d_sae, size):
            yield slice(start, start + size)

    def _indices(self, indices: Sequence[int] | Tensor) -> Tensor:
        found = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        for index in found if isinstance(found, list) else [found]:
            if type(index) is not int or not 0 <= index < self.d_sae:
                raise self._wrong(
                    f"the index of a feature is {shown(index)}; this SAE has features 0 to "
                    f"{self.d_sae - 1:,}"
                )
        return torch.tensor(found, dtype=torch.int64).reshape(-1)

    def _checked(self, x: Tensor, size: int, name: str) -> Tensor:
        if x.ndim < 1 or x.shape[-1] != size or not x.is_floating_point():
            raise self._wrong(
                f"{name} is {x.dtype} {list(x.shape)}; it must be floats, [..., {size}]"
            )
        return x.float()

    def _check_matrices(self) -> None:
        for name in ("encoder", "decoder", *(() if self.skip is None else ("skip",))):
            matrix: Tensor = getattr(self, name)
            if matrix.ndim != 2 or not matrix.numel() or not matrix.is_floating_point():
                raise self._wrong(
                    f"the {name} is {matrix.dtype} {list(matrix.shape)}; it must be a matrix of "
                    f"floats, {'[d_out, d_model]' if name == 'skip' else '[d_sae, d_model]'}"
                )
        if self.output is not None:
            self._check_transcoder()
        elif self.skip is not None:
            raise self._wrong(
                "the SAE has a skip matrix, but no output; only a transcoder has a skip matrix"
            )
        elif self.encoder.shape != self.decoder.shape:
            raise self._wrong(
                f"the encoder is {list(self.encoder.shape)} and the decoder "
                f"{list(self.decoder.shape)}; both must be [d_sae, d_model]"
            )

    def _check_transcoder(self) -> None:
        if self.apply_b_dec_to_input:
            raise self._wrong(
                "a transcoder's b_dec is added to its output, and not subtracted from its input"
            )
        if len(self.encoder) != len(self.decoder):
            raise self._wrong(
                f"the encoder has {len(self.encoder)} features, and the decoder has "
                f"{len(self.decoder)}; both must have the same features"
            )
        shape = [self.decoder.shape[1], self.d_model]
        if self.skip is not None and list(self.skip.shape) != shape:
            raise self._wrong(
                f"the skip is {list(self.skip.shape)}; it must be [d_out, d_model], {shape}"
            )

    def _vector(self, name: str, size: int) -> Tensor:
        vector: Tensor = getattr(self, name)
        if list(vector.shape) != [size] or not vector.is_floating_point():
            raise self._wrong(
                f"the {name} is {vector.dtype} {list(vector.shape)}; it must be floats, [{size}]"
            )
        # The vector is copied, because the file can be closed later.
        vector = vector.to(torch.float32, copy=True)
        if not vector.isfinite().all():
            raise self._wrong(f"the {name} has a number that is not finite in float32")
        return vector

    def _wrong(self, what: str) -> SpecError:
        return SpecError(f"the SAE {shown(self.name)}: {what}.")


def _norms(rows: Tensor) -> Tensor:
    """The lengths of the rows on the last axis, at least `_LEAST_NORM`."""
    norms: Tensor = rows.norm(dim=-1)
    return norms.clamp(min=_LEAST_NORM)
