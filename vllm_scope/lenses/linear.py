"""Affine maps from the residual stream at some layers to the final stream, and their files.

Owns:  LinearLens; LensFile (a lens in the operator's options); `load_lens`, `load_lenses`.
Runs:  on the CPU, in any process with torch.
From:  safetensors files. To: worker.lens, analysis.

`load_lens` reads lenses in two forms, which are described here. Pickle files are not read.

The first form is a safetensors file with `{layer}.weight` [d, d] for each layer of the lens, and
optionally `{layer}.bias` [d]. The map of a row x is weight x + bias. If `residual` is "true" in the
file's metadata, the map is x + weight x + bias.
The metadata can name the site of the rows. The default site is `resid_post`. The file of a J-lens
also has this form, with the matrix J as the weight at `resid_post`.

The second form is a folder of the package tuned-lens, with `config.json` and `params.safetensors`.
The file `params.safetensors` has the tensors of tuned-lens's `params.pt`, with the same names as in
the first form. The map is x + weight x + bias. Map i is for `resid_pre` of layer i, the row that
enters the layer.

The formulas are those of tuned-lens 0.2 (TunedLens.transform_hidden and TunedLens.save) and of
jlens. In jlens's JacobianLens, the map is `J_l @ h`, where h is the row that leaves layer l.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_scope.errors import ConfigError, SpecError, shown
from vllm_scope.request.sites import LENS_SITES, MAX_LAYER, Place, SiteLayer
from vllm_scope.saes.arrays import Tensors, map_safetensors, read_config

#: The names of the two files in a folder of the package tuned-lens.
CONFIG, WEIGHTS = "config.json", "params.safetensors"
_NAME = re.compile(r"([0-9]{1,5})\.(weight|bias)")


class Affine(NamedTuple):
    """One affine map, with the weight [d, d], and the bias [d] or None. The result for a row x is
    weight x + bias. If the map belongs to a lens that is `residual`, x is also added."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LinearLens:
    """Affine maps of rows to the model's final residual stream, one map for each place.

    Attributes:
        name: the name of the lens in error messages.
        maps: the map of each place (site, layer). The tensors have a float dtype, and are on the
            CPU. The tensors can be views of a mapped file.
        residual: True if the map of a row x is x + weight x + bias, False if it is weight x + bias.
        path: the file with the tensors. None if the lens is not from a file.

    Raises:
        SpecError: `maps` is empty, a site is not resid_pre, resid_mid or resid_post, or a tensor
            has a wrong shape or dtype.
    """

    name: str
    maps: Mapping[SiteLayer, Affine]
    residual: bool = False
    path: Path | None = None

    def __post_init__(self) -> None:
        if not self.maps:
            raise self._wrong("it has no maps")
        object.__setattr__(self, "maps", {Place(*at): one for at, one in self.maps.items()})
        first, (weight, _) = next(iter(self.places.items()))
        if weight.ndim != 2 or not weight.numel():
            raise self._wrong(
                f"the map of {first.site} {first.layer} has a weight of shape "
                f"{list(weight.shape)}; it must be a matrix, [d_model, d_model]"
            )
        for place, (weight, bias) in self.places.items():
            if place.site not in LENS_SITES:
                raise self._wrong(f"a map is of {place.site!r}; sites are {', '.join(LENS_SITES)}")
            for tensor, shape in ((weight, [self.d_model] * 2), (bias, [self.d_model])):
                if tensor is None:
                    continue
                if list(tensor.shape) != shape or not tensor.is_floating_point():
                    raise self._wrong(
                        f"the map of {place.site} {place.layer} has {tensor.dtype} "
                        f"{list(tensor.shape)}; it must be of floats, {shape}"
                    )

    @property
    def places(self) -> Mapping[Place, Affine]:
        """The same object as `maps`, with Place as the type of the keys."""
        return cast(Mapping[Place, Affine], self.maps)

    @property
    def sha256(self) -> str | None:
        """The SHA-256 of the file at `path`, in hexadecimal. None if `path` is None. Each access
        reads the whole file. If the file cannot be read, an OSError is raised."""
        return None if self.path is None else sha256_of(self.path)

    @property
    def d_model(self) -> int:
        """The number of elements of a row."""
        return next(iter(self.maps.values())).weight.shape[-1]

    def map(self, rows: Tensor, place: SiteLayer) -> Tensor:
        """Apply the map of a place to rows of this place. The results are input rows for the
        model's final norm.

        Args:
            rows: [..., d_model], any float dtype, on the CPU.

        Returns:
            [..., d_model], float64.

        Raises:
            SpecError: the lens has no map for the place, the rows have another width, or a number
                of the map is not finite in float32.
        """
        if place not in self.maps:
            known = ", ".join(f"{site} {layer}" for site, layer in self.maps)
            raise self._wrong(f"it has no map of {tuple(place)}; it has {known}")
        if rows.shape[-1:] != (self.d_model,):
            raise self._wrong(f"it maps rows of {self.d_model}, not of shape {list(rows.shape)}")
        weight, bias = self.checked(Place(*place))
        x = rows.double()
        found = x @ weight.double().T
        if bias is not None:
            found += bias.double()
        return found + x if self.residual else found

    def checked(self, place: Place) -> Affine:
        """The map of a place. Raises SpecError if a number of the map is not finite in float32."""
        one = self.maps[place]
        for tensor in one:
            if tensor is not None and not tensor.float().isfinite().all():
                raise self._wrong(
                    f"the map of {place.site} {place.layer} has a number that is not finite in "
                    "float32"
                )
        return one

    def save(self, path: str | Path) -> str:
        """Write a file that `load_lens` reads, and return its SHA-256 in hexadecimal.

        Raises:
            SpecError: the lens has maps of several sites, but a file can name only one site.
        """
        sites = {place.site for place in self.places}
        if len(sites) > 1:
            raise self._wrong(f"it has maps of {', '.join(sorted(sites))}; a file has one site")
        tensors: Tensors = {}
        for place, one in self.places.items():
            for name, tensor in zip(("weight", "bias"), one, strict=True):
                if tensor is not None:
                    tensors[f"{place.layer}.{name}"] = tensor.contiguous()
        # safetensors refuses tensors that share memory, such as an identity at several layers.
        seen: dict[int, str] = {}
        for name, tensor in tensors.items():
            if seen.setdefault(tensor.data_ptr(), name) != name:
                tensors[name] = tensor.clone()
        said = {"site": sites.pop(), "residual": str(self.residual).lower()}
        save_file(tensors, path, said)
        return sha256_of(Path(path))

    def _wrong(self, what: str) -> SpecError:
        return SpecError(f"the lens {shown(self.name)}: {what}.")


