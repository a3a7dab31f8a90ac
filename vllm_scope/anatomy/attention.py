"""Gives attention modules a subclass whose forward has taps on what goes in and comes out.

Owns:  the traced code around the op that reads alone.
Runs:  as tapped.py does: installed once, before the first compiled call.

Promise: the module computes what it did. The op does not write q, k, v or z, so the
compiler keeps them where they are. Rows of another width than was planned, which would run
into their neighbours', stop the engine while it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm_scope.anatomy.layers import Anatomy
from vllm_scope.anatomy.tapped import give_buffers, named
from vllm_scope.errors import CompatError
from vllm_scope.sites import ATTENTION_SITES, Sites, boundary_of
from vllm_scope.tap.tables import Tables


def install_attention_taps(
    anatomy: Anatomy, tap_of: Mapping[int, int], arena: Tensor, tables: Tables, sites: Sites
) -> tuple[int, ...]:
    """Tap the attention of this worker's layers; arguments as of `install_taps`.

    Args:
        sites: how wide rows are.

    Returns:
        The boundaries that carry a tap here.
    """
    tapped: list[int] = []
    for number, module in sorted(anatomy.attention.items()):
        every = {site: boundary_of((site, number)) for site in ATTENTION_SITES}
        here = {site: boundary for site, boundary in every.items() if boundary in tap_of}
        if here:
            give_buffers(module, here, tap_of, arena, tables)
            sizes = {site: sites.row_size(site) for site in here}
            module.__class__ = _tapped_attention(type(module), sizes)
        tapped += here.values()
    return tuple(sorted(tapped))


def _tapped_attention(base: type, sizes: Mapping[str, int]) -> type[nn.Module]:
    """A subclass of `base`, a module called with query, key and value.

    Args:
        sizes: of the sites with a tap, the numbers of a row.
    """

    class Tapped(base):
        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Tensor:
            if "q" in sizes:
                _read(self, query, self.scope_q, sizes["q"])
            if "k" in sizes:
                _read(self, key, self.scope_k, sizes["k"])
            if "v" in sizes:
                _read(self, value, self.scope_v, sizes["v"])
            out: Tensor = super().forward(query, key, value, *args, **kwargs)
            if "z" in sizes:
                _read(self, out, self.scope_z, sizes["z"])
            return out

    return named(Tapped, base)


def _read(module: Any, rows: Tensor | None, number: Tensor, size: int) -> None:
    # vLLM's models give [num_tokens, heads * size], or [num_tokens, heads, size].
    dtype = module.scope_arena.dtype
    if rows is None or math.prod(rows.shape[1:]) != size or rows.dtype != dtype:
        came = "nothing" if rows is None else f"rows of {tuple(rows.shape[1:])} {rows.dtype}"
        raise CompatError(f"the attention is given {came}, not rows of {size} {dtype}")
    if rows.stride(-1) != 1:
        raise CompatError("the attention is given rows whose numbers do not lie side by side")
    torch.ops.vllm_scope.tap_read(
        rows.flatten(1), module.scope_arena, module.scope_tokens, module.scope_programs,
        module.scope_ops, module.scope_vectors, number, module.scope_host,
    )  # fmt: skip
