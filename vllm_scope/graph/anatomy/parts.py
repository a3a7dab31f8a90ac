"""Gives single modules of a model a subclass whose forward has a tap: the MLP's down projection
(`mlp_post`, its input), the router of experts (`router_logits`, its output) and the norm behind the
last layer (`ln_final`, its output).

Owns:  the traced code around the op.
Runs:  as tapped.py does: installed once, before the first compiled call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vllm_scope.errors import ConfigError
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.tapped import give_buffers, named, tap_rows
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.request.sites import FINAL_SITE, MLP_SITE, ROUTER_SITE, Place, Sites


def install_part_taps(
    anatomy: Anatomy, tap_of: Mapping[int, int], arena: Tensor, tables: Tables, sites: Sites
) -> tuple[int, ...]:
    """Tap these modules of this worker; arguments as of `install_attention_taps`.

    Returns:
        The boundaries that carry a tap here.

    Raises:
        ConfigError: `ln_final` is configured, and the model's source shows no such norm.
    """
    parts = {Place(MLP_SITE, number): one for number, one in anatomy.projections.items()}
    parts |= {Place(ROUTER_SITE, number): one for number, one in anatomy.routers.items()}
    final = Place(FINAL_SITE, 0)
    if final.boundary in tap_of and anatomy.norm is None:
        raise ConfigError(
            f"additional_config['scope'].sites has {FINAL_SITE!r}, which cannot be tapped on this "
            "model: its forward calls no norm, or several, behind the layers. Leave it out of "
            "the sites."
        )
    if anatomy.norm_here is not None:
        parts[final] = anatomy.norm_here
    here = {place: part for place, part in parts.items() if place.boundary in tap_of}
    for place, part in here.items():
        give_buffers(part, {place.site: place.boundary}, tap_of, arena, tables)
        subclass = _tapped_input if place.site == MLP_SITE else _tapped_output
        part.__class__ = subclass(type(part), place.site, sites.row_size(place.site))
    return tuple(sorted(place.boundary for place in here))


def _tapped_input(base: type, site: str, size: int) -> type[nn.Module]:
    class Tapped(base):
        def forward(self, rows: Tensor, *args: Any, **kwargs: Any) -> object:
            rows = tap_rows(self, rows, getattr(self, f"scope_{site}"), size)
            return super().forward(rows, *args, **kwargs)

    return named(Tapped, base)


def _tapped_output(base: type, site: str, size: int) -> type[nn.Module]:
    class Tapped(base):
        def forward(self, *args: Any, **kwargs: Any) -> object:
            out = super().forward(*args, **kwargs)
            rows, *others = out if isinstance(out, tuple) else (out,)
            rows = tap_rows(self, rows, getattr(self, f"scope_{site}"), size)
            return (rows, *others) if isinstance(out, tuple) else rows

    Tapped.scope_base = base  # what a lens calls
    return named(Tapped, base)
