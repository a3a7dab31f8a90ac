"""Rows, smaller: named tensors that hold them, and the way back.

Owns:  the Codec protocol, the codecs by name, and how one is made and made again.
Runs:  wherever rows are: `encode` on the rows' device, CPU or CUDA; `decode` on the
       parts' device.
To:    files (which stores the parts, and the metadata beside them).

Promise: `codec_from(codec.metadata())` decodes what `codec` encoded, in another
process, on another device. How much each codec loses is measured: docs/codecs.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor

from vllm_scope.codecs.base import CodecModel, RowPart
from vllm_scope.codecs.fp8 import Fp8
from vllm_scope.codecs.fp16 import Fp16
from vllm_scope.codecs.full8 import Full8
from vllm_scope.codecs.int8 import Int8
from vllm_scope.codecs.none import NoCodec
from vllm_scope.codecs.rp8 import RandomProjection8
from vllm_scope.codecs.topk8 import TopK8
from vllm_scope.codecs.zstd import Zstd
from vllm_scope.errors import ConfigError, shown


class Codec(Protocol):
    """Makes rows smaller, and brings them back.

    Immutable and safe to share between threads.

    A row with NaN or infinity in it: `none`, `fp16` and `zstd` keep each value. The
    8-bit codecs have one scale per row, so they return the whole row as NaN.

    Attributes:
        codec: the name.
        lossless: what comes back is bit for bit what went in.
        rowwise: each part has the rows on its first axis, so that any of them can be
            decoded alone.
        part_names: what `encode` makes.
        row_parts: the same with dtypes and sizes, where `rowwise`.
        hidden_size, torch_dtype: of the rows that go in and come back.
    """

    @property
    def codec(self) -> str: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def rowwise(self) -> bool: ...
    @property
    def part_names(self) -> tuple[str, ...]: ...
    @property
    def row_parts(self) -> tuple[RowPart, ...]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def torch_dtype(self) -> torch.dtype: ...

    def prepare(self, device: torch.device) -> None:
        """Make what `encode` needs on a device; it waits for nothing after that."""
        ...

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """The rows as parts, on the rows' device; waits for no device.

        Args:
            rows: [num_rows, hidden_size] of the codec's dtype.

        Raises:
            ValueError: another shape or dtype.
        """
        ...

    def decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        """[num_rows, hidden_size] of the codec's dtype, on the parts' device.

        Raises:
            ValueError: a part is missing, or does not hold `num_rows` rows. Sizes are
                compared before anything is allocated.
        """
        ...

    def metadata(self) -> dict[str, Any]:
        """Name, shape, dtype and options, plain JSON, for `codec_from`."""
        ...


CODECS: dict[str, type[CodecModel]] = {
    "none": NoCodec,
    "fp16": Fp16,
    "fp8": Fp8,
    "int8": Int8,
    "full8": Full8,
    "rp8": RandomProjection8,
    "topk8": TopK8,
    "zstd": Zstd,
}


def make_codec(name: str, hidden_size: int, dtype: torch.dtype, **options: Any) -> Codec:
    """A codec for rows of one shape and dtype.

    Raises:
        ConfigError: an unknown codec, an option that it does not have, or a value
            that it does not take.
    """
    return codec_from(
        {
            "codec": name,
            "hidden_size": hidden_size,
            "dtype": str(dtype).removeprefix("torch."),
            **options,
        }
    )


def codec_from(metadata: Mapping[str, Any]) -> Codec:
    """The codec that wrote this metadata.

    Raises:
        ConfigError: as `make_codec`.
    """
    name = metadata.get("codec")
    if not isinstance(name, str) or name not in CODECS:
        raise ConfigError(f"codec is {shown(name)}; the codecs are {', '.join(CODECS)}.")
    kind = CODECS[name]
    try:
        return kind.model_validate(dict(metadata))
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # a check of the codec's own, whose sentence says it all
            raise ConfigError(f"codec {name!r}: {first['ctx']['error']}.") from None
        option = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"codec {name!r}: {option} is {shown(first['input'])}: {first['msg']}. "
            f"It takes {', '.join(kind.model_fields)}."
        ) from None
