"""Gives decoder layers, and norms inside them, a subclass whose forward has taps.

Owns:  the traced code around the op.
Runs:  `install_taps` runs one time, after the model is loaded and before its first compiled call.
       The compiler then traces the forwards of this file into the model's graph. The graph never
       changes after that, because vLLM drops torch.compile's guards.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm_scope.errors import CompatError, ConfigError
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.middle import norm_before_mlp
from vllm_scope.graph.anatomy.split import Split
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.request.sites import BRANCH_SITES, Place


def install_taps(anatomy: Anatomy, arena: Tensor, tables: Tables) -> tuple[int, ...]:
    """Add taps on the stream, and on the outputs of attention and MLP, in this worker's layers.

    Args:
        anatomy: the layers.
        arena: [num_slots, elements of a slot], the arena's slots.
        tables: the device tables. `tables.tap_of` has the boundaries of the model with a tap.

    Returns:
        The boundaries that have a tap on this worker.

    Raises:
        CompatError: layer 0 must get a tap at its entry, but its forward has no parameter
            `hidden_states`.
        ConfigError: `resid_mid`, `attn_out` or `mlp_out` is configured, but cannot be tapped on
            this model.
    """
    layers = sorted(anatomy.layers.items())
    places = {number: _places_of(number, tables.tap_of) for number, _ in layers}
    # Check all layers before the first change, so that a refused model is served unchanged.
    for number, layer in layers:
        _check(layer, number, places[number], anatomy.convention)
    for number, layer in layers:
        here = places[number]
        inner = {name: b for name, b in here.items() if name in ("attn_out", "middle")}
        if inner:
            norm = norm_of(layer, number, anatomy.convention)
            give_buffers(norm, inner, arena, tables)
            norm.__class__ = _tapped_norm(type(norm), frozenset(inner), tables.hidden_size)
        if "mlp_out" in here:  # this must be the innermost subclass
            give_buffers(layer, {"mlp_out": here["mlp_out"]}, arena, tables)
            layer.__class__ = _branching_layer(type(layer), tables.hidden_size)
        outer = {name: b for name, b in here.items() if name in ("entry", "exit")}
        if outer:
            give_buffers(layer, outer, arena, tables)
            layer.__class__ = _tapped_layer(type(layer), anatomy.convention, frozenset(outer))
    return tuple(sorted(b for here in places.values() for b in here.values()))


def _places_of(number: int, tap_of: Mapping[int, int]) -> dict[str, int]:
    """The boundaries of the taps of a layer. The possible keys are `entry`, `middle`, `exit`,
    `attn_out` and `mlp_out`. A boundary without a tap has no entry."""
    # Only layer 0 has a tap at its entry. The entry of any other layer is the exit of the layer
    # before it.
    places = {"entry": 0 if number == 0 else -1, "middle": 2 * number + 1}
    places["exit"] = 2 * number + 2
    places |= {site: Place(site, number).boundary for site in BRANCH_SITES}
    return {name: boundary for name, boundary in places.items() if boundary in tap_of}


def _check(layer: nn.Module, number: int, here: Mapping[str, int], convention: Convention) -> None:
    if "entry" in here and "hidden_states" not in parameters(type(layer)):
        raise CompatError(
            f"{type(layer).__name__}.forward has no hidden_states to read as the embedding"
        )
    words = {"middle": "resid_mid"} | {site: site for site in BRANCH_SITES}
    for place in (place for place in words if place in here):
        try:
            # A tap must read a branch's output before the output is added to the stream. This is
            # possible only if the layer returns (hidden, residual) and the next norm adds both.
            if place in BRANCH_SITES and convention is not Convention.SUM:
                raise CompatError(
                    f"{type(layer).__name__} adds to the stream inside ({convention.value})"
                )
            norm_of(layer, number, convention)
        except CompatError as error:
            raise refused_site(words[place], str(error)) from None


def refused_site(site: str, reason: str) -> ConfigError:
    return ConfigError(
        f"additional_config['scope'].sites has {site!r}, which cannot be tapped on this model: "
        f"{reason}. Leave it out of the sites."
    )


def refused_layer(site: str, number: int, layer: nn.Module, what: str) -> ConfigError:
    """The error for a configured site that a layer does not have. `what` follows the layer's name
    in a sentence, such as "has no MLP"."""
    return ConfigError(
        f"additional_config['scope'].sites has {site!r}, and layer {number} "
        f"({type(layer).__name__}) {what}. Leave the site out, or the layer out of "
        "additional_config['scope'].layers."
    )


def parameters(layer_class: type) -> list[str]:
    """The names of the parameters of a layer's forward, without `self`."""
    return list(inspect.signature(layer_class.forward).parameters)[1:]  # type: ignore[attr-defined]


def norm_of(layer: nn.Module, number: int, convention: Convention) -> nn.Module:
    """The norm, in this layer, that gets `resid_mid` as its input.

    Raises:
        CompatError: as `norm_before_mlp`, or the layer has no module with the norm's name.
    """
    name = norm_before_mlp(layer, convention)
    norm = getattr(layer, name, None)
    if not isinstance(norm, nn.Module):
        raise CompatError(f"layer {number} ({type(layer).__name__}) has no {name}")
    return norm


def give_buffers(
    module: nn.Module, places: Mapping[str, int], arena: Tensor, tables: Tables
) -> None:
    """Register the tensors that taps use as non-persistent buffers of the module. `places` maps the
    name of each tap of the module to the tap's boundary."""
    tensors = {
        "arena": arena, "tokens": tables.tokens, "programs": tables.programs,
        "ops": tables.ops, "vectors": tables.vectors, "host": tables.host,
    }  # fmt: skip
    tensors |= {name: tables.taps[tables.tap_of[boundary]] for name, boundary in places.items()}
    for name, tensor in tensors.items():
        module.register_buffer(f"scope_{name}", tensor, persistent=False)


