"""The states of gates in plain numpy: how a tap advances and stores the states.

Owns:  the meaning of the operations in ADVANCING, and the columns of walks and of the log.
Runs:  on the CPU; tests compare the kernel with this code.
From:  program.operations.   To: definition, worker.walks.

The log is float32 [num_places, STATE_NUMBERS]. A row of the log, called a place, contains the value
and the state of one gate at one position of one request. For each generated token, a request has
one place in the log for each gate with a state. The index of this place is the index of the token's
first place plus the gate's register.

The walk of a row says where the request's states are, and which tokens already have a state. The
tap computes the state of each row separately. The tap starts from the state of the request's last
token that already has a state. Then the tap applies the scores of the request's rows in this step,
up to the score of the row itself. An earlier tap has computed these scores. Therefore no row waits
for another row. A token's state has the same bits, no matter whether the tokens are computed in one
step or in several steps. The tap reads the position of a row on the device, because the host does
not know the true position during speculative decoding.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.program.operations import OP_EMA, OP_HYSTERESIS, STATE_NUMBERS

Floats = NDArray[np.float32]

#: Columns of the walks. START: the request's first place in the log. WIDTH: the number of places of
#: one token. TOKENS: the number of the request's tokens with places. BEGIN: the position of the
#: first generated token. KNOWN: the tokens before this position have states, even if this step
#: computes these tokens again. INDEX: the row's index among the request's rows in this step. Two
#: columns are not used.
START, WIDTH, TOKENS, BEGIN, KNOWN, INDEX = range(6)
NUM_WALK_COLUMNS = 8
#: The columns REGISTER, SOURCE and NUMBER_A to NUMBER_E of the op table. See `definition`.
_REGISTER, _SOURCE, _NUMBERS = 7, 8, [4, 5, 9, 10, 11]


def compared(score: Floats, threshold: Floats, sharpness: Floats, sign: Floats) -> Floats:
    """A gate's value, computed from score and threshold, [num_rows]. If `sharpness` is above 0, the
    value is a sigmoid; else the value is 0 or 1."""
    beyond = sign * (score - threshold)
    with np.errstate(over="ignore"):  # not torch's sigmoid, whose result depends on the batch
        smooth = 1 / (1 + np.exp(-sharpness * beyond))
    found: Floats = np.where(sharpness > 0, smooth, beyond > 0).astype(np.float32)
    return found


def advance(
    code: int, rows: NDArray[Any], op: NDArray[Any], registers: Floats, host: Tensor
) -> Floats:
    """Advance the states of some rows, write the states to the log, and set the gates' registers.

    Args:
        rows: [num_rows], indices of the rows in the batch.
        op: [num_rows, NUM_COLUMNS], the operation of each row.
        registers: [max_rows, REGISTERS].
        host: the argument `host` of `definition.tap_rows`.

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
    # The tokens before the request's first row in this step are accepted, and have states.
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
    """The states after one more token, [num_rows, STATE_NUMBERS]. A state consists of the gate's
    value and two numbers.

    Args:
        begun: [num_rows], False for the first token that has a state.
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
    """The positions of these rows. `host` is the argument `host` of `definition.tap_rows`."""
    last = int(rows.max())
    found: NDArray[np.int64] = array_at(ctypes.c_int64, int(host[5]), (last + 1, 1))[rows, 0]
    return found


def array_at(kind: Any, address: int, shape: tuple[int, int]) -> NDArray[Any]:
    """The host memory at an address, as an array with this shape and ctypes type."""
    memory = (kind * (shape[0] * shape[1])).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)  # np.ctypeslib.as_array takes longer
