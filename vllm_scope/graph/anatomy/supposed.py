"""Finds by numbers the stream of a model whose source is not understood.

Owns:  `prove_supposed`, `stream_rows`, `compare_compiled`.
Runs:  one time after the model is loaded, and one time after the model is compiled.
From:  watched, proof.   To: engine.worker.proving.

The numbers of one forward show where the stream is. The result is true for every forward, because
of two facts:
- The model is compiled as one graph, and vLLM drops the guards of the graph. Therefore no Python
  code can choose another branch later. Every later forward computes the same function as the
  forward at load.
- A layer gets the same tensor objects that the layer before it returned. Therefore the graph does
  not choose between tensors by their values (as `torch.where` does).
The compiled graph does not come from the forward that gave the numbers. It is traced later, or
comes from a cache. Therefore the graph's rows must be compared with the rows of an uncompiled
forward of the same token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.proof import Findings, find_faults, may_return, row_error
from vllm_scope.graph.anatomy.watched import LayerCall, Watch

#: The largest allowed error of a compiled row, divided by the row's length. The value is _STEPS
#: times the dtype's eps, and at least _LEAST. A compiled row differs a little, because the compiled
#: graph rounds less often, and because the errors of all layers add up.
_STEPS, _LEAST = 8, 1e-3


def prove_supposed(
    anatomies: Sequence[Anatomy], watch: Watch, dtype: torch.dtype, hidden_size: int
) -> Anatomy:
    """The only anatomy in `anatomies` that agrees with all rows of a recorded forward.

    Args:
        anatomies: one anatomy for each convention, from `supposed_anatomies`.
        watch: the record of a forward whose first layer got random rows.

    Raises:
        CompatError: no anatomy, or more than one, agrees with the rows. The message says why.
    """
    good: list[Anatomy] = []
    reasons = [
        f"layer {number} runs {call.calls} times in a forward"
        for number, call in watch.layers.items() if call.calls != 1
    ][:1]  # fmt: skip
    for anatomy in () if reasons else anatomies:
        if all(may_return(anatomy.convention, call.returned) for call in watch.layers.values()):
            try:
                findings = find_faults(anatomy, {}, watch, dtype)
                _require_all(anatomy, findings, watch.layers, hidden_size)
                good.append(anatomy)
            except CompatError as error:
                reasons.append(f"{error} (if {anatomy.convention.value})")
    if len(good) == 1:
        return good[0]
    if good:
        reasons = ["they agree with two conventions"]
    if not reasons:
        kinds = sorted({_kind(call.returned) for call in watch.layers.values()})
        reasons = [f"the layers returned {' and '.join(kinds)}, which is of no known convention"]
    raise CompatError(
        f"{anatomies[0].unread}, and numbers do not show the stream either: {'; '.join(reasons)}"
    )


def stream_rows(anatomy: Anatomy, watch: Watch, dtype: torch.dtype) -> dict[int, Tensor]:
    """The first token's row at the entry of layer 0, and at the exit of each layer. The key is the
    boundary. A row is [hidden_size], float32 on the CPU.

    Args:
        anatomy: an anatomy whose convention `prove_supposed` has found to be right.
        watch: the record of a forward in which no random rows replaced the rows that enter the
            first layer (`noise=False`).

    Raises:
        CompatError: as `find_faults`.
    """
    found = find_faults(anatomy, {}, watch, dtype)
    first = watch.layers[0].given
    streams = {2 * number + 2: stream for number, stream in found.streams.items()}
    if first is not None:
        streams[0] = first[0].float()
    return {
        boundary: stream.reshape(-1, stream.shape[-1])[0].cpu()
        for boundary, stream in streams.items()
    }


def compare_compiled(
    rows: Mapping[int, Tensor],
    expected: Mapping[int, Tensor],
    unread: str | None,
    dtype: torch.dtype,
) -> None:
    """Compare the rows that taps read in the compiled graph with the rows of an uncompiled forward.
    The token is the same in the two forwards.

    Args:
        rows, expected: for each boundary, the row of the compiled graph, and the row of the
            uncompiled model. Each row is [hidden_size], float32 on the CPU. `rows` can have fewer
            boundaries than `expected`.
        unread: the reason why the source is not understood.
        dtype: the model's dtype.

    Raises:
        CompatError: a row differs, is not finite, or is 0 in the uncompiled forward.
    """
    limit = max(_STEPS * torch.finfo(dtype).eps, _LEAST)
    for boundary, row in rows.items():
        other = expected[boundary]
        place = f"after layer {boundary // 2 - 1}" if boundary else "before layer 0"
        error = row_error(row, other)
        if error is None or not bool(other.any()):
            words = "not finite" if error is None else "0"
            raise CompatError(
                f"{unread}, and a dummy token's row {place} is {words}, which shows nothing"
            )
        if error > limit:
            raise CompatError(
                f"{unread}, and the compiled graph does not compute what the model computes "
                f"uncompiled: the row {place} differs by {error:.2g} of its length"
            )


def _require_all(
    anatomy: Anatomy, findings: Findings, calls: Mapping[int, LayerCall], hidden_size: int
) -> None:
    for what, layers in findings.untold.items():
        raise CompatError(f"no rows show {what} {', '.join(map(str, layers))}")
    for number in findings.moved:
        raise CompatError(f"the output of layer {number - 1} is not the input of layer {number}")
    for number, call in calls.items():
        carried = (call.handed or ())[: 2 if anatomy.convention is Convention.SUM else 1]
        if not all(carried):
            raise CompatError(
                f"layer {number} gets other tensors than layer {number - 1} returned, which may be "
                "chosen by values"
            )
    for number, stream in findings.streams.items():
        if stream.shape[-1] != hidden_size:
            raise CompatError(
                f"layer {number} leaves rows of {stream.shape[-1]} numbers, not of {hidden_size}"
            )


def _kind(returned: object) -> str:
    if not isinstance(returned, tuple):
        return type(returned).__name__
    return f"({', '.join(type(part).__name__ for part in returned)})"
