"""The tap as a Triton kernel, with one kernel instance for each row of the batch.

Owns:  the kernel, its launcher, and `load_variants`.
Runs:  on the GPU, inside captured CUDA graphs. The kernel does not wait for the host, and allocates
       no memory. In each graph, the shapes of the kernel's arguments are fixed, and only the
       contents of the tables change.
Must equal: tap/definition.py. A property test compares kernel.py with definition.py on random
programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from vllm_scope.request.sites import STREAM

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_scope.graph.tap.tables import Tables

# The same opcodes as in program/operations.py. A test in tests/interpreter checks the opcodes.
OP_READ = tl.constexpr(1)
OP_SCORE = tl.constexpr(2)
OP_ADD = tl.constexpr(3)
OP_ADD_NORM = tl.constexpr(4)
OP_ABLATE = tl.constexpr(5)
OP_CLAMP = tl.constexpr(6)
OP_SET = tl.constexpr(7)
OP_CHECK = tl.constexpr(8)
OP_ADD_BOUND = tl.constexpr(9)
OP_ADD_FEATURE = tl.constexpr(10)
OP_GATE = tl.constexpr(11)
OP_GATE_COSINE = tl.constexpr(12)
OP_GATE_CAST = tl.constexpr(13)
OP_FEATURE = tl.constexpr(14)
OP_EMA = tl.constexpr(15)
OP_HYSTERESIS = tl.constexpr(16)
OP_PID = tl.constexpr(17)
STATE_NUMBERS = tl.constexpr(3)
REGISTERS = tl.constexpr(32)
COLUMNS = tl.constexpr(12)
# The columns of the token table. tap.definition has the same numbers.
TOKEN_SLOT = tl.constexpr(1)
TOKEN_TO_HOST = tl.constexpr(2)
TOKEN_OWNER = tl.constexpr(3)
TOKEN_SINCE = tl.constexpr(4)
TOKEN_STRIDE = tl.constexpr(5)
TOKEN_STEPS = tl.constexpr(6)
TOKEN_COLUMNS = tl.constexpr(8)
CHECKED = tl.constexpr(1 << 30)


@triton.jit
def _tanh(x):
    # Near 0 the quotient would lose digits. Therefore the power series is used for small numbers.
    found = 1 - 2 / (tl.exp(2 * x) + 1)
    return tl.where(tl.abs(x) < 0.02, x - x * x * x / 3, found)


@triton.jit
def _next_state(code, op, score, begun, one, two):
    """The gate's state after one more token, as in graph.tap.states. A state consists of the gate's
    value and two numbers."""
    a = tl.load(op + 4).to(tl.float32, bitcast=True)
    b = tl.load(op + 5).to(tl.float32, bitcast=True)
    c = tl.load(op + 9).to(tl.float32, bitcast=True)
    d = tl.load(op + 10).to(tl.float32, bitcast=True)
    e = tl.load(op + 11).to(tl.float32, bitcast=True)
    if code == OP_EMA:
        one = tl.where(begun, a * one + b * score, score)
        beyond = d * (one - e)
        value = tl.where(beyond > 0, 1.0, 0.0)
        if c > 0:
            value = 1 / (1 + tl.exp(-c * beyond))
    elif code == OP_HYSTERESIS:
        kept = tl.where(d * (score - b) < 0, 0.0, one)
        value = tl.where(d * (score - a) > 0, 1.0, kept)
        one = value
    else:
        error = score - a
        one = tl.minimum(tl.maximum(one + error, -e), e)
        value = b * error + c * one + d * (error - tl.where(begun, two, error))
        value = tl.where(value > 0, tl.minimum(value, 1.0), 0.0)
        two = error
    return value, one, two


# Triton must not compile a separate variant of the kernel for special values of these arguments.
# Such a variant would be compiled during the capture of a graph.
@triton.jit(
    do_not_specialize=[
        "hidden_row_stride", "residual_row_stride", "vector_stride", "num_taps", "slot_base",
        "slots_per_token",
    ]
)  # fmt: skip
def _tap_kernel(
    hidden_ptr,
    residual_ptr,
    arena_ptr,
    tokens_ptr,
    programs_ptr,
    ops_ptr,
    vectors_ptr,
    tap_ptr,
    host_ptr,
    hidden_row_stride,
    residual_row_stride,
    vector_stride,
    hidden_size,
    num_taps,
    slot_base,
    slots_per_token,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # The loads of `program`, `tap` and `acts` do not wait for each other. If `acts` is 0, the tap
    # saves the load of `at`, which waits for these loads.
    token = tokens_ptr + row * TOKEN_COLUMNS
    program = tl.load(token)
    tap = tl.load(tap_ptr)
    acts = tl.load(tap_ptr + 1)
    if (program < 0) | (acts == 0):
        return
    at = tl.load(programs_ptr + program.to(tl.int64) * num_taps + tap)
    if at < 0:
        return
    dtype = arena_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    keep = column < hidden_size
    hidden = hidden_ptr + row * hidden_row_stride + column
    residual = residual_ptr + row * residual_row_stride + column
    x = tl.load(hidden, keep, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual, keep, 0.0).to(tl.float32)
    slot = tl.load(token + TOKEN_SLOT).to(tl.int64)
    # Some of these loads wait for others. The loads of operations below wait for none of these
    # loads.
    positions = tl.load(host_ptr + 5).to(tl.pointer_type(tl.int64))
    stride = tl.load(token + TOKEN_STRIDE).to(tl.int64)
    steps = tl.load(positions + row, stride > 0, 0) - tl.load(token + TOKEN_SINCE)
    slot += tl.minimum(tl.maximum(steps, 0), tl.load(token + TOKEN_STEPS)) * stride
    offset_column = 1
    if slots_per_token > 0:
        slot = slot_base + slot * slots_per_token
        offset_column = 2
    base = arena_ptr
    if tl.load(token + TOKEN_TO_HOST) == 1:
        base = tl.load(host_ptr).to(tl.pointer_type(dtype))
    words = base.to(tl.pointer_type(tl.float32), bitcast=True) + slot * 4
    edited = 0
    fault = 0
    # The loop below runs an operation that advances a state once for each score that the state does
    # not include yet. With an inner loop for these scores, the row would not stay in the GPU's
    # registers.
    walked, one, two = 0, 0.0, 0.0
    while at >= 0:
        op = ops_ptr + at.to(tl.int64) * COLUMNS
        code = tl.load(op)
        following = tl.load(op + 6)
        offset = tl.load(op + offset_column)
        out = words + offset
        if code == OP_READ:
            out_row = out.to(tl.pointer_type(dtype), bitcast=True)
            tl.store(out_row + column, x.to(dtype), keep)
        elif code == OP_CHECK:
            finite = tl.abs(x.to(dtype).to(tl.float32)) < float("inf")
            if tl.sum((keep & ~finite).to(tl.int32), 0) > 0:
                fault = tl.where(edited == 1, tap + 1, CHECKED | (tap + 1))
                x = tl.zeros_like(x)
                edited = 1
        elif code >= OP_EMA:
            register = tl.load(op + 7)
            held = tl.load(host_ptr + 2).to(tl.pointer_type(tl.float32)) + row * REGISTERS
            value = tl.load(held + register)
            walk = tl.load(host_ptr + 3).to(tl.pointer_type(tl.int32)) + row * 8
            position = tl.load(tl.load(host_ptr + 5).to(tl.pointer_type(tl.int64)) + row)
            begin = tl.load(walk + 3)
            at_token = position.to(tl.int32) - begin
            if at_token >= 0:
                last = tl.load(walk + 2) - 1
                width = tl.load(walk + 1)
                first = (tl.load(walk) + register).to(tl.int64)
                log = tl.load(host_ptr + 4).to(tl.pointer_type(tl.float32))
                record = log + (first + tl.minimum(at_token, last) * width) * STATE_NUMBERS
                # Tokens before the request's first row in this step are accepted, and have states.
                known = tl.maximum(tl.load(walk + 4) - begin, at_token - tl.load(walk + 5))
                known = tl.maximum(known, 0)
                fresh = at_token - known
                if fresh < 0:
                    value = tl.load(record)
                else:
                    if walked == 0:
                        before = tl.minimum(tl.maximum(known - 1, 0), last)
                        earlier = log + (first + before * width) * STATE_NUMBERS
                        one = tl.load(earlier + 1, known > 0, 0.0)
                        two = tl.load(earlier + 2, known > 0, 0.0)
                    score = tl.load(held + (walked - fresh) * REGISTERS + tl.load(op + 8))
                    begun = (known > 0) | (walked > 0)
                    value, one, two = _next_state(code, op, score, begun, one, two)
                    if walked < fresh:
                        walked += 1
                        following = at
                    else:
                        walked = 0
                        tl.store(record, value)
                        tl.store(record + 1, one)
                        tl.store(record + 2, two)
            if walked == 0:
                tl.store(held + register, value)
                # One thread stores the value, and all threads load it in a later operation.
                tl.debug_barrier()
                if offset >= 0:
                    tl.store(out, value)
        else:
            vector = vectors_ptr + tl.load(op + 3).to(tl.int64) * vector_stride + column
            v = tl.load(vector, keep, 0.0)
            a = tl.load(op + 4).to(tl.float32, bitcast=True)
            b = tl.load(op + 5).to(tl.float32, bitcast=True)
            register = tl.load(op + 7)
            held = tl.load(host_ptr + 2).to(tl.pointer_type(tl.float32)) + row * REGISTERS
            if code == OP_SCORE:
                if offset >= 0:
                    tl.store(out, tl.sum(x.to(dtype).to(tl.float32) * v, 0) + b)
            elif code >= OP_GATE:
                c = tl.load(op + 9).to(tl.float32, bitcast=True)
                d = tl.load(op + 10).to(tl.float32, bitcast=True)
                score = tl.sum(x * v, 0)
                if (code == OP_GATE) | (code == OP_FEATURE):
                    score += b
                else:
                    w = v
                    if code == OP_GATE_CAST:
                        w = _tanh(score * v)
                    length = tl.sqrt(tl.sum(x * x, 0)) * tl.sqrt(tl.sum(w * w, 0))
                    score = tl.where(length > 0, tl.sum(x * w, 0) / length, 0.0)
                beyond = d * (score - a)
                value = tl.where(beyond > 0, 1.0, 0.0)
                if c > 0:
                    value = 1 / (1 + tl.exp(-c * beyond))
                if code == OP_FEATURE:
                    value = tl.where(score > c, score, 0.0)
                elif tl.load(op + 8) >= 0:
                    tl.store(held + tl.load(op + 8), score)
                tl.store(held + register, value)
                # One thread stores the value. In a later operation, all threads load the value. The
                # barrier makes all threads wait for the store.
                tl.debug_barrier()
                if offset >= 0:
                    tl.store(out, value)
            else:
                part = 1.0
                if register >= 0:
                    part = tl.load(held + register)
                if part != 0:
                    edited = 1
                    change, length = 0.0, 0.0
                    if offset >= 0:
                        length = tl.sqrt(tl.sum(x * x, 0))
                    if code == OP_SET:
                        if offset >= 0:
                            change = part * tl.sqrt(tl.sum((v - x) * (v - x), 0))
                        x = tl.where(part == 1, v, x + part * (v - x))
                    else:
                        phi = a
                        if code == OP_ADD_NORM:
                            phi = a * tl.sqrt(tl.sum(x * x, 0))
                        elif code == OP_ADD_BOUND:
                            most = b * tl.sqrt(tl.sum(x * x, 0))
                            phi = tl.minimum(tl.maximum(a, -most), most)
                        elif code == OP_ADD_FEATURE:
                            d = tl.load(op + 10).to(tl.float32, bitcast=True)
                            feature = tl.load(held + tl.load(op + 8))
                            phi = tl.where((b > 0) & (feature <= 0), 0.0, a + d * feature)
                        elif code != OP_ADD:
                            along = tl.sum(x * v, 0)
                            phi = -along
                            if code == OP_CLAMP:
                                phi = tl.minimum(tl.maximum(along, a), b) - along
                        phi = part * phi
                        if offset >= 0:
                            change = tl.abs(phi) * tl.sqrt(tl.sum(v * v, 0))
                        x += phi * v
                    if offset >= 0:
                        tl.store(out, tl.where(length > 0, change / length, 0.0))
                elif offset >= 0:
                    tl.store(out, 0.0)
        at = following
    if edited == 1:
        came = tl.load(hidden, keep, 0.0).to(tl.float32)
        if HAS_RESIDUAL:
            came += tl.load(residual, keep, 0.0).to(tl.float32)
        rounded = x.to(dtype)
        finite = tl.abs(rounded.to(tl.float32)) < float("inf")
        bad = tl.sum((keep & ~finite).to(tl.int32), 0)
        if (bad > 0) & (tl.load(host_ptr + 1) != 0):
            fault = tap + 1
        elif tl.sum((keep & (x != came)).to(tl.int32), 0) > 0:
            if HAS_RESIDUAL:
                tl.store(residual, rounded, keep)
                tl.store(hidden, tl.zeros_like(x).to(dtype), keep)
            else:
                tl.store(hidden, rounded, keep)
    if fault != 0:
        # The faults are in host memory. Therefore a tap writes across PCIe only if there is a
        # fault.
        faults = tl.load(host_ptr + 1)
        if faults != 0:
            owner = tl.load(token + TOKEN_OWNER)
            tl.store(faults.to(tl.pointer_type(tl.int32)) + owner, fault)


def tap_rows(hidden: Tensor, residual: Tensor | None, *others: Any) -> None:
    """Launch the kernel. The arguments are the same as in `definition.tap_rows`.

    The elements of a row must be contiguous. Rows of `hidden` and `residual` can be strided.
    """
    num_rows, hidden_size = hidden.shape
    if num_rows == 0:
        return
    *tables, slot_base, slots_per_token = others
    programs, vectors = tables[2], tables[4]
    # The whole row is in the GPU's registers, because a program uses the row several times.
    block = triton.next_power_of_2(hidden_size)
    stream = hidden if residual is None else residual
    _tap_kernel[(num_rows,)](
        hidden, stream, *tables, hidden.stride(0), stream.stride(0),
        vectors.stride(0), hidden_size, programs.shape[1], slot_base, slots_per_token,
        HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=max(1, min(block // 512, 16)),
    )  # fmt: skip


def load_variants(arena: Tensor, tables: Tables, row_sizes: tuple[int, ...]) -> None:
    """Launch each variant of the kernel that taps need, on rows without a program. The launches
    compile the variants, so that no variant is compiled during the capture of a graph.

    Args:
        row_sizes: the number of elements of a row, for each kind of site (an index in sites.KINDS).
    """
    row = arena.new_zeros((1, max(row_sizes) + 1))
    stream = row[:, : row_sizes[STREAM]]
    launches: list[tuple[Tensor, Tensor | None]] = [(stream, None), (stream, stream)]
    for size in {size for size in row_sizes[STREAM + 1 :] if size}:
        # Rows that are a slice of wider rows can be unaligned. Unaligned rows need another variant
        # of the kernel.
        launches += [(row[:, :size], None), (row[:, 1 : size + 1], None)]
    for hidden, residual in launches:
        tap_rows(
            hidden, residual, arena, tables.tokens, tables.programs, tables.ops, tables.vectors,
            tables.taps[0], tables.host, 0, 0,
        )  # fmt: skip
