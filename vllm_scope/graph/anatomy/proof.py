"""Checks whether the numbers of one forward agree with the anatomy of the model.

Owns:  `find_faults`, `may_return`, `row_error`; Findings.
Runs:  one time, after the model is loaded and before the model gets taps.
From:  watched.   To: supposed, engine.worker.proving.

The anatomy comes from the source code of the model. The rows recorded in a forward show where the
residual stream is, independently of the source. `find_faults` tests these statements:
1. The stream that a layer returns is the stream that the next layer gets. If these streams differ,
   the model changes the stream between the two layers.
2. If a layer's first module is a norm, the input of the norm is the stream that the layer gets.
3. resid_mid = resid_pre + attn_out, and resid_mid is the input of the norm before the MLP.
4. resid_post = resid_mid + mlp_out.
5. The stream that the last layer returns is the input of the norm after the layers.
6. A router runs exactly one time in a forward, and returns rows of the model's dtype.
7. Rows of q, k, v and z have the width that the model's configuration gives.
Statements 3 and 4 are tested only if the convention is SUM. If a norm gets no residual, or returns
the residual unchanged, the input of the norm is `hidden`. If a norm returns hidden + residual, the
input is this sum. The input of any other norm is not known, and is not compared. If rows have a
number that is not finite, these rows are not compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.tapped import fits
from vllm_scope.graph.anatomy.watched import LayerCall, NormCall, Watch
from vllm_scope.request.sites import ROUTER_SITE

#: The largest error that counts as rounding, divided by the row's length. The value is _STEPS times
#: the dtype's eps, and at least _LEAST. A sum in the model is rounded one or two times.
_STEPS, _LEAST = 4, 1e-5


@dataclass(frozen=True)
class Findings:
    """The findings of one forward whose rows agree with the model's convention.

    Attributes:
        wrong_sites: the sites at which a tap would read other rows than the site's name says, each
            with the reason.
        moved: the layers that get another stream than the layer before returned.
        num_equal: the number of comparisons whose rows were equal, except for rounding.
        untold: the rows that could not be compared. The key is a description of the rows, and the
            value is their layers.
        streams: the stream that each layer returns, [num_tokens, hidden_size] in float32.
    """

    wrong_sites: Mapping[str, str]
    moved: tuple[int, ...]
    num_equal: int
    untold: Mapping[str, tuple[int, ...]]
    streams: Mapping[int, Tensor] = field(default_factory=dict, compare=False)


def find_faults(
    anatomy: Anatomy, middles: Mapping[int, nn.Module], watch: Watch, dtype: torch.dtype,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Findings:  # fmt: skip
    """Test the rows of a recorded forward, and return the findings.

    Args:
        middles: by layer number, the norm before the layer's MLP. Statements 3 and 4 are tested
            only for these layers.
        dtype: the model's dtype.
        sizes: for each site inside the attention that has a tap, the number of elements of a row.

    Raises:
        CompatError: the forward ran layers, but not every layer exactly one time. Or the rows
            contradict the convention.
    """
    faults = _Faults(anatomy, middles, watch.layers, watch.norms)
    calls = {number: call.calls for number, call in watch.layers.items()}
    if any(calls.values()):
        for number, times in calls.items():
            if times != 1:
                raise CompatError(f"layer {number} runs {times} times in a forward")
        faults.compare()
        for number, rows in watch.routed.items():
            faults.check_router(number, rows, dtype)
        for number, given in watch.attended.items():
            faults.check_attention(number, given, sizes)
    else:
        faults.untold["any row, because the forward did not run layers"] = list(calls)
    untold = {what: tuple(layers) for what, layers in faults.untold.items()}
    moved = tuple(faults.moved)
    return Findings(faults.wrong_sites, moved, faults.num_equal, untold, faults.streams)


def may_return(convention: Convention, returned: object) -> bool:
    """True if a layer with this convention can return this value."""
    if convention is Convention.TENSOR:
        return isinstance(returned, Tensor)
    if not isinstance(returned, tuple) or len(returned) != 2:
        return False
    first, second = returned
    joined = convention is Convention.SUM
    return isinstance(first, Tensor) and (isinstance(second, Tensor) or not joined)


def row_error(one: Tensor, other: Tensor) -> float | None:
    """The largest relative error of a row. The relative error is the length of the difference,
    divided by the length of the longer row. None if a number is not finite."""
    error = (one - other).norm(dim=-1)
    length = torch.maximum(one.norm(dim=-1), other.norm(dim=-1))
    if not bool(torch.isfinite(error + length).all()):
        return None
    return float((error / length.clamp_min(torch.finfo(torch.float32).tiny)).max())


@dataclass
class _Faults:
    """Tests whether the statements at the top of this file are true for one forward. Rows are
    [num_tokens, hidden_size] in float32."""

    anatomy: Anatomy
    middles: Mapping[int, nn.Module]
    layers: Mapping[int, LayerCall]
    norms: Mapping[nn.Module, list[NormCall]]
    wrong_sites: dict[str, str] = field(default_factory=dict)
    moved: list[int] = field(default_factory=list)
    num_equal: int = 0
    untold: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    streams: dict[int, Tensor] = field(default_factory=dict)

    def compare(self) -> None:
        left: Tensor | None = None
        for number, call in self.layers.items():
            entry = None
            if call.given is not None:
                hidden, residual = call.given
                entry = _stream(hidden, residual if self._sums else None)
            if left is not None and self._gap(left, entry, "the input of layers", number):
                self.moved.append(number)
            first = self._input_of(call.first)
            gap = self._gap(entry, first, "the input of the first module of layers", number)
            self._require(gap, f"the input of layer {number} is not the input of its first norm")
            left = self.streams[number] = self._exit(number)
            if number in self.middles and self._sums:
                self._compare_branches(number, entry, left)
        last = max(self.layers)
        if last == self.anatomy.num_layers - 1:
            norm = self._input_of(self.anatomy.norm_here)
            gap = self._gap(left, norm, "the input of the norm after layers", last)
            self._require(gap, f"the output of layer {last} is not the input of the norm after it")
        else:
            self.untold["the input of the next pipeline stage, after layers"].append(last)

    def check_router(self, number: int, rows: list[object], dtype: torch.dtype) -> None:
        found = [str(x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in rows]
        if found == [str(dtype)]:
            return
        words = f"ran {len(found)} times in a forward"
        if len(found) == 1:
            words = f"returned rows of {found[0]}, and the model's rows are of {dtype}"
        self.wrong_sites.setdefault(ROUTER_SITE, f"the router of layer {number} {words}")

    def check_attention(
        self, number: int, given: Mapping[str, object], sizes: Mapping[str, int]
    ) -> None:
        for site, size in sizes.items():
            rows = given.get(site)
            if isinstance(rows, Tensor) and not fits(rows, size):
                self.wrong_sites.setdefault(
                    site, f"its rows at layer {number} have {math.prod(rows.shape[1:]):,} numbers, "
                    f"and {size:,} by the model's configuration",
                )  # fmt: skip

    def _compare_branches(self, number: int, entry: Tensor | None, left: Tensor) -> None:
        norm, call = self.middles[number], self.layers[number]
        what = "what is between attention and MLP of layers"
        if len(self.norms.get(norm, ())) != 1:
            self.untold[what].append(number)
            return
        (found,) = self.norms[norm]
        middle, returned = _stream(found.hidden, found.residual), call.returned
        assert isinstance(returned, tuple)
        mlp_out: Any = returned[0]
        attended = None if entry is None else entry + _flat(found.hidden)
        for sites, words, one, other in (
            (("resid_mid",), "is not what the norm before the MLP gets",
             middle, self._input_of(norm)),
            (("resid_mid", "attn_out"), "is not resid_pre + attn_out", middle, attended),
            (("resid_mid", "mlp_out"), "+ mlp_out is not resid_post",
             middle + _flat(mlp_out), left),
        ):  # fmt: skip
            if gap := self._gap(one, other, what, number):
                text = f"by numbers, resid_mid of layer {number} {words}: {_differs(gap)}"
                for site in sites:
                    self.wrong_sites.setdefault(site, text)

    @property
    def _sums(self) -> bool:
        return self.anatomy.convention is Convention.SUM

    def _exit(self, number: int) -> Tensor:
        """The stream that a layer returned, computed by the rule of the convention."""
        returned = self.layers[number].returned
        parts = returned if isinstance(returned, tuple) else (returned,)
        if not may_return(self.anatomy.convention, returned):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise CompatError(
                f"by its source, {self.anatomy.convention.value}, but layer {number} returned "
                f"({kinds})"
            )
        hidden: Any = parts[0]
        residual: Any = parts[1] if self._sums else None
        return _stream(hidden, residual)

    def _input_of(self, norm: nn.Module | None) -> Tensor | None:
        """The rows that a norm normalizes: `hidden`, or hidden + residual. None if the norm did not
        run exactly one time. Also None if the returned values do not show which of the two rows the
        norm normalizes."""
        calls = [] if norm is None else self.norms.get(norm, [])
        if len(calls) != 1:
            return None
        (call,) = calls
        hidden, residual, second = call.hidden, call.residual, call.second
        if residual is None:
            return _flat(hidden)
        if second is None or not hidden.shape == residual.shape == second.shape:
            return None
        total = _stream(hidden, residual)
        # If a norm does not use the residual, the norm returns the residual unchanged (Cohere).
        for rows, returned in ((total, total), (_flat(hidden), _flat(residual))):
            error = row_error(returned, _flat(second))
            if error is not None and error <= _tolerance(second.dtype):
                return rows
        return None

    def _gap(self, one: Tensor | None, other: Tensor | None, what: str, number: int) -> float:
        """The largest relative error of a row. 0 if this error can be a rounding error, or if the
        rows cannot be compared."""
        error = None
        if one is not None and other is not None and one.shape == other.shape:
            error = row_error(one, other)
        if error is None:
            self.untold[what].append(number)
            return 0.0
        given = (call.given for call in self.layers.values())
        if error > max((_tolerance(pair[0].dtype) for pair in given if pair), default=_LEAST):
            return error
        self.num_equal += 1
        return 0.0

    def _require(self, gap: float, words: str) -> None:
        if gap and self.anatomy.unread is not None:
            raise CompatError(f"{words}: {_differs(gap)}")
        if gap:
            raise CompatError(
                f"by its source, {self.anatomy.convention.value}, but by numbers {words}: "
                f"{_differs(gap)}"
            )


def _flat(rows: Tensor) -> Tensor:
    # In vLLM's Transformers backend, rows have a batch dimension of size 1.
    return rows.reshape(-1, rows.shape[-1]).float()


def _stream(hidden: Tensor, residual: Tensor | None) -> Tensor:
    return _flat(hidden) if residual is None else _flat(hidden) + _flat(residual)


def _tolerance(dtype: torch.dtype) -> float:
    return max(_STEPS * torch.finfo(dtype).eps, _LEAST)


def _differs(gap: float) -> str:
    return f"a row differs by {gap:.2g} of its length"
