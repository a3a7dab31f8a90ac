"""Writes tensors in vllm-lens's JSON format, and reads tensors in this format.

    {"data": base64, "dtype": numpy's, "original_dtype": "torch.bfloat16", "shape": [...],
     "compression": "zstd"}

bfloat16 is sent as int16, because numpy has no bfloat16. `compression` is present if the bytes are
a zstd frame. A tensor without `data` has a `handle` or an `error`. The client fetches the tensor's
bytes by the handle. The error is the reason why the tensor is missing. A value that is not a tensor
is sent as `{"__json__": value}`.

Promise: this code unpickles nothing, and checks sizes before memory is allocated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeGuard

import msgspec
import numpy as np
import pybase64
import torch
from torch import Tensor

from vllm_scope.codecs.zstd import zstd_library
from vllm_scope.compat.bounds import few
from vllm_scope.errors import ConfigError, ScopeError, SpecError, shown

#: The allowed dtypes of tensors, by numpy's names.
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
MAX_DIMENSIONS = 8
FIELDS = ("data", "dtype", "original_dtype", "shape", "compression")
#: The most fields that a tensor's JSON can have. This code ignores unknown fields.
MOST_FIELDS = 16
#: An untrusted zstd frame of n bytes may have at most SMALL_BYTES + MOST_TIMES * n bytes of data.
MOST_TIMES, SMALL_BYTES = 64, 1 << 16
#: The only field of a value that is not a tensor.
PLAIN = "__json__"
#: A function that returns the bytes of a handle's tensor.
Fetch = Callable[[str], bytes]
#: Maps names to tensors. The values of qk_layers and qk_meta are not tensors, but JSON values.
Decoded = dict[str, Any]


def serialize_tensor(tensor: Tensor, compress: bool | None = None) -> dict[str, object]:
    """Write a tensor as JSON.

    Args:
        compress: with False, the bytes are not compressed. With True or None, zstd compresses the
            bytes if zstd is installed.
    """
    raw, more = _bits(tensor).numpy().tobytes(), {}
    zstd = None if compress is False else _zstd()
    if zstd is not None:
        raw, more = zstd.compress(raw, 1), {"compression": "zstd"}
    return {"data": pybase64.b64encode_as_string(raw), **described(tensor), **more}


def serialize_activations(activations: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Write `output.activations` as JSON for the field `activations` of an answer."""
    return {
        name: serialize_tensor(value) if isinstance(value, Tensor) else {PLAIN: value}
        for name, value in activations.items()
    }


def described(tensor: Tensor) -> dict[str, object]:
    """The dtype of a tensor, by its names in numpy and in torch, and the shape of the tensor."""
    dtype = str(_bits(tensor).numpy().dtype)
    return {"dtype": dtype, "original_dtype": str(tensor.dtype), "shape": list(tensor.shape)}


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _zstd() -> ModuleType | None:
    try:
        found: ModuleType = zstd_library()
        return found
    except ConfigError:
        return None


