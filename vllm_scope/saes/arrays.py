"""Maps the tensors of a file, and reads the JSON files of SAEs.

Owns:  the readers of safetensors files, npz files and configurations; `Given`.
To:    the loaders of all SAE formats.

Promise: each tensor is a view of a file that is mapped into memory. Therefore only the numbers that
are used are read from disk. A tensor larger than its file is refused. Code in a file is never run.
"""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import Place
from vllm_scope.vectors.containers import check_new, read_bytes, stored_array

Tensors = dict[str, Tensor]
Config = TypeVar("Config")


@dataclass(frozen=True)
class Given:
    """Properties that the caller gave for an SAE. If a property is None, the loader reads it from
    the SAE's files, or from the names of the folders."""

    name: str
    place: Place | None = None
    k: int | None = None
    norm_scaling_factor: float | None = None


def read_config(path: Path, kind: type[Config], what: str = "an SAE") -> Config:
    """Read the configuration in a JSON file as an object of type `kind`. Fields that `kind` does
    not have are ignored.

    Raises:
        SpecError: the file is too large or not JSON, or a field is missing or has the wrong type.
        OSError: the file cannot be read.
    """
    try:
        return msgspec.json.decode(read_bytes(path), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{path} is not the configuration of {what}: {error}.") from None


def map_safetensors(path: Path) -> Tensors:
    """The tensors of a safetensors file, by name. Raises SpecError if the file is malformed. Raises
    OSError if the file cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, ValueError, TypeError, RuntimeError) as error:
        raise SpecError(f"{path} is not safetensors that can be read: {error}.") from None


def map_npz(path: Path) -> Tensors:
    """The tensors of an .npz file, by name. Raises SpecError if the file is malformed or
    compressed, or has an array that is not floats in C order. Raises OSError if the file cannot be
    read."""
    tensors: Tensors = {}
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            # Copy on write. If a caller writes to a tensor, the file does not change.
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise ValueError(f"{shown(info.filename)} is compressed; use numpy.savez")
                one = stored_array(file, archive, info)
                if one.dtype.kind != "f" or one.fortran:
                    raise ValueError(f"{shown(info.filename)} does not have floats in C order")
                if not one.is_whole:
                    raise ValueError(
                        f"{shown(info.filename)} has {one.num_bytes:,} bytes; its shape "
                        f"{shown(list(one.shape))} needs another number of bytes"
                    )
                array = np.frombuffer(view, one.dtype, one.num_items, one.start)
                name = info.filename.removesuffix(".npy")
                check_new(name, tensors)
                tensors[name] = torch.from_numpy(array.reshape(one.shape))
    except OSError:
        raise
    except Exception as error:  # zipfile and numpy's parser raise many types of errors
        raise SpecError(f"{path} is not an .npz that can be read: {error}.") from None
    return tensors


def only(
    tensors: Tensors, needed: Collection[str], path: Path, optional: Collection[str] = ()
) -> Tensors:
    """Check and return the tensors of a file. Raises SpecError if a needed tensor is missing, if a
    tensor is neither needed nor optional, or if a needed weight is not a matrix."""
    for name in needed:
        if name not in tensors:
            raise SpecError(
                f"{path} has no {shown(name)}; an SAE of this format has {', '.join(needed)}."
            )
        if (name.startswith("W_") or name.endswith(".weight")) and tensors[name].ndim != 2:
            shape = list(tensors[name].shape)
            raise SpecError(f"{path}: {shown(name)} has shape {shape}; it must be a matrix.")
    if more := sorted(set(tensors) - set(needed) - set(optional)):
        raise SpecError(
            f"{path} has {shown(more[0])}, which an SAE of this format does not have; the tensors "
            f"of this format are {', '.join((*needed, *optional))}."
        )
    return tensors
