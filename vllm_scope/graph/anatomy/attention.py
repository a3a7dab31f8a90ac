"""Gives attention modules a subclass whose forward has taps on its inputs and its output.

Owns:  the traced code around the op.
Runs:  in the model's forward. The worker installs the taps before the first compiled call.

Promise: if no row is edited, the module computes the same values as without taps. If q, k or v is a
slice of wider rows, the op gets a copy of this slice. Without this copy, the compiler would copy
the whole wider rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.split import Split
from vllm_scope.graph.anatomy.tapped import give_buffers, named, tap_rows
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.request.sites import ATTENTION_SITES, Place, Sites


def install_attention_taps(
    anatomy: Anatomy, arena: Tensor, tables: Tables, sites: Sites
) -> tuple[int, ...]:
    """Add taps to the attention of this worker's layers. `anatomy`, `arena` and `tables` are the
    same as in `install_taps`.

    Args:
        sites: gives the width of each site's rows.

    Returns:
        The boundaries of the attention's sites that have a tap on this worker.
    """
    tapped: list[int] = []
    for number, module in sorted(anatomy.attention.items()):
        every = {site: Place(site, number).boundary for site in ATTENTION_SITES}
        here = {site: boundary for site, boundary in every.items() if boundary in tables.tap_of}
        if here:
            give_buffers(module, here, arena, tables)
            sizes = {site: sites.row_size(site) for site in here}
            module.__class__ = _tapped_attention(type(module), sizes, anatomy.splits)
        tapped += here.values()
    return tuple(sorted(tapped))


def _tapped_attention(
    base: type, sizes: Mapping[str, int], splits: Mapping[str, Split]
) -> type[nn.Module]:
    """A subclass of `base`, whose forward takes query, key and value.

    Args:
        sizes: for each site with a tap, the number of elements of a row.
        splits: the attribute `splits` of Anatomy.
    """

    class Tapped(base):
        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Tensor:
            query, key = self.scope_tap("q", query), self.scope_tap("k", key)
            value = self.scope_tap("v", value)
            return self.scope_tap("z", super().forward(query, key, value, *args, **kwargs))

        def scope_tap(self, site: str, rows: Tensor) -> Tensor:
            if site not in sizes:
                return rows
            number = getattr(self, f"scope_{site}")
            return tap_rows(self, rows, number, sizes[site], splits.get(site))

    return named(Tapped, base)
