"""Tensors in vllm-lens's JSON, and back.

    {"data": base64, "dtype": numpy's, "original_dtype": "torch.bfloat16", "shape": [...],
     "compression": "zstd"}

bfloat16 travels as int16, because numpy has no bfloat16. `compression` is present if the bytes
are a zstd frame. Instead of `data` there may be a `handle`, whose bytes the client fetches, or
`error`, the reason why there is no tensor. Any other value is `{"__json__": value}`.

Promise: nothing is unpickled, and sizes are compared before anything is allocated.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from vllm_scope.codecs.zstd import zstd_library
from vllm_scope.compat.bounds import check_base64, few
from vllm_scope.errors import ConfigError, ScopeError, SpecError, shown

#: numpy's names.
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
MAX_DIMENSIONS = 8
FIELDS = ("data", "dtype", "original_dtype", "shape", "compression")
#: Unknown fields, which a later version may have, are ignored up to so many in all.
MOST_FIELDS = 16
#: zstd may make SMALL_BYTES and MOST_TIMES as many bytes as a stranger sends.
MOST_TIMES, SMALL_BYTES = 64, 1 << 16
#: The only field of a value that is not a tensor.
PLAIN = "__json__"
#: Handle -> its bytes.
Fetch = Callable[[str], bytes]


def serialize_tensor(tensor: Tensor, compress: bool | None = None) -> dict[str, Any]:
    """A tensor as JSON.

    Args:
        compress: with zstd; None: if zstd is installed.
    """
    raw, body = _bits(tensor).numpy().tobytes(), described(tensor)
    zstd = None if compress is False else _zstd()
    if zstd is not None:
        raw = zstd.compress(raw, 1)
        body["compression"] = "zstd"
    return {"data": base64.b64encode(raw).decode()} | body


def serialize_activations(activations: Mapping[str, Any]) -> dict[str, Any]:
    """`output.activations` as the field `activations` of an answer."""
    return {
        name: serialize_tensor(value) if isinstance(value, Tensor) else {PLAIN: value}
        for name, value in activations.items()
    }


def described(tensor: Tensor) -> dict[str, Any]:
    """The dtype and the shape of a tensor as JSON."""
    bits = _bits(tensor)
    return {
        "dtype": str(bits.numpy().dtype),
        "original_dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
    }


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _zstd() -> Any:
    try:
        return zstd_library()
    except ConfigError:
        return None


def deserialize_tensor(
    body: Mapping[str, Any], most_bytes: int | None = None, where: str = "the tensor"
) -> Tensor:
    """The tensor that `serialize_tensor` wrote.

    Args:
        most_bytes: bound of the tensor, for bodies that strangers sent.
        where: its path, for errors.

    Raises:
        SpecError: another form, or sizes that do not fit.
    """
    few(body, MOST_FIELDS, "fields", where)
    if "data" not in body:
        raise SpecError(f"{where} is {shown(body)}; over the wire it is {{{', '.join(FIELDS)}}}.")
    dtype, shape = _described(body, most_bytes, where)
    if body.get("compression") != "zstd":
        check_base64(body["data"], dtype.itemsize * math.prod(shape), where)
    try:
        raw = base64.b64decode(body["data"], validate=True)
    except (TypeError, ValueError):
        raise SpecError(f"{where}.data is {shown(body['data'])}; it is a base64 string.") from None
    return tensor_of(raw, body, most_bytes, where)


def tensor_of(
    raw: bytes, body: Mapping[str, Any], most_bytes: int | None = None, where: str = "the tensor"
) -> Tensor:
    """The tensor of bytes that `body` describes. Arguments and errors as `deserialize_tensor`."""
    dtype, shape = _described(body, most_bytes, where)
    size = dtype.itemsize * math.prod(shape)
    if body.get("compression") == "zstd":
        if most_bytes is not None and size > SMALL_BYTES + MOST_TIMES * len(raw):
            raise SpecError(
                f"{where} of shape {shape} takes {size:,} bytes, and {len(raw):,} came; zstd may "
                f"make at most {MOST_TIMES} times as many. Send it without compression."
            )
        raw = _unzipped(raw, size, where)
    if len(raw) != size:
        raise SpecError(
            f"{where} has {len(raw)} bytes; {dtype} of shape {shape} takes {size}."
        )  # fmt: skip
    values = torch.from_numpy(np.frombuffer(raw, dtype).reshape(shape).copy())
    bfloat16 = body.get("original_dtype") == "torch.bfloat16" and dtype.itemsize == 2
    return values.view(torch.bfloat16) if bfloat16 else values


def _described(
    body: Mapping[str, Any], most_bytes: int | None, where: str
) -> tuple[np.dtype[Any], list[int]]:
    """Dtype and shape; raises SpecError for more than `most_bytes`."""
    name, shape = body.get("dtype"), body.get("shape")
    if name not in DTYPES or not is_shape(shape):
        raise SpecError(
            f"{where} has dtype {shown(name)} and shape {shown(shape)}; dtype is one of "
            f"{', '.join(DTYPES)}, shape a list of at most {MAX_DIMENSIONS} numbers."
        )
    dtype = np.dtype(name)
    size = dtype.itemsize * math.prod(shape)
    if most_bytes is not None and size > most_bytes:
        raise SpecError(
            f"{where} of shape {shape} takes {size:,} bytes, of {most_bytes:,} at most."
        )
    return dtype, shape


def is_shape(shape: Any) -> TypeGuard[list[int]]:
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
        # One byte more than expected, so that a longer frame is noticed.
        found = zstd.ZstdDecompressor().decompress(raw, size + 1)
    except zstd.ZstdError as error:
        raise SpecError(f"{where} is not zstd: {error}.") from None
    assert isinstance(found, bytes)
    return found


def decode_activations(
    body: Mapping[str, Any], *, fetch_bytes: Fetch | None = None
) -> dict[str, Any]:
    """The activations of an answer or of one of its choices; {} if nothing was captured.

    Args:
        body: JSON with the field `activations`.
        fetch_bytes: returns the answer of GET /v1/activations/{handle}, for handles.

    Raises:
        ScopeError: the server could not deliver a tensor, or there is a handle and no
            `fetch_bytes`.
    """
    found: dict[str, Any] = {}
    for name, entry in (body.get("activations") or {}).items():
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
            found[name] = tensor_of(fetch_bytes(entry["handle"]), entry)
    return found
