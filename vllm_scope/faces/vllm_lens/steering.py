"""SteeringVector: vectors to add, and what they are as actions and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vllm_scope.actions import Action, Add
from vllm_scope.arrays import MAX_NUMBERS
from vllm_scope.errors import SpecError, shown
from vllm_scope.faces.vllm_lens.wire import deserialize_tensor, serialize_tensor

SITE = "resid_post"


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """Vectors to add to the residual stream, at the exit of some layers.

    Attributes:
        activations: [num_layers, hidden_size] for every token, or [num_layers,
            num_positions, hidden_size] for one token per position.
        layer_indices: one layer for each row of `activations`.
        scale: what the vectors are multiplied by.
        norm_match: add `scale * ||h||` times the vector's direction, per token.
        position_indices: absolute, each once. With two dimensions, the tokens that
            the vector is added to; with three, one for each of `activations`' positions.
            None means every token, or positions 0 to num_positions - 1.

    Raises:
        SpecError: shapes and indices do not fit each other, or a position comes twice.
    """

    activations: Any
    layer_indices: Sequence[int]
    scale: float = 1.0
    norm_match: bool = False
    position_indices: Sequence[int] | None = None

    def __post_init__(self) -> None:
        values = _tensor(self.activations)
        object.__setattr__(self, "activations", values)
        object.__setattr__(self, "layer_indices", list(self.layer_indices))
        if values.dim() not in (2, 3):
            raise SpecError(
                f"SteeringVector.activations has shape {list(values.shape)}; it is [num_layers, "
                "hidden_size] or [num_layers, num_positions, hidden_size]."
            )
        if len(values) != len(self.layer_indices):
            raise SpecError(
                f"SteeringVector.activations has {len(values)} rows for "
                f"{len(self.layer_indices)} layer_indices."
            )
        if self.position_indices is None:
            return
        positions = list(self.position_indices)
        object.__setattr__(self, "position_indices", positions)
        if len(set(positions)) < len(positions):
            raise SpecError(f"SteeringVector.position_indices {shown(positions)} has one twice.")
        if values.dim() == 3 and len(positions) != values.shape[1]:
            raise SpecError(
                f"SteeringVector.activations has {values.shape[1]} positions for "
                f"{len(positions)} position_indices."
            )

    def to_actions(self) -> list[Action]:
        """The same in this system's words."""

        def add(vectors: Tensor, tokens: Any) -> Action:
            return Add(
                vectors, SITE, layers=self.layer_indices, scale=self.scale, tokens=tokens,
                norm_match=self.norm_match,
            )  # fmt: skip

        if self.activations.dim() == 2:
            whole = self.position_indices is None
            return [add(self.activations, "all" if whole else self.position_indices)]
        positions = self.position_indices
        if positions is None:
            positions = range(self.activations.shape[1])
        return [add(self.activations[:, i], [position]) for i, position in enumerate(positions)]

    def model_dump(self, mode: str = "json") -> dict[str, Any]:
        """As it travels in JSON; `SteeringVector(**body)` reads it."""
        body = {field.name: getattr(self, field.name) for field in fields(self)}
        return body | {"activations": serialize_tensor(self.activations, compress=False)}


def _tensor(values: Any) -> Tensor:
    where = "SteeringVector.activations"
    if isinstance(values, Mapping):
        return deserialize_tensor(values, MAX_NUMBERS * 8, where)
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(f"{where} is {shown(values)}, which is no tensor: {error}.") from None
