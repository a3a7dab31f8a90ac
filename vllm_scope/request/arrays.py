"""Vectors and rows of a spec, as bytes with a shape.

Owns:  Array, the parsing of tensors, arrays and lists into an Array, and the JSON of an Array.
Runs:  in every process. This module imports numpy, and does not import torch. To read a torch
       tensor, this module calls the tensor's methods.

Promise: the numbers of an Array are finite float32. The size of an Array is checked before its
memory is allocated. Arrays with equal content have equal digests.
"""

from __future__ import annotations

import binascii
import hashlib
import math
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from vllm_scope.errors import SpecError, checked_word, shown

#: The largest count of numbers in one array: 4,096 rows of 4,096 numbers.
MAX_NUMBERS = 1 << 24
#: Types that a caller's list can contain by mistake. A list with one of them is refused.
_NO_NUMBERS = {str, bytes, dict, type(None)}
DTYPES = {"float32": "<f4", "float16": "<f2", "float64": "<f8", "bfloat16": "<u2"}


@dataclass(frozen=True)
class Array:
    """float32 numbers.

    Attributes:
        shape: 1 to 3 dimensions, each of size 1 or more. Rows of a sweep have up to 5 dimensions.
        data: the bytes of the numbers, little-endian, C order.
    """

    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def parse(value: object, where: str, most_dimensions: int = 3) -> Array:
        """Make an Array from a torch tensor, a numpy array, (nested) lists, or the JSON form.

        Raises:
            SpecError: a value is not a finite number, there are no values or too many, the rows of
                a list differ in length, or the number of dimensions is 0 or too large.
        """
        if isinstance(value, Array):
            return value
        if isinstance(value, dict):
            return _from_json(value, where, most_dimensions)
        kinds = _kinds_in(value)
        try:
            # Lists with texts are refused before numpy converts them, because numpy would reserve
            # as much memory for each text as for the longest text.
            found = None if kinds & _NO_NUMBERS else np.asarray(_without_tensors(value, kinds))
        except ValueError:
            raise SpecError(f"{where} is ragged; its rows must be of one length.") from None
        if found is None or found.dtype.kind not in "fiu":
            raise SpecError(
                f"{where} is {shown(value)}; it must be a tensor, an array or a list of numbers."
            )
        return _checked(found, where, most_dimensions)

    @staticmethod
    def known(shape: tuple[int, ...], data: bytes, digest: bytes) -> Array:
        """Make an Array whose digest is known already, so that it is not computed again."""
        found = Array(shape, data)
        found.__dict__["digest"] = digest
        return found

    @cached_property
    def numpy(self) -> NDArray[np.float32]:
        """float32, read-only."""
        return np.frombuffer(self.data, "<f4").reshape(self.shape)

    @cached_property
    def digest(self) -> bytes:
        found = hashlib.sha256(repr(self.shape).encode())
        found.update(self.data)
        return found.digest()[:16]

    def __getstate__(self) -> dict[str, object]:
        return {"shape": self.shape, "data": self.data}  # without cached properties

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> dict[str, object]:
        text = pybase64.b64encode_as_string(self.data)
        return {"dtype": "float32", "shape": list(self.shape), "data": text}

    def __repr__(self) -> str:
        return f"Array{self.shape}"


def _kinds_in(value: object) -> set[type]:
    """The types of a value, and of all items of (nested) lists or tuples."""
    found: set[type] = set()
    left: list[Any] = [[value]]
    while left:
        items = left.pop()
        kinds = set(map(type, items))
        found |= kinds
        if not kinds.isdisjoint((list, tuple)):
            left += [item for item in items if isinstance(item, list | tuple)]
    return found


def _without_tensors(value: Any, kinds: set[type]) -> Any:
    """The value with numpy arrays in place of torch tensors, also inside (nested) lists. `kinds` is
    the result of `_kinds_in`."""
    if not any(hasattr(kind, "detach") for kind in kinds):
        return value
    if hasattr(value, "detach"):
        tensor = value.detach().to("cpu")
        # numpy has no bfloat16.
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(value, list | tuple):
        return [_without_tensors(item, kinds) for item in value]
    return value


def _checked(found: NDArray[Any], where: str, most_dimensions: int) -> Array:
    if not 1 <= found.ndim <= most_dimensions or 0 in found.shape:
        raise SpecError(
            f"{where} has shape {found.shape}; it must have 1 to {most_dimensions} dimensions, "
            "none of size 0."
        )
    if found.size > MAX_NUMBERS:
        raise SpecError(f"{where} has {found.size:,} numbers; at most {MAX_NUMBERS:,}.")
    with np.errstate(over="ignore"):
        numbers = np.ascontiguousarray(found, "<f4")
    _check_finite(numbers, where)
    return Array(tuple(int(n) for n in found.shape), numbers.tobytes())


def _check_finite(numbers: NDArray[np.float32], where: str) -> None:
    if not np.isfinite(numbers).all():
        bad = np.argwhere(~np.isfinite(numbers))[0].tolist()
        raise SpecError(f"{where} is NaN or infinite at {bad}; its numbers must be finite.")


def _from_json(body: dict[Any, Any], where: str, most_dimensions: int) -> Array:
    if set(body) != {"dtype", "shape", "data"}:
        raise SpecError(f"{where} is {shown(body)}; it must be {{dtype, shape, data}}, or numbers.")
    dtype = checked_word(body["dtype"], DTYPES, f"{where}.dtype")
    shape, text = body["shape"], body["data"]
    sane = isinstance(shape, list) and 1 <= len(shape) <= most_dimensions
    if not sane or any(type(n) is not int or not 1 <= n <= sys.maxsize for n in shape):
        raise SpecError(
            f"{where}.shape is {shown(shape)}; it must be 1 to {most_dimensions} positive whole "
            "numbers of at most 63 bits."
        )
    if math.prod(shape) > MAX_NUMBERS:
        raise SpecError(f"{where} has {math.prod(shape):,} numbers; at most {MAX_NUMBERS:,}.")
    if not isinstance(text, str):
        raise SpecError(f"{where}.data is {shown(text)}; it must be a base64 string.")
    size = np.dtype(DTYPES[dtype]).itemsize * math.prod(shape)
    if len(text) > 4 * -(-size // 3):  # the length is checked before the text is decoded
        raise SpecError(
            f"{where}.data has {len(text):,} characters; the {size:,} bytes of {dtype} of shape "
            f"{shape} take {4 * -(-size // 3):,}."
        )
    try:
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise SpecError(f"{where}.data is not base64.") from None
    if len(data) != size:
        raise SpecError(
            f"{where}.data has {len(data)} bytes; {dtype} of shape {shape} takes {size}."
        )
    found = np.frombuffer(data, DTYPES[dtype]).reshape(shape)
    if dtype == "float32":
        _check_finite(found, where)
        return Array(tuple(shape), data)
    if dtype == "bfloat16":
        found = of_bfloat16(found)
    return _checked(found, where, most_dimensions)


def of_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers with these bfloat16 bits, as float32. (numpy has no bfloat16.)"""
    return (bits.astype("<u4") << 16).view("<f4")
