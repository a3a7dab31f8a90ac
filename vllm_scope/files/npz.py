"""One numpy archive per request, for tools that read no other format.

The arrays are the same as in `per_request`. numpy has no dtypes for bf16 and fp8. Therefore the
bits of bf16 values are stored as int16, and the bits of fp8 values are stored as uint8. The index
has the original dtypes. The index is in the archive, as the array `vllm_scope` (JSON as bytes), and
in a `.json` file in the same folder.
"""

from __future__ import annotations

from functools import partial
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from vllm_scope.errors import FileError, shown
from vllm_scope.files.index import Index, IndexedRequest
from vllm_scope.files.per_request import KEY, PerRequestLayout, publish_indexed
from vllm_scope.files.publish import whole_writes

#: For each dtype that numpy does not have, the dtype with which the bits are stored.
BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


class NpzLayout(PerRequestLayout):
    suffix = "npz"

    def _publish(
        self, stem: str, tensors: dict[str, list[Tensor]], manifest: IndexedRequest
    ) -> None:
        for name in tensors:
            if "\0" in name:
                raise FileError(
                    f"{shown(name)} cannot be the name of an array in an .npz, because zip cuts "
                    "names at the character NUL; use a name without NUL, or another layout."
                )
        whole = {name: torch.cat(pieces) for name, pieces in tensors.items()}
        dtypes = {
            name: str(tensor.dtype).removeprefix("torch.")
            for name, tensor in whole.items()
            if tensor.dtype in BITS
        }
        body = Index("npz", [manifest], dtypes).encode()
        arrays = {name: _array(tensor) for name, tensor in whole.items()}
        arrays[KEY] = np.frombuffer(body, np.uint8)
        publish_indexed(self._publisher, f"{stem}.npz", partial(_save, arrays=arrays), body)


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    return (tensor.view(BITS[tensor.dtype]) if tensor.dtype in BITS else tensor).numpy()


def _save(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    with whole_writes(file) as whole:
        np.savez(whole, allow_pickle=False, **arrays)
