"""One numpy archive per request, for tools that read nothing else.

The arrays are those of `per_request`. numpy knows neither bf16 nor fp8: they are stored
as their bits, int16 and uint8, and the index says what they are. The index is the
array `vllm_scope`, its JSON as bytes, and a file beside.
"""

from __future__ import annotations

from functools import partial
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from vllm_scope.files.manifest import Index
from vllm_scope.files.names import place
from vllm_scope.files.options import FileOptions
from vllm_scope.files.per_request import KEY, tensors_of
from vllm_scope.files.publish import Publisher, whole_writes, write_bytes
from vllm_scope.files.stored import FinishedRequest, Stored, published

#: dtype -> the one that has its bits.
BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


class NpzLayout:
    def __init__(self, options: FileOptions, publisher: Publisher) -> None:
        self._publisher = publisher

    def add(self, request: FinishedRequest) -> Stored:
        stem = place(request.record)
        folder, _, name = stem.rpartition("/")
        manifest = request.manifest(f"{name}.npz")
        tensors = {name: torch.cat(pieces) for name, pieces in tensors_of(request).items()}
        dtypes = {
            name: str(tensor.dtype).removeprefix("torch.")
            for name, tensor in tensors.items()
            if tensor.dtype in BITS
        }
        body = Index("npz", [manifest], dtypes).encode()
        arrays = {name: _array(tensor) for name, tensor in tensors.items()}
        arrays[KEY] = np.frombuffer(body, np.uint8)
        self._publisher.publish({
            f"{stem}.npz": partial(_save, arrays=arrays),
            f"{stem}.json": partial(write_bytes, body=body),
        })  # fmt: skip
        return Stored(manifest, published(), folder)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    return (tensor.view(BITS[tensor.dtype]) if tensor.dtype in BITS else tensor).numpy()


def _save(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    with whole_writes(file) as whole:
        np.savez(whole, allow_pickle=False, **arrays)
