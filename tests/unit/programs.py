"""The programs of a request one by one, which the package makes together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import groupby

from vllm_scope.graph.tap.definition import NEXT, NUM_COLUMNS, VECTOR
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program import ranges
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.operations import Cost, Program, num_vectors
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Bank
from vllm_scope.request.nets import Net
from vllm_scope.request.resolved import Resolved

#: Content of an operation: the columns but those that say where others lie, and its vector.
Content = tuple[tuple[int, ...], bytes | None]


def runs(program: RequestProgram, first: int, count: int) -> list[tuple[int, int, Program]]:
    """Runs of tokens with the same program among positions first .. first+count-1.

    Returns:
        (offset from `first`, length, program); tokens without a program are left out.
    """
    each: list[Program | None] = []
    for part, start, length in program.parts_at(first, count):
        columns, of_tokens = part.distinct_at(start, length)
        made = [part.program(column) for column in columns]
        each += [made[at] for at in of_tokens]
    found = []
    for _, some in groupby(enumerate(each), lambda pair: id(pair[1])):
        (offset, one), *rest = some
        if one is not None:
            found.append((offset, 1 + len(rest), one))
    return found


def programs_of(program: RequestProgram, columns: Iterable[bytes]) -> list[Program]:
    """The distinct programs of some columns, which may come from another process."""
    each = program.held(columns).programs
    return list(dict.fromkeys(one for one in each if one is not None))


def forget_ranges() -> None:
    """Columns are made anew, as in a process that has seen no request."""
    ranges._known.clear()
    ranges._columns.clear()


def all_programs(program: RequestProgram, num_positions: int) -> list[Program]:
    """Every program that some position of the request may get."""
    return programs_of(program, program.columns(num_positions, drafts=False))


def weights_of(one: Program, banks: Mapping[Bank, tuple[Net, ...]]) -> set[Array]:
    """The weights of what a program delivers; `banks` as in Resolved."""
    nets = (net for head, _ in one.layout.encoded for net in banks.get(head, ()))
    return {weight for net in nets for weight, _ in net.layers}


def rows_of_nets(asked: Resolved) -> dict[Bank, list[list[float]]]:
    """The rows of the first layers of each bank's nets."""
    return {
        bank: [row for net in nets for row in net.layers[0][0].numpy.tolist()]
        for bank, nets in asked.banks.items()
    }


def cost_of(programs: Collection[Program], banks: Mapping[Bank, tuple[Net, ...]]) -> Cost:
    """The cost of distinct programs; a vector that several of them use counts once."""
    arrays: dict[bytes, Array] = {}
    for one in programs:
        arrays |= {each.digest: each for each in one.vectors | weights_of(one, banks)}
    count = sum(map(num_vectors, arrays.values()))
    return Cost(count, len(programs), sum(one.num_ops for one in programs))


def program_of(tables: Tables, program_id: int) -> Program:
    """A program that the tables hold by itself."""
    return tables._programs.content(program_id)


def on_the_device(tables: Tables, program_id: int) -> list[list[Content]]:
    """The operations of a program at each tap."""
    tables._flush()
    found = []
    for at in tables.programs[program_id].tolist():
        found.append([])
        while at >= 0:
            op = tables.ops[at].tolist()
            vector = None if op[VECTOR] < 0 else tables.vectors[op[VECTOR]].numpy().tobytes()
            own = (column for column in range(NUM_COLUMNS) if column not in (NEXT, VECTOR))
            found[-1].append((tuple(op[column] for column in own), vector))
            at = op[NEXT]
    return found
