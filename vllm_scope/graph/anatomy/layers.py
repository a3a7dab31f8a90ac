"""Finds the decoder layers of a loaded model.

Owns:  Anatomy, the answer; `find_anatomy`, the search.
Runs:  in every worker, after load. Knows torch modules, not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.convention import Convention, convention_of, final_norm_of
from vllm_scope.graph.anatomy.split import Split
from vllm_scope.request.sites import Place


@dataclass(frozen=True)
class Anatomy:
    """The decoder layers that this worker holds.

    Attributes:
        layers: layer number (global, from 0) -> module.
        num_layers: of the whole model, all pipeline stages.
        convention: what the layers return.
        path: the name of the list that holds them.
        attention: layer number -> the module that is called with q, k and v. Only of layers
            that have tapped sites there.
        projections: layer number -> the module of its MLP whose input is `mlp_post`. Only of
            layers that have a tap there.
        routers: layer number -> the module whose output is `router_logits`. Only of layers that
            have a tap there.
        blocks: `attn_in` or `mlp_in` at a layer -> the module whose input it is. Only where it has
            a tap.
        splits: site whose rows the tensor-parallel ranks share -> how. Empty with one rank.
        norm: the name of the norm behind the last layer, in the module that runs the layers;
            None if it is not found in the source.
        norm_here: that norm; None on another pipeline stage.
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


def find_anatomy(
    model: nn.Module, num_layers: int, is_missing: Callable[[nn.Module], bool]
) -> Anatomy:
    """The one list of `num_layers` modules that is the model's decoder.

    Args:
        model: the loaded model.
        num_layers: from its configuration.
        is_missing: True for the placeholder of a layer that another pipeline stage holds.

    Raises:
        CompatError: no such list, more than one, mixed layer classes whose
            conventions differ, or a convention that is not known.
    """
    found: list[tuple[str, nn.Module, dict[int, nn.Module]]] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            here = {i: layer for i, layer in enumerate(module) if not is_missing(layer)}
            parent = model.get_submodule(path.rpartition(".")[0])
            # A model may keep the same layers in a second list (Gemma 4).
            if here and all(here != others for *_, others in found):
                found.append((path, parent, here))
    if len(found) != 1:
        names = ", ".join(path for path, *_ in found) or "none"
        raise CompatError(
            f"expected one list of {num_layers} decoder layers in "
            f"{type(model).__name__}, found {names}"
        )
    path, parent, layers = found[0]
    conventions = {convention_of(layer, parent) for layer in layers.values()}
    if len(conventions) != 1:
        raise CompatError(f"the layers of {type(model).__name__} return the stream in two ways")
    norm = final_norm_of(parent)
    module = None if norm is None else getattr(parent, norm, None)
    if not isinstance(module, nn.Module) or is_missing(module):
        module = None
    return Anatomy(layers, num_layers, conventions.pop(), path, norm=norm, norm_here=module)
