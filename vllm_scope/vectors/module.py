"""A steering module: float32 vectors by (site, layer), identified by a digest of its content.

Owns:  SteeringModule, Provenance; `as_vector`, which converts a list, an array or a tensor.
Runs:  anywhere, with numpy only.
To:    files, analysis, core.registry.

Promise: the constructor checks a module, and the module never changes. Modules with equal digests
have the same vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import ALIASES, STREAM_SITES, SiteLayer

#: The largest layer number. No model has more layers, so a larger number in a file is a mistake.
MAX_LAYER = 9999
MAX_VECTORS = 4096
#: The names of the tiers. A tier is a set of vectors that act only on prompt tokens, or only on
#: generated tokens.
TIERS = ("prompt", "generated")

Vector = NDArray[np.float32]
#: The key of a vector: (site, layer), or (site, layer, tier) if the vector belongs to a tier.
VectorKey = tuple[str, int] | tuple[str, int, str]


@dataclass(frozen=True)
class Provenance:
    """The origin of a module's vectors. The digest of a module does not depend on the origin.

    Attributes:
        model, revision: the model whose rows gave the vectors, and the revision of this model.
        method: the method of the computation, such as "mean_difference".
        dataset: the digest "sha256:..." of the contrast pairs, as `analysis.contrast.pairs_digest`
            returns it.
        scale: the factor by which the author multiplies the vectors. The stored vectors do not
            include the factor.
        normalised: True if the vectors have length 1. None if the length is unknown.
        created_by: the program that made the vectors, and the program's version.
    """

    model: str | None = None
    revision: str | None = None
    method: str | None = None
    dataset: str | None = None
    scale: float = 1.0
    normalised: bool | None = None
    created_by: str | None = None

    def __post_init__(self) -> None:
        # float() is called, because the repr of a numpy number differs from Python's repr.
        object.__setattr__(self, "scale", float(self.scale))
        if self.normalised is not None:
            object.__setattr__(self, "normalised", bool(self.normalised))


@dataclass(frozen=True, init=False, eq=False, repr=False)
class SteeringModule(Mapping[SiteLayer, Vector]):
    """Read-only vectors by (site, layer). All vectors have the same size. Modules with equal
    content are equal.

    The mapping has the vectors that act on every token. `tiers` has the vectors that act only on
    prompt tokens or only on generated tokens.

    Args:
        vectors: vectors [hidden_size] by (site, layer). A vector is a list of numbers, a numpy
            array, or a torch tensor of any float dtype and device. The module copies the vectors as
            float32. Sites must be on the residual stream. The only layer of the site `embed` is 0.
        provenance: the origin of the vectors.
        tiers: for each tier, "prompt" or "generated", vectors in the same form. The vectors of the
            tier "prompt" are added only at prompt tokens, and the vectors of "generated" only at
            generated tokens. `vectors` are added at these tokens too.

    Raises:
        SpecError: the module has no vectors or more than MAX_VECTORS; a tier is unknown; a key is
            not (site, layer); two keys are names of one stream, such as `pre_attn` and `resid_pre`
            of one layer; a vector has a wrong rank or type; a vector has NaN or infinity in
            float32; or vectors have different sizes.
    """

    vectors: Mapping[SiteLayer, Vector]
    provenance: Provenance
    tiers: Mapping[str, Mapping[SiteLayer, Vector]]

    def __init__(
        self,
        vectors: Mapping[SiteLayer, object],
        provenance: Provenance | None = None,
        tiers: Mapping[str, Mapping[SiteLayer, object]] = MappingProxyType({}),
    ) -> None:
        if unknown := sorted(set(tiers) - set(TIERS)):
            raise SpecError(f"the module has the tier {shown(unknown[0])}; tiers are {TIERS}.")
        count = len(vectors) + sum(map(len, tiers.values()))
        if not count:
            raise SpecError("the module has no vectors; give at least one (site, layer).")
        if count > MAX_VECTORS:
            raise SpecError(f"the module has {count:,} vectors; at most {MAX_VECTORS} are allowed.")
        kept = {tier: _kept(tiers[tier], tier) for tier in TIERS if tiers.get(tier)}
        object.__setattr__(self, "vectors", _kept(vectors, None))
        object.__setattr__(self, "provenance", provenance or Provenance())
        object.__setattr__(self, "tiers", MappingProxyType(kept))
        sizes = {name_of(place): len(vector) for place, vector in self.placed()}
        first, size = next(iter(sizes.items()))
        for name, other in sizes.items():
            if other != size:
                raise SpecError(
                    f"{name} has {other:,} values and {first} has {size:,}; the vectors of a "
                    "module are of one hidden size."
                )

    def placed(self) -> Iterator[tuple[VectorKey, Vector]]:
        """Yield each vector with its key. The key is (site, layer), or (site, layer, tier) for a
        vector of a tier."""
        yield from self.vectors.items()
        for tier, vectors in self.tiers.items():
            for stream, vector in vectors.items():
                yield (*stream, tier), vector

    def __reduce__(self) -> tuple[object, ...]:
        # Copying and unpickling call the constructor, so that the vectors of the new module are
        # read-only too.
        tiers = {tier: dict(vectors) for tier, vectors in self.tiers.items()}
        return SteeringModule, (dict(self.vectors), self.provenance, tiers)

    def __getitem__(self, stream: SiteLayer) -> Vector:
        try:
            return self.vectors[as_stream(stream)]
        except KeyError:
            held = ", ".join(map(name_of, self))
            raise KeyError(f"{stream} is not in this module, which has {held}.") from None

    def __iter__(self) -> Iterator[SiteLayer]:
        return iter(self.vectors)

    def __len__(self) -> int:
        return len(self.vectors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SteeringModule) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        names = ", ".join(name_of(place) for place, _ in self.placed())
        return f"SteeringModule({names}; {self.digest[:19]})"

    @property
    def hidden_size(self) -> int:
        return len(next(vector for _, vector in self.placed()))

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place[0] for place, _ in self.placed()))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the keys and of the bits of the values, as "sha256:..."."""
        content = hashlib.sha256(b"vllm-scope steering vectors\n")
        for place, vector in self.placed():
            content.update(f"{name_of(place)} {len(vector)}\n".encode())
            content.update(vector.astype("<f4").tobytes())
        return f"sha256:{content.hexdigest()}"


