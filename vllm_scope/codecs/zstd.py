"""A slow lossless codec that compresses rows on the host, and saves about 20% of the bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar, Literal

import torch
from pydantic import Field, StrictInt
from torch import Tensor

from vllm_scope.codecs.base import Codec, RowPart
from vllm_scope.errors import ConfigError


def zstd_library() -> ModuleType:
    """The module `zstd` of the standard library (Python 3.14 and later), or of the package
    backports.zstd. Raises ConfigError if the module is missing."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise ConfigError(
            "codec 'zstd' needs the package backports.zstd; pip install 'vllm-scope[files]'."
        ) from None
    library: ModuleType = zstd
    return library


class Zstd(Codec):
    """Stores all rows of one `encode` call as one zstd frame. A row cannot be decoded without the
    other rows.

    `encode` copies rows from a device to the host, and waits for the copy.

    Attributes:
        level: zstd's level. A higher level makes smaller frames, and is slower.
    """

    lossless: ClassVar[bool] = True
    rowwise: ClassVar[bool] = False

    codec: Literal["zstd"] = "zstd"
    level: StrictInt = Field(default=1, ge=1, le=22)

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        raise NotImplementedError("a zstd frame has no rows")

    @property
    def part_names(self) -> tuple[str, ...]:
        return ("frame",)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        data = rows.contiguous().cpu().view(torch.uint8).reshape(-1).numpy()
        # Each call uses a new compressor, because threads that share a compressor corrupt memory.
        frame = zstd_library().compress(data, self.level)
        return {"frame": torch.frombuffer(bytearray(frame), dtype=torch.uint8)}

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        zstd = zstd_library()
        frame = parts["frame"].cpu().contiguous().view(torch.uint8).numpy()
        size = num_rows * self.hidden_size * self.torch_dtype.itemsize
        try:
            said = zstd.get_frame_info(frame).decompressed_size
            if said != size:
                raise ValueError(f"the frame holds {said} bytes; {size} are expected")
            if size == 0:
                return torch.empty(0, self.hidden_size, dtype=self.torch_dtype)
            # A frame can hold more bytes than the frame's header claims. Therefore `max_length`
            # limits the memory.
            data = zstd.ZstdDecompressor().decompress(frame, max_length=size)
        except zstd.ZstdError as error:
            raise ValueError(f"the frame is not zstd: {error}") from None
        if len(data) != size:
            raise ValueError(f"the frame holds {len(data)} bytes; {size} are expected")
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return rows.view(self.torch_dtype).view(num_rows, self.hidden_size)
