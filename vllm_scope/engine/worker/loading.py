"""Installs taps on a loaded model, and allocates the arena and the tables that the taps use.

Owns:  Loaded, `load_taps` and its parts (`vllm-scope doctor` also calls some of these parts), and
       the check that every tap of the compiled model writes its row.
Runs:  in every worker process, after vLLM has loaded the model, and again after vLLM's warm-up.
From:  worker.   To: graph.anatomy, graph.tap, worker.arena, canary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from vllm_scope.config import ScopeConfig
from vllm_scope.engine.vllm_types import Worker
from vllm_scope.engine.worker.attention import attention_of, heads_here
from vllm_scope.engine.worker.blocks import blocks_of
from vllm_scope.engine.worker.canary import Forward, rows_at, silent_taps
from vllm_scope.engine.worker.mlp import projections_of
from vllm_scope.engine.worker.router import routers_of
from vllm_scope.engine.worker.sizes import Limits, Sizes, check_memory
from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.attention import install_attention_taps
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.parts import install_part_taps
from vllm_scope.graph.anatomy.split import Split
from vllm_scope.graph.anatomy.tapped import install_taps
from vllm_scope.graph.tap import op
from vllm_scope.graph.tap.program_tables import capacity
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.request.sites import (
    ATTENTION_SITES,
    MLP_SITE,
    STREAM,
    Place,
    Sites,
    kind_of,
    place_at,
)
from vllm_scope.transport.ring import HostRing
from vllm_scope.worker.arena import Arena

logger = logging.getLogger("vllm.vllm_scope")


@dataclass(frozen=True)
class Loaded:
    """The memory that the taps of one worker use, and the sizes of this memory.

    Attributes:
        here: boundaries with a tap on this worker.
        sizes: the numbers from which the sizes of the arena and the ring, and `limits`, are
            computed.
    """

    here: tuple[int, ...]
    sizes: Sizes
    limits: Limits
    tables: Tables
    arena: Arena


def load_taps(
    worker: Worker,
    config: ScopeConfig,
    sites: Sites,
    anatomy: Anatomy,
    drains: bool,
    reports: bool,
    optimistic: bool,
) -> Loaded:
    """Install taps on a loaded model, and allocate the memory that the taps use.

    Args:
        worker: vLLM's worker.
        drains: True if this rank delivers rows. The other ranks make the same edits, but deliver
            no rows.
        reports: True if this rank reports faulty rows.
        optimistic: True if the host's positions can count draft tokens that are rejected later.

    Raises:
        CompatError: a layer cannot be tapped.
        ConfigError: `arena_mib` is too small, or options need more memory than is free.
    """
    vllm_config, device = worker.vllm_config, worker.device
    sizes = Sizes.of(vllm_config, sites, device.type == "cuda")
    # A captured graph can have more rows than the scheduler's own limit.
    max_rows = max(sizes.max_rows, sizes.graph_rows)
    num_slots = sizes.arena_slots(config)
    if not drains:
        num_slots = sizes.slots_of_all  # only the checks at start use these slots
    _check_room(config, sizes, num_slots, drains, device)
    tables = Tables(
        sites.boundaries, max_rows, sites.hidden_size, sizes.widths, device, config.vectors_mib,
        reports=reports, states_mib=config.states_mib,
    )  # fmt: skip
    arena = Arena(num_slots, vllm_config.model_config.dtype, device)
    most = capacity(sites.vector_size, config.vectors_mib)
    limits = sizes.limits(num_slots, most, optimistic, len(tables.log))
    op.register()
    if device.type == "cuda":
        from vllm_scope.graph.tap.kernel import load_variants

        # The kernels are loaded now, because kernels cannot be loaded while a graph is captured.
        load_variants(arena.slots, tables, sites.row_sizes)
    here = install_all_taps(anatomy, arena.slots, tables, sites)
    return Loaded(here, sizes, limits, tables, arena)


def _check_room(
    config: ScopeConfig, sizes: Sizes, num_slots: int, drains: bool, device: torch.device
) -> None:
    """Raises ConfigError if options need more memory than is free after the weights are loaded.

    Args:
        num_slots: the number of slots of the arena.
    """
    ring = sizes.host_slots(num_slots) * SLOT_BYTES if drains else 0
    moments_mib = config.moments_mib if drains else 0.0
    asked = {
        "vectors_mib": int(config.vectors_mib * 2**20),
        "states_mib": int(config.states_mib * 2**20),
        "arena_mib": num_slots * SLOT_BYTES,
        "moments_mib": int(moments_mib * 2**20),
    }
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + kept
        check_memory(asked, config, free, f"the device {device}")
        asked = {"arena_mib": ring}  # the ring's size in host memory follows from the arena's size
    else:
        asked["arena_mib"] += ring
    check_memory(asked, config, psutil.virtual_memory().available, "this host")


def with_parts(anatomy: Anatomy, sites: Sites, num_ranks: int) -> Anatomy:
    """Adds to the anatomy the modules inside layers whose inputs or outputs get taps.

    Args:
        num_ranks: the number of tensor-parallel ranks.

    Raises:
        ConfigError: the same errors as `attention_of`, `projections_of`, `routers_of` and
            `blocks_of`.
    """
    if sites.heads is not None:
        anatomy = replace(anatomy, attention=attention_of(anatomy, sites, num_ranks))
    if sites.mlp_size is not None:
        projections = projections_of(anatomy, sites, num_ranks)
        anatomy = replace(anatomy, projections=projections)
    if sites.num_experts is not None:
        anatomy = replace(anatomy, routers=routers_of(anatomy, sites))
    anatomy = replace(anatomy, blocks=blocks_of(anatomy, sites))
    return replace(anatomy, splits=_splits_of(sites, num_ranks)) if num_ranks > 1 else anatomy


def _splits_of(sites: Sites, num_ranks: int) -> dict[str, Split]:
    from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_gather

    parts: dict[str, int] = {}
    if sites.heads is not None:
        here = heads_here(sites.heads, num_ranks)
        parts = {site: math.prod(here.shape(site)) for site in ATTENTION_SITES}
    if sites.mlp_size is not None:
        parts[MLP_SITE] = sites.mlp_size // num_ranks
    rank = int(get_tensor_model_parallel_rank())
    return {
        site: Split(sites.row_size(site), part, rank, num_ranks, tensor_model_parallel_all_gather)
        for site, part in parts.items()
    }


def install_all_taps(
    anatomy: Anatomy, arena: Tensor, tables: Tables, sites: Sites
) -> tuple[int, ...]:
    """Install all taps. Returns the boundaries with a tap on this worker. The arguments and errors
    are those of `install_taps`, `install_attention_taps` and `install_part_taps`."""
    where = (anatomy, arena, tables)
    # `install_taps` runs first, so that the model is unchanged if `install_taps` raises an error.
    stream = install_taps(*where)
    inner = (*install_attention_taps(*where, sites), *install_part_taps(*where, sites))
    return (*stream, *inner)


def check_taps(
    here: Sequence[int], tables: Tables, arena: Arena, ring: HostRing | None, forward: Forward
) -> None:
    """Check that every tap writes a row to the arena. On a GPU, a rank that delivers rows also
    checks that every tap writes a row to host memory.

    Args:
        here: boundaries with a tap on this worker.
        ring: the ring in host memory; None on a rank that delivers no rows.

    Raises:
        CompatError: a tap wrote nothing. In this case, the engine does not start.
    """

    def silent(slots: Tensor, first_slot: int, to_host: bool) -> set[int]:
        found = rows_at(here, tables, slots, first_slot, to_host, forward)
        return set(silent_taps(found))

    num_slots = sum(tables.widths.row_slots[kind_of(boundary)] for boundary in here)
    region = arena.acquire(num_slots)
    found = silent(arena.view(region), region.start, False)
    arena.give_back(region)
    if ring is not None and arena.slots.is_cuda:
        lease = ring.acquire(num_slots)
        found |= silent(lease.slots.view(arena.slots.dtype), lease.start, True)
        lease.release()
    elif arena.slots.is_cuda:
        # Tensor-parallel ranks compute each layer together. The first rank runs a second forward to
        # check host memory. Therefore this rank must also run a second forward.
        forward(lambda: None)
    if found:
        raise CompatError(
            f"{len(found)} of {len(here)} taps wrote nothing: {_why_silent(found, here)} and start "
            "again."
        )


def _why_silent(found: Collection[int], here: Collection[int]) -> str:
    """The reason why the taps of the boundaries `found` wrote nothing, and what to do about it."""
    if len(found) == len(here):
        return "the compiled graph has no taps. Remove vLLM's compile cache (VLLM_CACHE_ROOT)"
    layers: dict[str, list[int]] = {}
    for site, layer in map(place_at, sorted(found)):
        layers.setdefault(site, []).append(layer)
    named = ", ".join(f"{site!r} of layers {those}" for site, those in layers.items())
    return (
        f"{named}. The model's code does not run there, or vLLM's cache has a graph without these "
        "taps. Leave these sites out of additional_config['scope'].sites, or remove vLLM's "
        "compile cache (VLLM_CACHE_ROOT),"
    )


def compiled_rows(
    boundaries: Sequence[int], tables: Tables, arena: Arena, forward: Forward
) -> dict[int, Tensor]:
    """The row of each tap in a dummy forward, by boundary on the stream: [hidden_size], float32,
    CPU."""
    region = arena.acquire(len(boundaries) * tables.widths.row_slots[STREAM])
    found = rows_at(boundaries, tables, arena.view(region), region.start, False, forward)
    arena.give_back(region)
    return {boundary: row[: tables.hidden_size].float() for boundary, row in found.items()}


def last_rows(
    sites: Sites, tables: Tables, arena: Arena, forward: Forward
) -> tuple[Tensor, Tensor]:
    """Two rows of one dummy forward: the row after the last layer, and the row that the model
    returned.

    Returns:
        Two rows on the device, [hidden_size] each.

    Raises:
        CompatError: the model's output is not a tensor of rows of the stream's width.
    """
    out: list[object] = []
    last = Place("resid_post", sites.num_layers - 1).boundary
    region = arena.acquire(tables.widths.row_slots[STREAM])
    found = rows_at(
        (last,), tables, arena.view(region), region.start, False,
        lambda plan: out.append(forward(plan)),
    )  # fmt: skip
    arena.give_back(region)
    (hidden,) = out
    if not isinstance(hidden, Tensor):
        raise CompatError(f"the model returned {type(hidden).__name__}, not rows")
    if hidden.shape[-1] != sites.hidden_size:  # OPT 350M projects the rows after its layers
        raise CompatError(
            f"the model returns rows of {hidden.shape[-1]:,} numbers, and the stream has "
            f"{sites.hidden_size:,}, so that it does more after its layers than a norm"
        )
    row = found[last][: sites.hidden_size].to(arena.slots.device)
    return row, hidden.view(-1, sites.hidden_size)[0]
