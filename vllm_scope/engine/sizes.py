"""How large a worker's rings and tables are, and what one token may take of them.

Owns:  Sizes, Limits.
Runs:  in every worker, at load; `Limits` travels to front-ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from vllm_scope.config import ScopeConfig
from vllm_scope.errors import CapacityError, ConfigError
from vllm_scope.layout import SLOT_BYTES, Layout, boundaries_of, slots_of_row
from vllm_scope.program import Cost, RequestProgram

#: What an arena holds where no CUDA graph sets its size.
HOST_ARENA_BYTES = 64 << 20
#: Steps whose rows a graph-sized arena holds at once.
STEPS_IN_ARENA = 3
#: Rows of one tap that the largest step may write: three points, and scores.
ROWS_PER_TAP = 4
#: What the shared host memory for rows is kept to, where the arena allows.
MAX_HOST_BYTES = 1 << 30


class Limits(msgspec.Struct, frozen=True):
    """What a request may ask of this engine.

    Attributes:
        row_slots: arena slots of one row.
        token_slots: slots that one token may deliver in a captured graph; 0 where
            there are none.
        tap_slots: slots that one token may deliver at one tap.
        vectors, programs, ops: places in the device tables, all requests together.
        optimistic: positions are guesses when a step is planned (draft tokens).
    """

    row_slots: int
    token_slots: int
    tap_slots: int
    vectors: int
    programs: int
    ops: int
    optimistic: bool = False

    @property
    def capacity(self) -> Cost:
        return Cost(self.vectors, self.programs, self.ops)

    def excess(self, *layouts: Layout) -> str | None:
        """Why a token may not deliver as much as one of these, or None."""
        return next(filter(None, map(self._excess, layouts)), None)

    def _excess(self, layout: Layout) -> str | None:
        # As it comes out of the arena it may be larger: a row under several codecs.
        slots = max(layout.arena.slots(self.row_slots), layout.slots(self.row_slots))
        if self.token_slots and slots > self.token_slots:
            return f"{slots} slots a token, of {self.token_slots}"
        for boundary in boundaries_of(layout):
            here = layout.at(boundary)
            slots = max(here.arena.slots(self.row_slots), here.slots(self.row_slots))
            if slots > self.tap_slots:
                return f"{slots} slots a token at one tap, of {self.tap_slots}"
        return None

    def check(self, program: RequestProgram, num_positions: int) -> None:
        """Raises CapacityError where a step could deliver more than the host's ring holds.

        A front-end has seen to its request alone; global sinks may read more of it, and
        encoded rows may be more than the arena's: one row under several codecs.
        """
        excess = self.excess(*(one.layout for one in program.with_drafts(num_positions)))
        if excess is not None:
            raise CapacityError(
                f"with what global sinks read, the request delivers too much at once "
                f"({excess}); read less of it, or under fewer codecs."
            )


@dataclass(frozen=True)
class Sizes:
    """What sets the sizes.

    Attributes:
        row_bytes: of one row.
        num_taps: of the whole model.
        max_rows: tokens of the largest step.
        graph_rows: tokens of the largest captured graph; 0 without graphs.
        cuda: the arena is on a GPU.
    """

    row_bytes: int
    num_taps: int
    max_rows: int
    graph_rows: int
    cuda: bool

    @property
    def row_slots(self) -> int:
        return slots_of_row(self.row_bytes)

    def arena_slots(self, config: ScopeConfig) -> int:
        """Raises ConfigError where `arena_mib` is too small."""
        # A larger step is drained tap by tap, so one tap of the largest must fit; a
        # captured graph cannot be, so it must fit whole.
        in_graphs = self.graph_rows * self.num_taps if self.cuda else 0
        least = max(self.max_rows, in_graphs) * self.row_slots
        if config.arena_mib is not None:
            slots = int(config.arena_mib * 2**20) // SLOT_BYTES
            if slots < least:
                raise ConfigError(
                    f"additional_config['scope'].arena_mib is {config.arena_mib:g}; with "
                    f"{self.num_taps} taps and steps of {self.max_rows} tokens at least "
                    f"{least * SLOT_BYTES / 2**20:.1f} are needed. Tap fewer layers, or raise it."
                )
            return slots
        tap = ROWS_PER_TAP * self.max_rows * self.row_slots
        if self.cuda:
            return max(STEPS_IN_ARENA * in_graphs * self.row_slots, tap)
        whole = self.max_rows * self.num_taps * self.row_slots
        return max(tap, min(whole, HOST_ARENA_BYTES // SLOT_BYTES))

    @staticmethod
    def host_slots(arena_slots: int) -> int:
        """As the arena, twice, so that a front-end may lag behind; within bounds."""
        return max(arena_slots, min(2 * arena_slots, MAX_HOST_BYTES // SLOT_BYTES))

    def limits(self, arena_slots: int, capacity: Cost, optimistic: bool) -> Limits:
        graphs = self.cuda and self.graph_rows > 0
        return Limits(
            self.row_slots,
            arena_slots // self.graph_rows if graphs else 0,
            arena_slots // self.max_rows,
            capacity.vectors, capacity.programs, capacity.ops, optimistic,
        )  # fmt: skip
