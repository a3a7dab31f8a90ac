"""The SAEs that a worker holds. Computes the strongest features of many rows together.

Owns:  DeviceSae (the encoder of one SAE on the device), `hold_saes`, and PairMaker (the protocol of
       DeviceSae and DeviceLens).
Runs:  in workers that have a drain. SAEs are loaded when the worker starts. The drain thread
       computes features. On a GPU, the drain thread does this only for deferred steps
       (worker.filler). For the other steps, the worker's thread enqueues the computation on the
       drain's stream.
From:  saes.sae.   To: packer.

Promise: the host never waits for the device. Products of rows and weights need about 2 * MOST_BYTES
of device memory, or less. If weights are in float8, the products need UNPACKED_BYTES more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from vllm_scope.codecs.scaled import Fp8
from vllm_scope.errors import ConfigError, shown
from vllm_scope.program.layout import SLOT_BYTES, slots_of_row
from vllm_scope.request.heads import LensKey
from vllm_scope.saes.sae import Sae

#: The products of one launch have at most this many bytes. For an SAE of 65,536 features, one
#: launch computes the products of up to 1,024 rows. For 768 rows, the products took 1.5 ms in two
#: launches, and 0.95 ms in one launch (H100).
MOST_BYTES = 256 << 20
#: If weights are in float8, at most this many bytes of weights are unpacked at a time.
UNPACKED_BYTES = 32 << 20
FP8 = torch.float8_e4m3fn
#: The number of features in a group. The k strongest features are always in the k groups with the
#: largest maxima. Therefore only the features of these groups are sorted.
GROUP = 64


def num_bytes(sae: Sae, dtype: torch.dtype) -> int:
    """The number of bytes of an SAE's encoder, if the weights have this dtype. For FP8, this number
    includes the scales."""
    num_vectors = 1 + _has_thresholds(sae) + (dtype == FP8)
    return sae.d_sae * (sae.d_model * dtype.itemsize + 4 * num_vectors)


def hold_saes(
    saes: Iterable[Sae], most_mib: float, dtype: torch.dtype, device: torch.device,
    fp8: bool = False,
) -> dict[str, DeviceSae]:  # fmt: skip
    """Load encoders to the device, and return them by the name of the SAE. If `most_mib` is 0, load
    no encoder.

    Args:
        most_mib: additional_config['scope'].saes_mib.
        fp8: The same as for DeviceSae.

    Raises:
        ConfigError: the encoders need more than `most_mib` MiB.
    """
    every = list(saes) if most_mib else []
    kept = FP8 if fp8 else kept_dtype(dtype, device)
    needed = sum(num_bytes(sae, kept) for sae in every) / 2**20
    if needed > most_mib:
        raise ConfigError(
            f"additional_config['scope'].saes_mib is {most_mib:g}; the encoders of "
            f"{', '.join(shown(sae.name) for sae in every[:8])} take {needed:,.1f} MiB of each "
            f"device. Name fewer SAEs{'' if fp8 else ', set saes_dtype to fp8'}, or raise "
            "saes_mib. If saes_mib is 0, requests can name only single features."
        )
    held = {sae.name: DeviceSae(sae, dtype, device, fp8) for sae in every}
    if device.type == "cuda":
        from vllm_scope.worker import topk  # a machine with a GPU has Triton

        for sae in every:  # compiles the kernels now, so that no step waits for the compiler
            row = torch.zeros(1, sae.d_model, dtype=dtype, device=device)
            for count in (topk.LEAST, topk.MOST):
                held[sae.name].pack(row, count)
    return held


class PairMaker(Protocol):
    """Makes pairs (index, value) from rows."""

    def pack(self, rows: Tensor, count: int) -> Tensor:
        """uint8 [num_rows, bytes of whole slots]: for each row, `count` int32 indices, then `count`
        float32 values. Zeros fill the last slot of the row.

        Args:
            rows: [num_rows, width], on the device.
        """


class DeviceSae:
    """The encoder of one SAE. For a row x with s = x . weight + bias, a feature is s if s >
    threshold, else 0. The threshold is 0 if the SAE has no thresholds.

    Args:
        dtype: The dtype of rows. If `fp8` is False, weights are rounded to this dtype. Sums are
            float32.
        fp8: True if weights are float8_e4m3fn with a float32 scale for each feature (the format of
            codecs.scaled.Fp8). Before a product, a part of the weights is converted to the dtype of
            rows, without rounding.
    """

    def __init__(
        self, sae: Sae, dtype: torch.dtype, device: torch.device, fp8: bool = False
    ) -> None:
        shape, kept = (sae.d_sae, sae.d_model), FP8 if fp8 else kept_dtype(dtype, device)
        self._weight = torch.empty(shape, dtype=kept, device=device)
        self._scale = torch.empty(sae.d_sae, device=device) if fp8 else None
        self._bias = torch.empty(sae.d_sae, device=device)
        self._threshold = torch.zeros(sae.d_sae, device=device) if _has_thresholds(sae) else None
        self._k = sae.d_sae if sae.k is None else sae.k
        self._most_rows = max(1, MOST_BYTES // (4 * sae.d_sae))
        first, b_dec = 0, sae.decoder_bias.to(device).double()
        for part in sae.folded(device):
            here = slice(first, first := first + len(part.bias))
            bias, exact = part.bias, part.encoder
            if self._scale is None:
                weight = exact.to(dtype)
            else:
                scaled = Fp8(hidden_size=sae.d_model, dtype="float32").encode(exact.float())
                weight = scaled["q"]
                self._scale[here] = scaled["scale"][:, 0]
            if sae.apply_b_dec_to_input:
                # The weights have a rounding error. With this corrected bias, the error is
                # multiplied by x - b_dec, and not by x.
                rounded = weight.double()
                if self._scale is not None:
                    rounded *= self._scale[here, None]
                bias = bias + (exact - rounded) @ b_dec / sae.input_scale
            self._weight[here] = weight
            self._bias[here] = bias
            if self._threshold is not None and part.threshold is not None:
                self._threshold[here] = part.threshold

    def pack(self, rows: Tensor, count: int) -> Tensor:
        """The strongest features of each row, uint8 [num_rows, bytes in whole slots], in the format
        of request.heads.Strongest.

        Args:
            rows: [num_rows, width], on the device.
            count: The largest number of features for each row.
        """
        num_active = min(count, self._k)
        if rows.is_cuda and _grouped(len(self._bias), num_active):
            from vllm_scope.worker import topk  # a machine with a GPU has Triton

            if topk.fits(len(self._bias) // GROUP, num_active):
                return self._pack_in_kernels(rows, count, num_active)

        def found(some: Tensor) -> tuple[Tensor, Tensor]:
            values, indices = self._strongest(some, num_active)
            return values.relu(), indices

        return packed_pairs(rows, count, self._most_rows, found)

    def _pack_in_kernels(self, rows: Tensor, count: int, num_active: int) -> Tensor:
        """The result of `pack`, for few features on a GPU. This method needs few launches."""
        from vllm_scope.worker.maxima import maxima
        from vllm_scope.worker.topk import put_pairs

        packed = empty_pairs(rows, count)
        for some, into in zip(
            rows.split(self._most_rows), packed.split(self._most_rows), strict=True
        ):
            products = self._products(some)
            put_pairs(
                maxima(products, self._bias, self._threshold, GROUP), products, self._bias,
                self._threshold, num_active, into, count,
            )  # fmt: skip
        return packed.view(torch.uint8)

    def _strongest(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest features of each row, and their indices. If the SAE has no
        thresholds, the caller must apply the ReLU."""
        products = self._products(rows)
        if rows.is_cuda and _grouped(products.shape[1], count):
            # A machine with a GPU has Triton.
            from vllm_scope.worker.maxima import maxima

            largest = maxima(products, self._bias, self._threshold, GROUP)
            return _among(largest, count, partial(self._features_at, products))
        return strongest(self._features(products.add_(self._bias), self._threshold), count)

    def _products(self, rows: Tensor) -> Tensor:
        """The product x . weight for each row x, float32 [n, d_sae]."""
        if self._scale is None:
            return _products(rows, self._weight)
        d_sae, d_model = self._weight.shape
        dtype = kept_dtype(rows.dtype, rows.device)
        products = torch.empty(len(rows), d_sae, device=rows.device)
        size = max(1, UNPACKED_BYTES // (d_model * dtype.itemsize))
        for some, into in zip(self._weight.split(size), products.split(size, 1), strict=True):
            into.copy_(_products(rows, some.to(dtype)))
        return products.mul_(self._scale)

    def _features_at(self, products: Tensor, at: Tensor) -> Tensor:
        thresholds = None if self._threshold is None else self._threshold[at]
        return self._features(products.gather(1, at).add_(self._bias[at]), thresholds)

    @staticmethod
    def _features(found: Tensor, thresholds: Tensor | None) -> Tensor:
        """Apply the thresholds to pre-activations, in place. A NaN stays a NaN."""
        return found if thresholds is None else found.masked_fill_(found <= thresholds, 0)


def affine(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The result of rows . weight^T + bias, in float32.

    Args:
        rows: [n, d].
        weight: [m, d], with the dtype that `kept_dtype` returns for these rows.
        bias: [m] float32.
    """
    return _products(rows, weight).add_(bias)


def _products(rows: Tensor, weight: Tensor) -> Tensor:
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return rows.float() @ weight.t()


def packed_pairs(
    rows: Tensor, count: int, most_rows: int, found: Callable[[Tensor], tuple[Tensor, Tensor]],
    absent: int = 0,
) -> Tensor:  # fmt: skip
    """uint8 [num_rows, bytes in whole slots]: `count` int32 indices, then `count` float32 values.

    Args:
        most_rows: The largest number of rows in one call of the function `found`.
        found: A function that returns the values and the indices for n rows, each [n, at most
            count].
        absent: If `found` returns fewer than `count` pairs, the missing pairs get this index, and
            the value 0.
    """
    packed = empty_pairs(rows, count)
    if absent:
        packed[:, :count] = absent
    for some, into in zip(rows.split(most_rows), packed.split(most_rows), strict=True):
        values, indices = found(some)
        into[:, : indices.shape[1]] = indices
        into[:, count : count + indices.shape[1]] = values.view(torch.int32)
    return packed.view(torch.uint8)


def empty_pairs(rows: Tensor, count: int) -> Tensor:
    """Zeros, int32 [num_rows, words in whole slots], with room for `count` pairs of each row."""
    words = slots_of_row(8 * count) * SLOT_BYTES // 4
    return torch.zeros((len(rows), words), dtype=torch.int32, device=rows.device)


def strongest(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest features of each row, [n, count], descending, and their indices."""
    num_rows, width = features.shape
    if not _grouped(width, count):
        found = features.topk(count)
        return found.values, found.indices
    largest = features.view(num_rows, width // GROUP, GROUP).amax(2)
    return _among(largest, count, lambda at: features.gather(1, at))


def _grouped(width: int, count: int) -> bool:
    return width % GROUP == 0 and count * GROUP < width


def _among(
    largest: Tensor, count: int, features_at: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The result of `strongest`, computed only from the `count` groups with the largest maxima.

    Args:
        largest: [n, groups], the largest feature of each group.
        features_at: A function that returns the features [n, m] at the given indices, int64 [n, m].
    """
    best = largest.topk(count).indices
    within = torch.arange(GROUP, device=largest.device)
    at = (best[:, :, None] * GROUP + within).flatten(1)
    found = features_at(at).topk(count)
    return found.values, at.gather(1, found.indices)


def kept_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which weights are kept for rows of this dtype. On a GPU, this is the dtype of
    the rows. On a CPU, this is float32, because a CPU cannot multiply 16-bit numbers into float32.
    """
    return dtype if device.type == "cuda" else torch.float32


def _has_thresholds(sae: Sae) -> bool:
    return sae.threshold is not None or sae.gate_bias is not None


#: Maps the name of an SAE, or the key of a lens, to its pair maker.
PairMakers = Mapping[str | LensKey, PairMaker]
#: The pair makers of a worker that holds no SAE and no lens.
NONE: PairMakers = {}
