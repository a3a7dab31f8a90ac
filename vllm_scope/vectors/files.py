"""Steering modules in files and as bytes, in the formats of several programs.

Owns:  the names of tensors, which contain site and layer; the metadata; readers and writers.
From:  containers.py, hooks.py. To: SteeringModule.

| name of a tensor     | written by            | site                           | layer            |
|----------------------|-----------------------|--------------------------------|------------------|
| `{site}.{layer}`     | vllm-scope            | in the name                    | in the name      |
| `direction.{number}` | vllm-scope and others | in the metadata, or resid_post | number - base    |
| `{number}`           | users                 | in the metadata, or resid_post | number - base    |

A tier is a set of vectors that act only on prompt tokens, or only on generated tokens. The names of
these vectors have the prefix `prompt:` or `generated:`. JSON files have the form of the steering
fork of vLLM, which hooks.py describes. In the table, the base is the field `index_base` of the
metadata: "0" (the default) or "1". repeng computes `direction.5` from Hugging Face's
`hidden_states[6]`, the rows at the exit of layer 5 (the first layer is 0). llama.cpp adds the
vector `direction.5` at the same place, which is `resid_post` 5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from vllm_scope.errors import SpecError, naming, shown
from vllm_scope.request.sites import SiteLayer
from vllm_scope.vectors.containers import (
    Arrays,
    read_bytes,
    read_gguf,
    read_npz,
    read_safetensors,
    write_gguf,
)
from vllm_scope.vectors.hooks import module_from_json
from vllm_scope.vectors.module import Provenance, SteeringModule, as_stream, name_of

DEFAULT_SITE = "resid_post"
#: In a GGUF file, the architecture of a control vector, and the prefix of vllm-scope's fields.
_CONTROL, _OURS = "controlvector", "vllm_scope."

# The pattern also matches layers above MAX_LAYER, but `as_stream` refuses such layers.
_NAME = re.compile(r"(?:(?P<tier>[a-z]+):)?(?:(?P<site>[a-z_]+)\.)?(?P<number>[0-9]{1,5})")


def load_vectors(path: str | Path) -> SteeringModule:
    """Load a steering module from a .safetensors, .gguf, .npz or .json file.

    Each tensor must be a vector with a name that files.py lists in its table. A .json file has the
    form that hooks.py describes. Unknown metadata are ignored.

    Raises:
        SpecError: the path has another ending, the file is too large or malformed, or a tensor has
            a wrong name or wrong values. The message names the file and the tensor.
        ImportError: the `gguf` library (`vllm-scope[gguf]`) for .gguf files is not installed.
        OSError: the file cannot be read.
    """
    path = Path(path)
    readers: dict[str, Callable[[Path], SteeringModule]] = {
        ".safetensors": lambda path: from_bytes(read_bytes(path)),
        ".gguf": _load_gguf,
        ".npz": lambda path: _module(read_npz(read_bytes(path)), DEFAULT_SITE, 0, Provenance()),
        ".json": lambda path: module_from_json(read_bytes(path)),
    }
    if path.suffix not in readers:
        raise SpecError(f"{path} ends in {path.suffix!r}; only {', '.join(readers)} are read.")
    with naming(str(path)):
        return readers[path.suffix](path)


def save_vectors(path: str | Path, module: SteeringModule) -> None:
    """Write a module to a .safetensors or .gguf file.

    The content of a .safetensors file is `to_bytes(module)`. A .gguf file is a control vector in
    repeng's form. `load_vectors` reads both formats. llama.cpp reads .gguf files, but does not use
    a vector of layer 0.

    Raises:
        SpecError: the path has another ending. Or the path ends in .gguf, and the module has a
            vector of a tier, or of another site than `resid_post`.
        ImportError: the `gguf` library (`vllm-scope[gguf]`) for .gguf files is not installed.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        _save_gguf(path, module)
    elif path.suffix == ".safetensors":
        path.write_bytes(to_bytes(module))
    else:
        raise SpecError(
            f"{path} ends in {path.suffix!r}; modules are saved as .safetensors or .gguf."
        )


def to_bytes(module: SteeringModule) -> bytes:
    """The module as the content of a safetensors file. `from_bytes` is the inverse.

    If the module has one site and no tiers, the tensors have the names `direction.{layer}`, which
    other programs also use. The metadata then have the site. Otherwise the names are
    `{site}.{layer}`, or `{tier}:{site}.{layer}` for a tier.
    """
    from safetensors.numpy import save

    metadata = _provenance_to_metadata(module.provenance) | {"index_base": "0"}
    if len(module.sites) > 1 or module.tiers:
        return save({name_of(place): vector for place, vector in module.placed()}, metadata)
    named = {f"direction.{layer}": vector for (_, layer), vector in module.items()}
    return save(named, metadata | {"site": module.sites[0]})


