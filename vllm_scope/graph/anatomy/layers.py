"""Finds the decoder layers of a loaded model.

Owns:  Anatomy, the answer; `find_anatomy`, the search.
Runs:  in every worker, after load. Knows torch modules, not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.convention import Convention, convention_of


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
    """

    layers: dict[int, nn.Module]
    num_layers: int
    convention: Convention
    path: str
    attention: Mapping[int, nn.Module] = field(default_factory=dict)


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
            if here:
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
    return Anatomy(layers, num_layers, conventions.pop(), path)
