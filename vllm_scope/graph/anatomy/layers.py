"""Finds the decoder layers of a loaded model.

Owns:  Anatomy; `find_anatomy` and `supposed_anatomies`, which return objects of this class.
Runs:  in every worker, after the model is loaded. Uses only torch, not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.convention import Convention, convention_of, final_norm_of
from vllm_scope.graph.anatomy.source import is_norm
from vllm_scope.graph.anatomy.split import Split
from vllm_scope.request.sites import Place


@dataclass(frozen=True)
class Anatomy:
    """The decoder layers of this worker's part of the model, and their convention.

    Attributes:
        layers: maps the number of a layer in the whole model (from 0) to the layer's module.
        num_layers: the number of layers of the whole model, in all pipeline stages.
        convention: how the stream is computed from the values that a layer returns.
        path: the name of the module list that contains the layers.
        attention: for each layer with taps on q, k, v or z, the module whose forward gets q, k and
            v.
        projections: for each layer with a tap on `mlp_post`, the module whose input is `mlp_post`.
        routers: for each layer with a tap on `router_logits`, the router of the layer's experts.
        blocks: maps each tapped place of the sites `attn_in` and `mlp_in` to the module that has
            this place as its input.
        splits: the split of each site whose rows are split over the tensor-parallel ranks. Empty if
            there is one rank.
        norm: the attribute name of the norm after the last layer, in the module that runs the
            layers. None if the source does not show the norm.
        norm_here: the module of the norm after the last layer. None if `norm` is None, or if
            another pipeline stage has the module.
        unread: the reason why the source is not understood. None if the source is understood. If
            there is a reason, `convention` is only supposed: the rows of a forward must show that
            it is right.
    """

    layers: dict[int, nn.Module]
    num_layers: int
    convention: Convention
    path: str
    attention: Mapping[int, nn.Module] = field(default_factory=dict)
    projections: Mapping[int, nn.Module] = field(default_factory=dict)
    routers: Mapping[int, nn.Module] = field(default_factory=dict)
    blocks: Mapping[Place, nn.Module] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)
    norm: str | None = None
    norm_here: nn.Module | None = None
    unread: str | None = None


class UnreadError(CompatError):
    """The model's layers are found, but the source of a layer or of the model is not understood."""


def find_anatomy(
    model: nn.Module,
    num_layers: int,
    is_missing: Callable[[nn.Module], bool],
    has_cache: Callable[[nn.Module], bool],
) -> Anatomy:
    """The anatomy of a model whose decoder is one list of `num_layers` modules.

    Args:
        model: the loaded model.
        num_layers: the number of decoder layers, from the model's configuration.
        is_missing: True for the placeholder of a layer that another pipeline stage holds.
        has_cache: True for a module that stores keys and values, or states, of earlier tokens.
            Several lists can have `num_layers` modules (for example, a list of experts). Then the
            decoder is the list whose layers contain modules with a cache.

    Raises:
        UnreadError: the source code of the layers or of the model is not understood.
        CompatError: the model has no list of layers, or several lists that can be the layers. Or
            the layers have different conventions.
    """
    path, parent, layers = _decoder_of(model, num_layers, is_missing, has_cache)
    try:
        conventions = {convention_of(layer, parent) for layer in layers.values()}
    except CompatError as error:
        raise UnreadError(str(error)) from None
    if len(conventions) != 1:
        raise CompatError(f"the layers of {type(model).__name__} return the stream in two ways")
    norm = final_norm_of(parent)
    module = None if norm is None else getattr(parent, norm, None)
    if not isinstance(module, nn.Module) or is_missing(module):
        module = None
    return Anatomy(layers, num_layers, conventions.pop(), path, norm=norm, norm_here=module)


def supposed_anatomies(
    model: nn.Module,
    num_layers: int,
    is_missing: Callable[[nn.Module], bool],
    has_cache: Callable[[nn.Module], bool],
    unread: str,
) -> tuple[Anatomy, ...]:
    """For a model whose source code is not understood: one anatomy for each convention.

    Args:
        model, num_layers, is_missing, has_cache: the arguments of `find_anatomy`.
        unread: the reason why the source is not understood.

    Raises:
        CompatError: the model has no list of layers, or several lists that can be the layers; or
            the module that contains the layers does not have exactly one norm; or this worker does
            not have that norm.
    """
    path, parent, layers = _decoder_of(model, num_layers, is_missing, has_cache)
    norms = [name for name, _ in parent.named_children() if is_norm(name)]
    if len(norms) != 1 or is_missing(parent.get_submodule(norms[0])):
        raise CompatError(
            f"{unread}; and {type(parent).__name__} does not have exactly one norm beside its "
            "layers on this worker, whose input could show the stream"
        )
    (norm,) = norms
    known = Anatomy(
        layers, num_layers, Convention.SUM, path,
        norm=norm, norm_here=parent.get_submodule(norm), unread=unread,
    )  # fmt: skip
    return tuple(replace(known, convention=convention) for convention in Convention)


def _decoder_of(
    model: nn.Module,
    num_layers: int,
    is_missing: Callable[[nn.Module], bool],
    has_cache: Callable[[nn.Module], bool],
) -> tuple[str, nn.Module, dict[int, nn.Module]]:
    """The path of the module list that contains the layers, the module that contains this list, and
    this worker's layers."""
    found: list[tuple[str, nn.Module, dict[int, nn.Module]]] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            here = {i: layer for i, layer in enumerate(module) if not is_missing(layer)}
            parent = model.get_submodule(path.rpartition(".")[0])
            # A model can have the same layers in a second list (Gemma 4).
            if here and all(here != others for *_, others in found):
                found.append((path, parent, here))
    if len(found) > 1:
        with_cache = [
            one for one in found
            if any(has_cache(module) for layer in one[2].values() for module in layer.modules())
        ]  # fmt: skip
        found = with_cache or found
    if len(found) != 1:
        names = ", ".join(path for path, *_ in found) or "none"
        raise CompatError(
            f"expected one list of {num_layers} decoder layers in "
            f"{type(model).__name__}, found {names}"
        )
    return found[0]