def from_bytes(data: bytes) -> SteeringModule:
    """Read a module from the content of a safetensors file of vllm-scope or of another program.

    Untrusted content is safe, because its size is limited and no code in the content runs.

    Raises:
        SpecError: the content is too large or malformed, or a tensor has a wrong name or wrong
            values.
    """
    arrays, metadata = read_safetensors(data)
    base = metadata.get("index_base", "0")
    if base not in ("0", "1"):
        raise SpecError(f"metadata index_base is {shown(base)}; it must be '0' or '1'.")
    site = metadata.get("site", DEFAULT_SITE)
    return _module(arrays, site, int(base), _provenance_of_metadata(metadata))


def _load_gguf(path: Path) -> SteeringModule:
    arrays, texts = read_gguf(path)
    architecture = texts.get("general.architecture")
    if architecture != _CONTROL:
        raise SpecError(f"general.architecture is {shown(architecture)}; it must be {_CONTROL!r}.")
    ours = {
        name.removeprefix(_OURS): text for name, text in texts.items() if name.startswith(_OURS)
    }
    provenance = _provenance_of_metadata(ours) if ours else Provenance(
        model=texts.get(f"{_CONTROL}.model_hint"), method=texts.get(f"{_CONTROL}.method")
    )  # fmt: skip
    return _module(arrays, DEFAULT_SITE, 0, provenance)


def _save_gguf(path: Path, module: SteeringModule) -> None:
    for place, _ in module.placed():
        if place[0] != DEFAULT_SITE or len(place) > 2:
            raise SpecError(
                f"the module has {name_of(place)}; a .gguf file can have only vectors of "
                f"{DEFAULT_SITE} for every token; save the module as .safetensors."
            )
    provenance = module.provenance
    fields: dict[str, str | int] = {
        # repeng needs this field.
        f"{_CONTROL}.model_hint": provenance.model or "unknown",
        f"{_CONTROL}.layer_count": len(module),
    }
    if provenance.method:
        fields[f"{_CONTROL}.method"] = provenance.method
    metadata = _provenance_to_metadata(provenance)
    fields |= {f"{_OURS}{name}": text for name, text in metadata.items()}
    vectors = {f"direction.{layer}": vector for (_, layer), vector in module.items()}
    write_gguf(path, _CONTROL, fields, vectors)


def _module(arrays: Arrays, site: str, base: int, provenance: Provenance) -> SteeringModule:
    by_tier: dict[str | None, dict[SiteLayer, np.ndarray]] = {None: {}}
    for name, array in arrays.items():
        stream, tier = _place_of(name, site, base)
        vectors = by_tier.setdefault(tier, {})
        if stream in vectors:
            raise SpecError(f"{shown(name)} is a second vector for {name_of(stream)}.")
        if array.ndim != 1:
            raise SpecError(
                f"{shown(name)} has shape {list(array.shape)}; a vector is [hidden_size]."
            )
        vectors[stream] = array
    everywhere = by_tier.pop(None)
    return SteeringModule(everywhere, provenance, {k: v for k, v in by_tier.items() if k})


def _place_of(name: str, site: str, base: int) -> tuple[SiteLayer, str | None]:
    """The stream and the tier that a tensor's name means."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise SpecError(
            f"{shown(name)} is no name of a vector; a name must be 'direction.<layer>' or "
            "'<site>.<layer>', such as 'resid_post.5'."
        )
    number = int(match["number"])
    if match["site"] in ("direction", None):
        return as_stream((site, number - base)), match["tier"]
    return as_stream((match["site"], number)), match["tier"]


def _provenance_to_metadata(provenance: Provenance) -> dict[str, str]:
    """The texts of all fields that are not None, by name. `repr` writes all digits of a float."""
    return {
        name: value if isinstance(value, str) else repr(value)
        for name, value in vars(provenance).items()
        if value is not None
    }


def _provenance_of_metadata(metadata: Mapping[str, str]) -> Provenance:
    scale = metadata.get("scale", "1.0")
    try:
        number = float(scale)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(f"metadata scale is {shown(scale)}; it must be a finite number.")
    normalised = metadata.get("normalised")
    if normalised not in ("True", "False", None):
        raise SpecError(
            f"metadata normalised is {shown(normalised)}; it must be 'True' or 'False'."
        )
    texts = ("model", "revision", "method", "dataset", "created_by")
    return Provenance(
        **{name: metadata.get(name) for name in texts},
        scale=number,
        normalised=None if normalised is None else normalised == "True",
    )
