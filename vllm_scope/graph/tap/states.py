"""The states of gates in plain numpy: how a tap advances them, and where they are kept.

Owns:  the meaning of the operations in ADVANCING, and the columns of walks and of the log.
Runs:  on the CPU, and in tests as the kernel's twin.
From:  program.operations.   To: definition, worker.walks.

The log is float32 [num_places, STATE_NUMBERS]: a gate's value and its state at one position of one
request. For each generated token, a request has one place for each gate with a state. The place of
a gate is the first of its token's places plus the gate's register.

A walk says for one row where its request's states are, and which tokens have states already. Each
row advances the state by itself: it starts from the state of the last token that has one, and
applies the scores of its request's rows in this step, up to its own score. An earlier tap has set
these scores, so no row waits for another. A step of one row and a step of several rows give the
same bits. The position of a row is read on the device: while drafts are in flight, the host may not
know the true position.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.program.operations import OP_EMA, OP_HYSTERESIS, STATE_NUMBERS

Floats = NDArray[np.float32]

#: Columns of the walks. START: the request's first place in the log. WIDTH: how many places one of
#: its tokens has. TOKENS: how many of its tokens have places. BEGIN: the position of its first
#: generated token. KNOWN: the position below which tokens have states, even if this step computes
#: them again. INDEX: the row's index among the request's rows in this step. Two columns are empty.
START, WIDTH, TOKENS, BEGIN, KNOWN, INDEX = range(6)
NUM_WALK_COLUMNS = 8
#: In the op table: definition's columns REGISTER, SOURCE, and those of the numbers a to e.
_REGISTER, _SOURCE, _NUMBERS = 7, 8, [4, 5, 9, 10, 11]


def compared(score: Floats, threshold: Floats, sharpness: Floats, sign: Floats) -> Floats:
    """A gate's value by its score and threshold, [num_rows]: 0 or 1; if `sharpness` is above 0, a
    sigmoid."""
    beyond = sign * (score - threshold)
    with np.errstate(over="ignore"):  # numpy: torch's sigmoid depends on the batch
        smooth = 1 / (1 + np.exp(-sharpness * beyond))
    found: Floats = np.where(sharpness > 0, smooth, beyond > 0).astype(np.float32)
    return found


def advance(
    code: int, rows: NDArray[Any], op: NDArray[Any], registers: Floats, host: Tensor
) -> Floats:
    """Advance the states of some rows, log them, and set the gates' registers.

    Args:
        rows: [num_rows], indices of the rows in the batch.
        op: [num_rows, NUM_COLUMNS], the operation of each row.
        registers: [max_rows, REGISTERS].
        host: as in definition.tap_rows.

    Returns:
        The gates' values, [num_rows].
    """
    walks = array_at(ctypes.c_int32, int(host[3]), (len(registers), NUM_WALK_COLUMNS))[rows]
    positions = positions_of(rows, host)
    register, source = op[:, _REGISTER], op[:, _SOURCE]
    values: Floats = registers[rows, register]
    start, width, tokens, begin, known, index = walks[:, : INDEX + 1].T.astype(np.int64)
    token = positions - begin
    has = np.flatnonzero(token >= 0)
    if not len(has):
        return values
    # The step begins where the accepted tokens end.
    known = np.maximum(np.maximum(known, begin), positions - index) - begin
    fresh, begun = token - known, known > 0

    def place(of: NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = start + np.clip(of, 0, tokens - 1) * width + register
        return found

    now, before = place(token), place(known - 1)
    num_places = int(max(now[has].max(), before[has].max())) + 1
    log = array_at(ctypes.c_float, int(host[4]), (num_places, STATE_NUMBERS))
    numbers = np.ascontiguousarray(op[:, _NUMBERS]).view(np.float32)
    state = np.zeros((len(rows), STATE_NUMBERS), np.float32)
    state[has] = log[np.where(fresh < 0, now, before)[has]]
    state[(fresh >= 0) & ~begun] = 0
    for i in range(int(fresh[has].max()) + 1):
        here = has[fresh[has] >= i]
        score = registers[rows[here] - fresh[here] + i, source[here]]
        state[here] = _advanced(code, state[here], score, begun[here] | (i > 0), numbers[here])
    log[now[has]] = state[has]
    registers[rows[has], register[has]] = values[has] = state[has, 0]
    return values


def _advanced(
    code: int, state: Floats, score: Floats, begun: NDArray[np.bool_], numbers: Floats
) -> Floats:
    """The states one token later: value, and two numbers. [num_rows, STATE_NUMBERS]

    Args:
        begun: False for the state's first token.
    """
    a, b, c, d, e = numbers.T
    one, two = state[:, 1], state[:, 2]
    if code == OP_EMA:
        one = np.where(begun, a * one + b * score, score)
        value = compared(one, e, c, d)
    elif code == OP_HYSTERESIS:
        value = np.where(d * (score - a) > 0, 1, np.where(d * (score - b) < 0, 0, one))
        one = value
    else:
        error = score - a
        one = np.minimum(np.maximum(one + error, -e), e)
        value = b * error + c * one + d * (error - np.where(begun, two, error))
        value, two = np.where(value > 0, np.minimum(value, 1), 0), error
    return np.stack([value, one, two], axis=1).astype(np.float32)


def positions_of(rows: NDArray[np.int64], host: Tensor) -> NDArray[np.int64]:
    """The positions of these rows. `host` is as in definition.tap_rows."""
    last = int(rows.max())
    found: NDArray[np.int64] = array_at(ctypes.c_int64, int(host[5]), (last + 1, 1))[rows, 0]
    return found


def array_at(kind: Any, address: int, shape: tuple[int, int]) -> NDArray[Any]:
    """The host's memory at an address, as an array [shape] of a ctypes type."""
    memory = (kind * (shape[0] * shape[1])).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)  # np.ctypeslib.as_array takes longer
