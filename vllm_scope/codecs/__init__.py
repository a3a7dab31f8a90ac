"""Codecs encode rows as smaller named tensors (parts), and decode parts to rows.

Owns:  CODECS, which are the codecs by name; `codec_from`, which makes a codec from metadata.
Runs:  in any process. `encode` runs on the rows' device, and `decode` on the parts' device (zstd:
       both on the CPU).
To:    files, which stores the parts and the metadata.

base.py    Codec: the contract, the options and the checks
packed.py  the parts of a row as one row of bytes
casts.py   rows as they are, or in float16
scaled.py  8-bit numbers with a scale for each row
rp8.py     random projections in 8 bits
topk8.py   the largest numbers of a row in 8 bits
zstd.py    rows compressed without loss

Promise: `codec_from(codec.metadata())` decodes the parts that `codec` encoded, also in another
process and on another device. docs/codecs.md says how much each codec loses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_scope.codecs.base import Codec
from vllm_scope.codecs.casts import Fp16, NoCodec
from vllm_scope.codecs.rp8 import RandomProjection8
from vllm_scope.codecs.scaled import Fp8, Full8, Int8
from vllm_scope.codecs.topk8 import TopK8
from vllm_scope.codecs.zstd import Zstd
from vllm_scope.errors import ConfigError, shown
from vllm_scope.request.options import checked

__all__ = ["CODECS", "Codec", "codec_from", "make_codec"]

_KINDS: tuple[type[Codec], ...] = (
    NoCodec, Fp16, Fp8, Int8, Full8, RandomProjection8, TopK8, Zstd,
)  # fmt: skip
CODECS = {str(kind.model_fields["codec"].default): kind for kind in _KINDS}


def make_codec(name: str, hidden_size: int, dtype: torch.dtype, **options: object) -> Codec:
    """Make a codec for rows of one size and dtype.

    Raises:
        ConfigError: the codec or an option is unknown, or an option's value is not allowed.
    """
    said = {"codec": name, "hidden_size": hidden_size, "dtype": str(dtype).removeprefix("torch.")}
    return codec_from({**said, **options})


def codec_from(metadata: Mapping[str, object]) -> Codec:
    """Make the codec that has this metadata.

    Raises:
        ConfigError: the codec or an option is unknown, or an option's value is not allowed.
    """
    name = metadata.get("codec")
    if not isinstance(name, str) or name not in CODECS:
        raise ConfigError(f"codec is {shown(name)}; the codecs are {', '.join(CODECS)}.")
    return checked(CODECS[name], metadata, f"codec {name!r}: ")