def deserialize_tensor(
    body: Mapping[str, object], most_bytes: int | None = None, where: str = "the tensor"
) -> Tensor:
    """Read the tensor that `serialize_tensor` wrote.

    Args:
        most_bytes: the limit of the tensor's bytes, for bodies of untrusted senders, or None.
        where: the tensor's path, for error texts.

    Raises:
        SpecError: the body has another form, too many bytes, or sizes that contradict each other.
    """
    few(body, MOST_FIELDS, "fields", where)
    if "data" not in body:
        raise SpecError(f"{where} is {shown(body)}; its JSON is {{{', '.join(FIELDS)}}}.")
    data, (_, _, size) = body["data"], _described(body, most_bytes, where)
    length = 4 * -(-size // 3)
    if isinstance(data, str) and len(data) != length and body.get("compression") != "zstd":
        raise SpecError(
            f"{where}.data has {len(data):,} characters; the {size:,} bytes that dtype and shape "
            f"say take {length:,} in base64."
        )
    try:
        if not isinstance(data, str | bytes):
            raise ValueError
        raw = pybase64.b64decode(data, validate=True)
    except ValueError:
        raise SpecError(f"{where}.data is {shown(data)}; it must be a base64 string.") from None
    return tensor_of(raw, body, most_bytes, where)


def tensor_of(
    raw: bytes, body: Mapping[str, object], most_bytes: int | None = None, where: str = "the tensor"
) -> Tensor:
    """Read the tensor in `raw` that `body` describes. Raises the errors of `deserialize_tensor`."""
    dtype, shape, size = _described(body, most_bytes, where)
    if body.get("compression") == "zstd":
        if most_bytes is not None and size > SMALL_BYTES + MOST_TIMES * len(raw):
            raise SpecError(
                f"{where} of shape {shape} takes {size:,} bytes, and {len(raw):,} came; zstd may "
                f"make at most {MOST_TIMES} times as many. Send the tensor without compression."
            )
        raw = _unzipped(raw, size, where)
    if len(raw) != size:
        raise SpecError(f"{where} has {len(raw)} bytes; {dtype} of shape {shape} takes {size}.")
    values = torch.from_numpy(np.frombuffer(raw, dtype).reshape(shape).copy())
    bfloat16 = body.get("original_dtype") == "torch.bfloat16" and dtype.itemsize == 2
    return values.view(torch.bfloat16) if bfloat16 else values


def _described(
    body: Mapping[str, object], most_bytes: int | None, where: str
) -> tuple[np.dtype[np.generic], list[int], int]:
    """The dtype, shape and size in bytes of a tensor's JSON.

    Raises SpecError if the dtype or shape is not allowed, or the size is above `most_bytes`.
    """
    name, shape = body.get("dtype"), body.get("shape")
    unknown = not isinstance(name, str) or name not in DTYPES
    if unknown or not is_shape(shape) or max(shape, default=0) > sys.maxsize:
        raise SpecError(
            f"{where} has dtype {shown(name)} and shape {shown(shape)}; dtype is one of "
            f"{', '.join(DTYPES)}, shape a list of at most {MAX_DIMENSIONS} numbers of at most 63 "
            "bits."
        )
    dtype: np.dtype[np.generic] = np.dtype(str(name))
    size = dtype.itemsize * math.prod(shape)
    if most_bytes is not None and size > most_bytes:
        raise SpecError(
            f"{where} of shape {shape} takes {size:,} bytes; at most {most_bytes:,} are allowed."
        )
    return dtype, shape, size


def is_shape(shape: object) -> TypeGuard[list[int]]:
    return (
        isinstance(shape, list)
        and len(shape) <= MAX_DIMENSIONS
        and all(type(length) is int and length >= 0 for length in shape)
    )


def _unzipped(raw: bytes, size: int, where: str) -> bytes:
    zstd = _zstd()
    if zstd is None:
        raise SpecError(
            f"{where} is compressed with zstd, which is not installed: "
            "pip install 'vllm-scope[files]'."
        )
    try:
        # Read up to one byte more than expected, to notice a frame with too many bytes.
        found = zstd.ZstdDecompressor().decompress(raw, size + 1)
    except zstd.ZstdError as error:
        raise SpecError(f"{where} is not zstd: {error}.") from None
    assert isinstance(found, bytes)
    return found


def decode_activations(body: Mapping[str, object], *, fetch_bytes: Fetch | None = None) -> Decoded:
    """Read the activations of an answer or of a choice; {} if nothing was captured.

    Args:
        body: the JSON of the answer or of the choice, with the field `activations`.
        fetch_bytes: a function that gets a handle's bytes from GET /v1/activations/{handle}.

    Raises:
        ScopeError: the server could not deliver a tensor, or a tensor has a handle and
            `fetch_bytes` is None.
    """
    found: Decoded = {}
    entries = msgspec.convert(body.get("activations") or {}, dict[str, dict[str, object]])
    for name, entry in entries.items():
        if "error" in entry:
            raise ScopeError(str(entry["error"]))
        if PLAIN in entry:
            found[name] = entry[PLAIN]
        elif "handle" not in entry:
            found[name] = deserialize_tensor(entry, where=f"activations[{name!r}]")
        elif fetch_bytes is None:
            raise ScopeError(
                f"activations[{name!r}] came as a handle: give fetch_bytes, or use VLLMLensClient."
            )
        else:
            found[name] = tensor_of(fetch_bytes(str(entry["handle"])), entry)
    return found
