"""Computes the sizes of a worker's arena and ring, and the number of slots that a token can take.

Owns:  Sizes, Limits, `check_memory`.
Runs:  in every worker, at the model's load. Workers send their Limits to front-ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from vllm_scope.config import ScopeConfig
from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.errors import CapacityError, ConfigError
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths, boundaries_of
from vllm_scope.program.operations import Cost
from vllm_scope.request.sites import Sites, kind_of

#: Without `arena_mib`, an arena on a CPU has at most this number of bytes. If one tap of the
#: largest step needs more, the arena has room for this tap.
HOST_ARENA_BYTES = 64 << 20
#: Without `arena_mib`, an arena on a GPU has room for at least this number of steps of the largest
#: captured graph.
STEPS_IN_ARENA = 3
#: Without `arena_mib`, the arena has at least room for one tap of the largest step. At this tap,
#: each token can have this number of rows: one row at each of three points, and one row for scores.
ROWS_PER_TAP = 4
#: The size in bytes of the largest ring in host memory, unless the arena is larger.
MAX_HOST_BYTES = 1 << 30


class Limits(msgspec.Struct, frozen=True):
    """The largest numbers and sizes that one request can have on this engine.

    Attributes:
        row_bytes: the number of bytes of a raw row, for each kind of row (layout.Widths).
        token_slots: the number of slots that one token can deliver in a captured graph; 0 if there
            are no graphs.
        tap_slots: the number of slots that one token can deliver at one tap.
        vectors, programs, ops: the number of entries of the device tables, for all requests
            together.
        optimistic: True if the host's positions can count draft tokens that are rejected later.
        states: the number of entries for the states of gates, for all requests together.
    """

    row_bytes: tuple[int, ...]
    token_slots: int
    tap_slots: int
    vectors: int
    programs: int
    ops: int
    optimistic: bool = False
    states: int = 0

    @property
    def widths(self) -> Widths:
        return Widths(self.row_bytes)

    @property
    def capacity(self) -> Cost:
        return Cost(self.vectors, self.programs, self.ops)

    def excess(self, *layouts: Layout) -> str | None:
        """The reason why a token cannot deliver one of these layouts, or None."""
        return next(filter(None, (_excess(self, one) for one in layouts)), None)

    def check(self, layouts: Sequence[Layout]) -> None:
        """Raises CapacityError if a token cannot deliver one of these layouts.

        The front-end has checked only the request's own actions. The request can deliver more rows
        for three reasons: global sinks add reads, server-wide edits can make the rows of two points
        different, and one row can have several codecs.
        """
        excess = self.excess(*layouts)
        if excess is not None:
            raise CapacityError(
                "with the server's edits and what global sinks read, the request delivers too "
                f"much at once ({excess}); read less of it, or under fewer codecs."
            )


def check_memory(asked: Mapping[str, int], config: ScopeConfig, free: int, where: str) -> None:
    """Check that the memory that the options need is free, before this memory is allocated.

    Args:
        asked: the number of bytes that each option of `config` needs, in the order of the
            allocations.
        free: the number of free bytes.
        where: the name of the device or host in the error's text, such as "the device cuda:0".

    Raises:
        ConfigError: an option needs more memory than is free.
    """
    left = free
    for option, num_bytes in asked.items():
        if num_bytes > left:
            value = getattr(config, option)
            if value is None:
                told = f"without additional_config['scope'].{option}, rows on their way take"
                advice = "Tap fewer layers or sites, or start with a smaller max_num_batched_tokens"
            else:
                told = f"additional_config['scope'].{option} is {value:g}, which takes"
                advice = f"Give a smaller {option}"
            taken = "" if left == free else " beside what other options take"
            raise ConfigError(
                f"{told} {num_bytes / 2**20:,.1f} MiB, and {where} has {left / 2**20:,.1f} MiB "
                f"free{taken}. {advice}; the KV cache needs memory too."
            )
        left -= num_bytes


@lru_cache(maxsize=4096)  # a cache, because many requests have the same layouts
def _excess(limits: Limits, layout: Layout) -> str | None:
    widths = limits.widths
    # If one row has several codecs, a token takes more slots in the ring than in the arena.
    slots = max(layout.arena.slots(widths), layout.slots(widths))
    if limits.token_slots and slots > limits.token_slots:
        return f"{slots} slots a token, of {limits.token_slots}"
    for boundary in boundaries_of(layout):
        here = layout.at(boundary)
        slots = max(here.arena.slots(widths), here.slots(widths))
        if slots > limits.tap_slots:
            return f"{slots} slots a token at one tap, of {limits.tap_slots}"
    return None


@dataclass(frozen=True)
class Sizes:
    """The numbers from which the sizes of a worker's arena and ring are computed.

    Attributes:
        boundaries: the boundaries of the whole model's taps.
        max_rows: the number of tokens of the largest step.
        graph_rows: the number of tokens of the largest captured graph; 0 if there are no graphs.
        cuda: True if the arena is on a GPU.
    """

    widths: Widths
    boundaries: tuple[int, ...]
    max_rows: int
    graph_rows: int
    cuda: bool

    @staticmethod
    def of(vllm_config: VllmConfig, sites: Sites, cuda: bool) -> Sizes:
        """The Sizes of a worker of this engine."""
        captured = vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        return Sizes(
            Widths.of(sites.row_sizes, vllm_config.model_config.dtype.itemsize), sites.boundaries,
            int(vllm_config.scheduler_config.max_num_batched_tokens), max(captured), cuda,
        )  # fmt: skip

    @property
    def _row_slots(self) -> list[int]:
        """The number of slots of one row at each tap. An engine without taps also makes an arena.
        Therefore its list has one entry."""
        return [self.widths.row_slots[kind_of(b)] for b in self.boundaries or (0,)]

    @property
    def slots_of_all(self) -> int:
        """The number of slots that one row of every tap takes in total."""
        return sum(self._row_slots)

    def arena_slots(self, config: ScopeConfig) -> int:
        """The number of slots of the arena. Raises ConfigError if `arena_mib` is too small."""
        # If a step does not fit into the arena, each tap is drained alone. Therefore the arena must
        # have room for one tap of the largest step. In a captured graph, no tap can be drained
        # alone. Therefore the arena must also have room for all taps of the largest graph.
        whole, widest = self.slots_of_all, max(self._row_slots)
        in_graphs = self.graph_rows * whole if self.cuda else 0
        least = max(self.max_rows * widest, in_graphs)
        if config.arena_mib is not None:
            slots = int(config.arena_mib * 2**20) // SLOT_BYTES
            if slots < least:
                raise ConfigError(
                    f"additional_config['scope'].arena_mib is {config.arena_mib:g}; with "
                    f"{len(self._row_slots)} taps and steps of {self.max_rows} tokens at least "
                    f"{least * SLOT_BYTES / 2**20:.1f} are needed. Tap fewer layers, or raise it."
                )
            return slots
        tap = ROWS_PER_TAP * self.max_rows * widest
        if self.cuda:
            return max(STEPS_IN_ARENA * in_graphs, tap)
        return max(tap, min(self.max_rows * whole, HOST_ARENA_BYTES // SLOT_BYTES))

    @staticmethod
    def host_slots(arena_slots: int) -> int:
        """The number of slots of the ring in host memory. If possible, the ring has twice as many
        slots as the arena."""
        return max(arena_slots, min(2 * arena_slots, MAX_HOST_BYTES // SLOT_BYTES))

    def limits(self, arena_slots: int, capacity: Cost, optimistic: bool, states: int = 0) -> Limits:
        graphs = self.cuda and self.graph_rows > 0
        return Limits(
            self.widths.row_bytes,
            arena_slots // self.graph_rows if graphs else 0,
            arena_slots // self.max_rows,
            capacity.vectors, capacity.programs, capacity.ops, optimistic, states,
        )  # fmt: skip
