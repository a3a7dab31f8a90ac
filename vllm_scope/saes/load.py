"""Loads SAEs from paths. The names of the files determine the format.

Owns:  load_sae, load_saes, and the table of formats.
From:  the loaders (one Python file for each family of formats). To: callers that need an Sae.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import SiteLayer
from vllm_scope.saes import (
    cross_layer,
    gemma_scope,
    llama_scope,
    qwen_scope,
    saelens,
    sparsify,
)
from vllm_scope.saes.arrays import Given
from vllm_scope.saes.places import place_of
from vllm_scope.saes.sae import Sae

#: The loader of each format, by the names of the files in a folder of this format.
_FORMATS: dict[tuple[str, ...], Callable[[Path, Given], Sae]] = {
    (saelens.CONFIG, saelens.WEIGHTS): saelens.load,
    (sparsify.CONFIG, sparsify.WEIGHTS): sparsify.load,
    (gemma_scope.NPZ,): gemma_scope.load_npz,
    (gemma_scope.SAFETENSORS,): gemma_scope.load_safetensors,
    (llama_scope.CONFIG, llama_scope.WEIGHTS): llama_scope.load,
}


def load_sae(
    path: str | Path,
    *,
    name: str | None = None,
    place: SiteLayer | str | None = None,
    k: int | None = None,
    norm_scaling_factor: float | None = None,
) -> Sae:
    """Load an SAE. The matrices of the SAE stay in the file until a computation uses them.

    Args:
        path: a folder in the format of SAELens, sparsify, Gemma Scope or Llama Scope; a file
            `layer{n}.sae.pt` of Qwen-Scope; or a file `W_enc_{n}.safetensors` with one encoder of a
            cross-layer transcoder.
        name: the SAE's name in messages. If None, the path is the name.
        place: (site, layer), or the name of a hook such as `blocks.12.hook_resid_post`. If None,
            the place comes from the files or the names of the folders.
        k: the k of a TopK SAE, if the files and the names of the folders do not contain k.
        norm_scaling_factor: the factor by which rows are multiplied before the encoder. Only SAEs
            of SAELens with `normalize_activations` need this factor.

    Raises:
        SpecError: the format is unknown, a file is malformed, or the kind of SAE is not supported.
            The error's message names the file.
        OSError: a file cannot be read.
    """
    path = Path(path)
    given = Given(
        name=str(path) if name is None else name,
        place=None if place is None else place_of(place, "place"),
        k=k,
        norm_scaling_factor=norm_scaling_factor,
    )
    sae = _load(path, given)
    if k not in (None, sae.k):
        raise SpecError(f"k is {shown(k)}; {path} says {shown(sae.k)}: leave k out.")
    if norm_scaling_factor not in (None, sae.input_scale):
        raise SpecError(f"{path} needs no norm_scaling_factor; leave norm_scaling_factor out.")
    return sae


def load_saes(paths: Mapping[str, str | Path]) -> dict[str, Sae]:
    """Load the SAEs of a dict {name: path}, and return a dict {name: SAE}. If a path is the folder
    of a cross-layer transcoder, the returned dict has the encoders of all layers, with the names
    NAME.0, NAME.1 and so on.

    Raises:
        SpecError: two SAEs have the same name, or an SAE cannot be loaded.
    """
    found: list[Sae] = []
    for name, path in paths.items():
        try:
            if cross_layer.is_clt(Path(path)):
                found += cross_layer.load_encoders(Path(path), name)
            else:
                found.append(load_sae(path, name=name))
        except (SpecError, OSError) as error:
            raise SpecError(f"the SAE {shown(name)}: {error}") from error
    saes = {sae.name: sae for sae in found}
    if len(saes) < len(found):
        names = [sae.name for sae in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise SpecError(f"two SAEs are called {shown(twice)}; give each its own name.")
    return saes


def _load(path: Path, given: Given) -> Sae:
    if path.name.endswith(qwen_scope.SUFFIX):
        return qwen_scope.load(path, given)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there; it must be a folder with an SAE, or the file of an SAE."
        )
    if path.is_file() and cross_layer.layer_in(path) is not None:
        encoder = cross_layer.load_encoder(path, given.name)
        return encoder if given.place is None else replace(encoder, place=given.place)
    if cross_layer.is_clt(path):
        raise SpecError(
            f"{path} belongs to a cross-layer transcoder; give the file of a layer, such as "
            f"{cross_layer.ENCODER.format(0)}, or use vllm_scope.saes.cross_layer.load_clt."
        )
    if path.is_file() and any(path.name == files[-1] for files in _FORMATS):
        path = path.parent
    for files, load in _FORMATS.items():
        if all((path / file).is_file() for file in files):
            return load(path, given)
    known = "; ".join(" and ".join(files) for files in _FORMATS)
    raise SpecError(
        f"{path} is not a folder with an SAE. Such a folder has {known}. The name of a single "
        f"file is layer{{n}}{qwen_scope.SUFFIX} or {cross_layer.ENCODER.format('{n}')}."
    )