def _kept(vectors: Mapping[SiteLayer, object], tier: str | None) -> Mapping[SiteLayer, Vector]:
    """Make read-only copies of vectors, sorted by site and layer."""
    kept: dict[SiteLayer, Vector] = {}
    for key, value in vectors.items():
        stream = as_stream(key)
        if stream in kept:
            raise SpecError(f"the module has {stream} twice; the second key is {shown(key)}.")
        kept[stream] = as_vector(value, name_of(stream if tier is None else (*stream, tier)))
    ordered = sorted(kept.items(), key=lambda item: (STREAM_SITES.index(item[0][0]), item[0]))
    return MappingProxyType(dict(ordered))


def name_of(place: VectorKey) -> str:
    """A vector's name in files and errors, such as "resid_post.5" or "generated:resid_post.5"."""
    return "".join(f"{tier}:" for tier in place[2:]) + f"{place[0]}.{place[1]}"


def as_stream(key: object) -> SiteLayer:
    """Check a key, and return (site, layer). An alias of a site is replaced by the site's name.

    Raises:
        SpecError: `key` is not a pair of a site on the residual stream and a layer from 0.
    """
    if not isinstance(key, tuple) or len(key) != 2:
        raise SpecError(f"{shown(key)} is not a (site, layer), such as ('resid_post', 5).")
    site, layer = key
    name = ALIASES.get(site, site) if isinstance(site, str) else site
    if name not in STREAM_SITES:
        raise SpecError(
            f"{shown(key)} has site {shown(site)}; a vector acts at one of "
            f"{', '.join(STREAM_SITES)}."
        )
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer):
        raise SpecError(f"{shown(key)} has layer {shown(layer)}; layers are whole numbers from 0.")
    last = 0 if name == "embed" else MAX_LAYER
    if not 0 <= layer <= last:
        raise SpecError(f"{shown(key)} has layer {layer}; layers of {name!r} go from 0 to {last}.")
    return name, int(layer)


def as_vector(value: object, where: str) -> Vector:
    """A read-only float32 copy of a vector, [hidden_size].

    Raises:
        SpecError: the values are not numbers, not of rank 1, empty, or not finite in float32.
    """
    if hasattr(value, "detach"):
        # Only a torch tensor has `detach`. (This file does not import torch.) float() is called,
        # because numpy has no bfloat16.
        value = value.detach().cpu().float().numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        raise SpecError(f"{where} is not an array: its rows differ in length.") from None
    if array.dtype.kind not in "fiu":
        raise SpecError(f"{where} is {shown(value)}; a vector is a list of numbers.")
    if array.ndim != 1 or not array.size:
        raise SpecError(f"{where} has shape {list(array.shape)}; a vector is [hidden_size].")
    with np.errstate(over="ignore"):
        vector = array.astype(np.float32)
    if not np.isfinite(vector).all():
        at = int(np.flatnonzero(~np.isfinite(vector))[0])
        raise SpecError(
            f"{where} has {array[at]} at index {at}; values must be finite float32 numbers."
        )
    vector.setflags(write=False)
    return vector
