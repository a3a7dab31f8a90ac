"""Gives some modules (attention, MLP, router, final norm) a subclass whose forward has a tap.

Sites at a module's input: `attn_in` (attention), `mlp_in` (MLP), `mlp_post` (the MLP's down
projection). Sites at a module's output: `router_logits` (router of experts), `ln_final` (the norm
after the last layer).

Owns:  the traced code around the op.
Runs:  in the model's forward. The worker installs the taps before the first compiled call.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from vllm_scope.errors import ConfigError
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.split import Split
from vllm_scope.graph.anatomy.tapped import give_buffers, named, parameters, tap_rows
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.request.sites import (
    BLOCK_SITES,
    FINAL_SITE,
    MLP_SITE,
    ROUTER_SITE,
    Place,
    Sites,
)

#: The names that vLLM's modules use for the input parameter of their forward.
INPUTS = ("hidden_states", "x", "input_")


def install_part_taps(
    anatomy: Anatomy, arena: Tensor, tables: Tables, sites: Sites
) -> tuple[int, ...]:
    """Add taps to modules that need one tap each. The arguments are the same as in
    `install_attention_taps`.

    Returns:
        The boundaries that have a tap on this worker.

    Raises:
        ConfigError: `ln_final` is configured, but the model's source does not show the norm after
            the layers.
    """
    parts = {Place(MLP_SITE, number): one for number, one in anatomy.projections.items()}
    parts |= {Place(ROUTER_SITE, number): one for number, one in anatomy.routers.items()}
    final = Place(FINAL_SITE, 0)
    if final.boundary in tables.tap_of and anatomy.norm is None:
        raise ConfigError(
            f"additional_config['scope'].sites has {FINAL_SITE!r}, which cannot be tapped on this "
            "model: its forward calls no norm, or several, behind the layers. Leave it out of "
            "the sites."
        )
    if anatomy.norm_here is not None:
        parts[final] = anatomy.norm_here
    parts |= anatomy.blocks
    here = {place: part for place, part in parts.items() if place.boundary in tables.tap_of}
    for place, part in here.items():
        give_buffers(part, {place.site: place.boundary}, arena, tables)
        subclass = _tapped_input if place.site in (MLP_SITE, *BLOCK_SITES) else _tapped_output
        split = anatomy.splits.get(place.site)
        part.__class__ = subclass(type(part), place.site, sites.row_size(place.site), split)
    return tuple(sorted(place.boundary for place in here))


def input_of(module_class: type) -> str | None:
    """The name of the parameter by which the class's `forward` gets the module's input. None if no
    parameter has a name in INPUTS."""
    names = parameters(module_class)
    return next((name for name in INPUTS if name in names), None)


def _tapped_input(base: type, site: str, size: int, split: Split | None) -> type[nn.Module]:
    name = input_of(base)
    at = 0 if name is None else parameters(base).index(name)
    # If attention and MLP are parallel or have no norm, other modules can get the same input
    # tensor. An edit must not change the input of these other modules. Therefore the tap gets a
    # copy of the tensor.
    copies = site in BLOCK_SITES

    class Tapped(base):
        def forward(self, *args: Any, **kwargs: Any) -> object:
            rows = kwargs[name] if name in kwargs else args[at]
            if copies:
                rows = rows.clone()
            rows = tap_rows(self, rows, getattr(self, f"scope_{site}"), size, split)
            if name in kwargs:
                kwargs = kwargs | {name: rows}
            else:
                args = (*args[:at], rows, *args[at + 1 :])
            return super().forward(*args, **kwargs)

    Tapped.forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    return named(Tapped, base)


def _tapped_output(base: type, site: str, size: int, split: Split | None) -> type[nn.Module]:
    class Tapped(base):
        def forward(self, *args: Any, **kwargs: Any) -> object:
            out = super().forward(*args, **kwargs)
            rows, *others = out if isinstance(out, tuple) else (out,)
            rows = tap_rows(self, rows, getattr(self, f"scope_{site}"), size, split)
            return (rows, *others) if isinstance(out, tuple) else rows

    Tapped.scope_base = base  # a lens calls the forward of `base`, which has no tap
    return named(Tapped, base)
