"""All sums of a worker, in memory that is reserved at the start.

Owns:  KeptSums, which has the sums by name, place and label, and the number of rows that were not
       added to sums.
Runs:  on the threads of worker.summing.   To: batch.sums.

Promise: sums of at most `most_bytes` always fit into the memory, even after other sums were
dropped. Sums are views of the reserved memory. Therefore no memory is allocated for sums later.
"""

from __future__ import annotations

import logging
from collections import Counter

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.sums import Packed, bytes_of
from vllm_scope.program.layout import Widths
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.request.sites import kind_of_point
from vllm_scope.worker.device_sums import DeviceSums
from vllm_scope.worker.summed_rows import Key

logger = logging.getLogger("vllm.vllm_scope")


class KeptSums:
    """The sums of one worker.

    Args:
        dtype, device: the rows' dtype and device.
        widths: bytes of a raw row, by kind.
        most_bytes: the largest number of bytes of all sums. The constructor allocates this memory,
            on the current stream, before vLLM allocates the KV cache.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, widths: Widths, most_bytes: int
    ) -> None:
        self._dtype, self._widths = dtype, widths
        self._reserved = torch.empty(most_bytes, dtype=torch.uint8, device=device)
        #: Maps a key to the sums of the key, and to the index of the first byte of these sums in
        #: `_reserved`. The keys are in the order of this index.
        self._sums: dict[Key, tuple[DeviceSums, int]] = {}
        #: `_end`: the index after the last used byte. `_num_bytes`: the number of used bytes,
        #: without the gaps between sums.
        self._end = self._num_bytes = 0
        #: Maps a key to the number of rows that were not added to any sums.
        self._missing: Counter[Key] = Counter()
        if most_bytes and device.type == "cuda":
            from vllm_scope.worker import squares  # needs Triton

            for size in set(widths.row_bytes) - {0}:
                squares.load(dtype, size // dtype.itemsize)

    def of(self, key: Key, action: ResolvedMoments) -> DeviceSums | None:
        """The sums of a key. If the key has no sums yet, sums are created. None if there is no room
        for new sums, or if the key has sums of another kind than the action needs."""
        kind = action.covariance, action.target is not None
        if key in self._sums:
            found = self._sums[key][0]
            return found if found.kind == kind else None
        width = self._width(key)
        size = bytes_of(width, self._dtype.itemsize, *kind)
        if self._num_bytes + size > len(self._reserved):
            return None
        if self._end + size > len(self._reserved):
            self._close_gaps()
        found = DeviceSums(self._room(self._end, size), width, self._dtype, *kind)
        self._sums[key] = found, self._end
        self._end, self._num_bytes = self._end + size, self._num_bytes + size
        return found

    def _width(self, key: Key) -> int:
        return self._widths.row_bytes[kind_of_point(key[1].point())] // self._dtype.itemsize

    def _room(self, start: int, size: int) -> Tensor:
        return self._reserved[start : start + size]

    def _close_gaps(self) -> None:
        """Move all sums to the beginning of the memory, without gaps."""
        end = 0
        for key, (one, start) in self._sums.items():
            shift = start - end
            # The sums move by `shift` bytes. The sums are copied in parts of at most `shift` bytes,
            # because such a part does not overlap its target.
            for first in range(start, start + one.num_bytes, shift) if shift else ():
                size = min(shift, start + one.num_bytes - first)
                self._room(first - shift, size).copy_(self._room(first, size))
            one.lie_in(self._room(end, one.num_bytes))
            self._sums[key] = one, end
            end += one.num_bytes
        self._end = end

    def lose(self, key: Key, count: int) -> None:
        """Add `count` to the number of rows that are missing from the sums of a key."""
        if key not in self._missing:
            logger.error("vllm-scope: rows are missing from the sums of %s", key)
        self._missing[key] += count

    def keys(self) -> list[Key]:
        return list(dict.fromkeys([*self._sums, *self._missing]))

    def read(self, key: Key) -> Packed | None:
        """The sums of a key so far; None if the key has no sums and no missing rows."""
        if key in self._sums:
            found = self._sums[key][0].read()
        elif key in self._missing:
            found = Packed(0, 0, 0.0, 0.0, (np.zeros(self._width(key)).tobytes(), b"", b""))
        else:
            return None
        return msgspec.structs.replace(found, missing=found.missing + self._missing[key])

    def drop(self, name: str) -> bool:
        """Forget all sums with this name. Returns False if there are no sums with this name."""
        gone = [key for key in self.keys() if key[0] == name]
        for key in gone:
            self._missing.pop(key, None)
            if key in self._sums:
                self._num_bytes -= self._sums.pop(key)[0].num_bytes
        return bool(gone)