@dataclass(frozen=True)
class LensFile:
    """A lens in the operator's options, with the path and the required digest of the file.

    Attributes:
        sha256: the required digest of the file with the tensors, in hexadecimal. If None, every
            digest is allowed.
    """

    path: str
    sha256: str | None = None

    @staticmethod
    def parse(value: object, where: str) -> LensFile:
        """Parse a path, or an object with `path` and optional `sha256`. Raises ConfigError."""
        body = {"path": value} if isinstance(value, str) else value
        if (
            isinstance(body, Mapping)
            and isinstance(body.get("path"), str)
            and set(body) <= {"path", "sha256"}
        ):
            digest = body.get("sha256")
            if digest is None or (
                isinstance(digest, str) and re.fullmatch(r"[0-9a-fA-F]{64}", digest)
            ):
                return LensFile(body["path"], digest and digest.lower())
        raise ConfigError(
            f"{where} is {shown(value)}; it must be a path, or an object with path and sha256 (64 "
            "hexadecimal digits)."
        )

    def load(self, name: str) -> LinearLens:
        """Load the lens. Raises the same exceptions as `load_lens`."""
        return load_lens(self.path, name=name, sha256=self.sha256)


class _Tuned(msgspec.Struct):
    lens_type: str = "linear_tuned_lens"
    d_model: int | None = None


def load_lens(
    path: str | Path, *, name: str | None = None, sha256: str | None = None
) -> LinearLens:
    """Load a lens. The matrices stay in the file until a call uses them.

    Args:
        path: a safetensors file, or a folder of tuned-lens.
        name: the name of the lens in error messages. If None, the path is the name.
        sha256: the required digest of the file with the tensors, in hexadecimal. If None, every
            digest is allowed.

    Raises:
        SpecError: the layout is unknown, the file is malformed, or the digest differs.
        OSError: a file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; it must be a lens's file, or its folder.")
    tuned = path.is_dir()
    file = path / WEIGHTS if tuned else path
    if tuned and not file.is_file():
        raise SpecError(
            f"{path} has no {WEIGHTS}; save the tensors of its params.pt under that name, with "
            "safetensors.torch.save_file, because a worker unpickles nothing."
        )
    if sha256 is not None and (found := sha256_of(file)) != sha256.lower():
        raise SpecError(f"{file} is another file: its SHA-256 is {found}, not {sha256}.")
    tensors = map_safetensors(file)
    with safe_open(file, framework="pt") as opened:
        said = opened.metadata() or {}
    site, residual = said.get("site", "resid_post"), said.get("residual", "false")
    if residual not in ("true", "false"):
        raise SpecError(f"{file}: residual is {shown(residual)}; it must be 'true' or 'false'.")
    if tuned:
        config = read_config(path / CONFIG, _Tuned, "a lens")
        if config.lens_type != "linear_tuned_lens":
            raise SpecError(
                f"{path / CONFIG} has the lens_type {shown(config.lens_type)}; "
                "it must be 'linear_tuned_lens'."
            )
        site, residual = "resid_pre", "true"
    return LinearLens(name or str(path), _maps(tensors, file, site), residual == "true", file)


def load_lenses(entries: Mapping[str, object]) -> dict[str, LinearLens]:
    """Load the lenses of the operator's entries, and return the lenses by name. An entry is a path
    or an object.

    Raises:
        ConfigError: `LensFile.parse` refuses an entry.
        SpecError, OSError: the errors of `load_lens`, which is called for each entry.
    """
    parsed = {name: LensFile.parse(value, f"lenses.{name}") for name, value in entries.items()}
    return {name: one.load(name) for name, one in parsed.items()}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _maps(tensors: Tensors, path: Path, site: str) -> dict[SiteLayer, Affine]:
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) >= MAX_LAYER:
            raise SpecError(
                f"{path} has {shown(name)}; a lens has LAYER.weight, and maybe LAYER.bias."
            )
        of_layer = found.setdefault(int(match[1]), {})
        if match[2] in of_layer:
            raise SpecError(
                f"{path} has {shown(name)}, which is a second {match[2]} of layer "
                f"{int(match[1])}; a lens has one map for each layer. Keep one of the two."
            )
        of_layer[match[2]] = tensor
    for layer, one in found.items():
        if "weight" not in one:
            raise SpecError(f"{path} has {layer}.bias and no {layer}.weight.")
    return {
        Place(site, layer): Affine(found[layer]["weight"], found[layer].get("bias"))
        for layer in sorted(found)
    }
