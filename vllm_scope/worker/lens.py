"""Computes the likeliest tokens of many rows together, with the model's norm and unembedding.

Owns:  DeviceLens, DeviceMap (one affine map of a lens), `hold_lenses`.
Runs:  in workers that have a drain and the unembedding, on the same threads as held_saes.
From:  engine.worker.unembedding (finds the model's layers).   To: packer.

Promise: the host never waits for the device. The float32 logits need at most MOST_BYTES of device
memory. All other tensors together need about 2 * MOST_BYTES.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_scope.errors import CompatError, ConfigError, shown
from vllm_scope.lenses.linear import Affine, LinearLens
from vllm_scope.request.actions.sparse import MAX_TOP_K
from vllm_scope.request.heads import LensKey
from vllm_scope.request.sites import Place
from vllm_scope.worker.held_saes import affine, kept_dtype, packed_pairs, strongest

#: One computation produces at most this many bytes of float32 logits.
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class DeviceLens:
    """A model's lens on the device.

    Attributes:
        logits: a function that computes logits [n, vocab_size] from rows [n, hidden_size] with the
            model's dtype. The logits have no padding.
    """

    logits: Callable[[Tensor], Tensor]
    vocab_size: int

    @property
    def most_rows(self) -> int:
        """The largest number of rows of one computation."""
        return max(1, MOST_BYTES // (4 * self.vocab_size))

    def of(self, mapped: Callable[[Tensor], Tensor]) -> DeviceLens:
        """A lens that first applies `mapped` to the rows, and then this lens."""
        return replace(self, logits=lambda rows: self.logits(mapped(rows)))

    def reserve(self, row: Tensor) -> None:
        """Compute the tokens of `most_rows` rows one time. torch's allocator then keeps enough
        memory for later rows. Call this method on the stream that will compute the tokens of later
        rows.

        Args:
            row: [hidden_size].

        Raises:
            CompatError: the device has no room for the logits.
        """
        try:
            self.pack(row.expand(self.most_rows, -1).contiguous(), MAX_TOP_K)
        except torch.OutOfMemoryError:
            raise CompatError(
                f"the device has no room for {MOST_BYTES >> 20} MiB of logits and for other "
                "tensors of this size; start with a smaller gpu_memory_utilization"
            ) from None

    def pack(self, rows: Tensor, count: int) -> Tensor:
        """The likeliest tokens of each row, in the format of request.heads.Likeliest. The arguments
        are the same as for PairMaker.pack."""

        def found(some: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.logits(some).float()
            values, ids = strongest(logits, min(count, self.vocab_size))
            return values - logits.logsumexp(1, keepdim=True), ids

        with torch.inference_mode():
            return packed_pairs(rows, count, self.most_rows, found, absent=-1)


class DeviceMap:
    """One map of a lens on the device. A row x is mapped to weight x + bias. If `residual` is True,
    the row is mapped to x + weight x + bias.

    Args:
        dtype: The rows' dtype. Sums are float32. The mapped row is rounded to `dtype`.
    """

    def __init__(
        self, one: Affine, residual: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._residual = residual
        self._weight = one.weight.to(device=device, dtype=kept_dtype(dtype, device))
        zeros = torch.zeros(len(one.weight), device=device)
        self._bias = zeros if one.bias is None else one.bias.to(device=device).float()

    def __call__(self, rows: Tensor) -> Tensor:
        """The mapped rows. `rows` and the result are [n, d_model], and have the same dtype."""
        found = affine(rows, self._weight, self._bias)
        return (found.add_(rows) if self._residual else found).to(rows.dtype)


def num_bytes(lens: LinearLens, num_maps: int, dtype: torch.dtype) -> int:
    """The number of bytes of `num_maps` maps of a lens, if the weights have this dtype."""
    return num_maps * lens.d_model * (lens.d_model * dtype.itemsize + 4)


def hold_lenses(
    lenses: Iterable[LinearLens], most_mib: float, here: Collection[int], moved: Collection[int],
    dtype: torch.dtype, device: torch.device,
) -> dict[LensKey, DeviceMap]:  # fmt: skip
    """Maps (lens name, boundary) to the lens map on the device, for all places that have a tap on
    this worker.

    Args:
        most_mib: additional_config['scope'].lenses_mib.
        here: The boundaries that have a tap on this worker.
        moved: The layers whose input rows have no tap, as in Sites.

    Raises:
        ConfigError: the maps need more than `most_mib` MiB.
        SpecError: a map has a number that is not finite.
    """
    found: list[tuple[LinearLens, Place]] = [
        (lens, place) for lens in lenses for place in lens.places
        if place.boundary in here and not (place.site == "resid_pre" and place.layer in moved)
    ]  # fmt: skip
    kept = kept_dtype(dtype, device)
    needed = sum(num_bytes(lens, 1, kept) for lens, _ in found) / 2**20
    if needed > most_mib:
        names = dict.fromkeys(shown(lens.name) for lens, _ in found)
        raise ConfigError(
            f"additional_config['scope'].lenses_mib is {most_mib:g}; the maps of "
            f"{', '.join(list(names)[:8])} take {needed:,.1f} MiB of each device. Name fewer "
            "lenses, tap fewer layers, or raise lenses_mib."
        )
    return {
        (lens.name, place.boundary): DeviceMap(lens.checked(place), lens.residual, dtype, device)
        for lens, place in found
    }