def _tables(module: Any, number: Tensor) -> tuple[Tensor, ...]:
    """The op's arguments except `hidden` and `residual`, in the order of `definition.tap_rows`."""
    return (
        module.scope_arena, module.scope_tokens, module.scope_programs, module.scope_ops,
        module.scope_vectors, number, module.scope_host,
    )  # fmt: skip


def _tap(module: Any, hidden: Tensor, residual: Tensor | None, number: Tensor) -> None:
    torch.ops.vllm_scope.tap(hidden, residual, *_tables(module, number))


def tap_rows(
    module: Any, rows: Tensor | None, number: Tensor, size: int, split: Split | None = None
) -> Tensor:
    """Tap rows of a site that is not on the stream.

    Args:
        rows: [num_tokens, size], [num_tokens, heads, size of a head], or [1, num_tokens, size].
        number: the tap's row of Tables.taps.
        size: the number of elements of a whole row.
        split: the split of the rows over the ranks, in which this rank has `split.part` elements of
            each row. None if each rank has whole rows.

    Returns:
        The rows that the model must use after the tap: `rows`, or a copy of them.

    Raises:
        CompatError: the width or dtype of `rows` is wrong, or the elements of a row are not
            adjacent in memory. With a wrong width or dtype, a tap would overwrite other rows in the
            arena. A compiled model raises the error while the graph is traced.
    """
    dtype = module.scope_arena.dtype
    width = size if split is None else split.part
    if rows is None or not fits(rows, width) or rows.dtype != dtype:
        came = "nothing" if rows is None else f"rows of {tuple(rows.shape[1:])} {rows.dtype}"
        raise CompatError(f"a tap is given {came}, not rows of {width} {dtype}")
    if rows.stride(-1) != 1:
        raise CompatError("a tap is given rows whose numbers do not lie side by side")
    # This copies `rows` if it is a slice of wider rows. Otherwise the compiler would copy the wider
    # rows two times.
    flat = rows.reshape(-1, width).contiguous()
    if split is None:
        _tap(module, flat, None, number)
        return flat.view(rows.shape)
    whole = split.joined(flat)
    _tap(module, whole, None, number)
    return split.own(whole).view(rows.shape)


def fits(rows: Tensor, size: int) -> bool:
    """True if each row has `size` numbers."""
    # In vLLM's Transformers backend, rows have a batch dimension of size 1.
    batched = rows.shape[-1] == size and rows.dim() == 3 and rows.shape[0] == 1
    return batched or math.prod(rows.shape[1:]) == size


def _tapped_layer(base: type, convention: Convention, places: frozenset[str]) -> type[nn.Module]:
    """A subclass of `base` with taps at the entry and the exit of the layer."""
    entry, exit_ = "entry" in places, "exit" in places
    names = parameters(base)
    at = names.index("hidden_states") if "hidden_states" in names else -1
    sums = convention is Convention.SUM
    pair = convention is not Convention.TENSOR

    class Tapped(base):
        def forward(self, *args: Tensor, **kwargs: Tensor) -> object:
            if entry:
                # Layer 0 gets the output of the embedding, and no residual.
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[at]
                _tap(self, hidden, None, self.scope_entry)
            out = super().forward(*args, **kwargs)
            if exit_:
                hidden, residual = (out[0], out[1]) if pair else (out, None)
                _tap(self, hidden, residual if sums else None, self.scope_exit)
            return out

    Tapped.scope_base, Tapped.scope_places = base, places
    return named(Tapped, base)


def _branching_layer(base: type, size: int) -> type[nn.Module]:
    """A subclass of `base` with a tap on the MLP's output. `base` returns (hidden, residual).

    This must be the innermost subclass. The layer's exit tap and Python functions (anatomy.hooked)
    can write to the tensor of the MLP's output. This tap must read the MLP's output before these
    writes.
    """

    class Tapped(base):
        def forward(self, *args: Tensor, **kwargs: Tensor) -> object:
            out = super().forward(*args, **kwargs)
            return (tap_rows(self, out[0], self.scope_mlp_out, size), *out[1:])

    # The code that makes the outer subclasses looks for `hidden_states` in the signature.
    Tapped.forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    return named(Tapped, base)


def rebuilt(tapped: type, base: type, convention: Convention) -> type[nn.Module]:
    """A subclass of `base` with the taps of the class `tapped`. If `tapped` has no taps, this is
    `base` itself."""
    places = getattr(tapped, "scope_places", None)
    return base if places is None else _tapped_layer(base, convention, places)


def _tapped_norm(base: type, places: frozenset[str], size: int) -> type[nn.Module]:
    """A subclass of `base` with taps on the norm's input (hidden, or hidden + residual) and on the
    attention's output (hidden alone)."""
    middle, branch = (name in places for name in ("middle", "attn_out"))

    class Tapped(base):
        def forward(self, hidden: Tensor, residual: Tensor | None = None) -> object:
            if branch:  # this tap must run before edits of the stream are written to `hidden`
                hidden = tap_rows(self, hidden, self.scope_attn_out, size)
            if middle:
                _tap(self, hidden, residual, self.scope_middle)
            if residual is None:
                return super().forward(hidden)
            return super().forward(hidden, residual)

    return named(Tapped, base)


def named(tapped: type[nn.Module], base: type) -> type[nn.Module]:
    tapped.__name__ = tapped.__qualname__ = f"Tapped{base.__name__}"
    return tapped
