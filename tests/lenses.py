"""Lenses of random affine maps, for engines and servers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_scope.lenses.linear import Affine, LinearLens
from vllm_scope.request.sites import Place


def random_lens(
    name: str, layers: Iterable[int], size: int, residual: bool = False, site: str = "resid_post"
) -> LinearLens:
    """Maps that leave a row's length about as it is; every second one has no bias."""
    generator = torch.Generator().manual_seed(len(name))
    maps = {}
    for layer in layers:
        weight = torch.randn(size, size, generator=generator) / size**0.5
        bias = torch.randn(size, generator=generator) / 4 if layer % 2 == 0 else None
        maps[Place(site, layer)] = Affine(weight, bias)
    return LinearLens(name, maps, residual)


def identity(layers: Iterable[int], size: int) -> LinearLens:
    """Maps that change nothing."""
    return LinearLens(
        "identity", {Place("resid_post", layer): Affine(torch.eye(size), None) for layer in layers}
    )
