"""A request's reads, compiled to programs: what a tap does to one token's row.

Owns:  Program, the opcodes, and RequestProgram (which program a token gets).
Runs:  in workers, when a request arrives and when its tokens are planned.
       numpy, no torch.
From:  spec.   To: plan (per token), tap.tables (on the device).

A program is a list of operations for each tap. Today's only operation is READ;
DOT, EDIT and SET have their opcodes reserved here, so that adding one changes
the interpreter and this file and nothing between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_scope.selectors import Tokens
from vllm_scope.spec import ResolvedRead, Sites

OP_READ = 1
OP_DOT = 2  # reserved: phi(x . v) as a score
OP_EDIT = 3  # reserved: x + phi(x) * v
OP_SET = 4  # reserved: x <- v

#: No program: the tap leaves the row alone.
NO_PROGRAM = -1


@dataclass(frozen=True)
class Program:
    """What happens to one token: the taps (boundaries) at which its row is read.

    A token under this program takes `num_reads` consecutive arena slots; the row
    read at `boundaries[j]` goes to the j-th.
    """

    boundaries: tuple[int, ...]

    @property
    def num_reads(self) -> int:
        return len(self.boundaries)


@dataclass
class RequestProgram:
    """Which program each token of one request gets.

    Promise: the program depends on the token's absolute position, never on the
    step it happens to be in, so chunked prefill and recompute give the same rows.
    """

    reads: tuple[ResolvedRead, ...]
    boundaries_of_read: tuple[tuple[int, ...], ...]
    num_prompt: int
    prompt_ids: NDArray[np.int64]
    _programs: dict[int, Program | None] = field(default_factory=dict)

    @staticmethod
    def compile(
        reads: tuple[ResolvedRead, ...],
        sites: Sites,
        here: frozenset[int],
        num_prompt: int,
        prompt_ids: NDArray[np.int64],
    ) -> RequestProgram:
        """Keep of each read the boundaries that this worker's stage holds (`here`)."""
        boundaries = tuple(
            tuple(sorted({sites.boundary_of(s) for s in read.streams} & here)) for read in reads
        )
        return RequestProgram(reads, boundaries, num_prompt, prompt_ids)

    def _program(self, bits: int) -> Program | None:
        if bits not in self._programs:
            union: set[int] = set()
            for i, boundaries in enumerate(self.boundaries_of_read):
                if bits >> i & 1:
                    union.update(boundaries)
            self._programs[bits] = Program(tuple(sorted(union))) if union else None
        return self._programs[bits]

    @property
    def generated_is_uniform(self) -> bool:
        """Every generated token gets the same program."""
        return all(read.tokens.uniform for read in self.reads)

    def _bits(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        ids = np.full(positions.shape, -1, np.int64)
        in_prompt = positions < self.num_prompt
        ids[in_prompt] = self.prompt_ids[positions[in_prompt]]
        tokens = Tokens(positions, self.num_prompt, ids, None)
        bits = np.zeros(positions.shape, np.int64)
        for i, read in enumerate(self.reads):
            bits |= read.tokens.select(tokens).possible.astype(np.int64) << i
        return bits

    def runs(self, first: int, count: int) -> list[tuple[int, int, Program]]:
        """Runs of tokens with the same program among positions first .. first+count-1.

        Returns:
            (offset from `first`, length, program); tokens without one are left out.
        """
        bits = self._bits(np.arange(first, first + count, dtype=np.int64))
        edges = np.flatnonzero(np.diff(bits)) + 1
        found = []
        for start, stop in zip([0, *edges], [*edges, count], strict=True):
            program = self._program(int(bits[start]))
            if program is not None:
                found.append((int(start), int(stop - start), program))
        return found

    def generated_superset(self) -> Program | None:
        """One program that reads whatever any generated token may need.

        Used where a token's position is not known on the host when the step is
        planned (draft tokens under async scheduling): read more, sort by label.
        """
        bits = 0
        probe = self.num_prompt + np.arange(1, dtype=np.int64)
        for i, read in enumerate(self.reads):
            selects_some = not read.tokens.uniform
            mask = read.tokens.select(
                Tokens(probe, self.num_prompt, np.full(1, -1, np.int64), None)
            )
            if selects_some or bool(mask.possible[0]):
                bits |= 1 << i
        return self._program(bits)
