"""SteeringVector, whose vectors a request adds to rows. Translates them to actions and to JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from vllm_scope.compat.bounds import MOST, few
from vllm_scope.compat.vllm_lens.model import Model
from vllm_scope.compat.vllm_lens.wire import deserialize_tensor, is_shape, serialize_tensor
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import Action, Add
from vllm_scope.request.arrays import MAX_NUMBERS
from vllm_scope.request.selectors import as_numbers

SITE = "resid_post"


@dataclass(frozen=True, eq=False)
class SteeringVector(Model):
    """Vectors that a request adds to the residual stream, at the exit of some layers.

    Attributes:
        activations: a tensor of the shape [num_layers, hidden_size] or [num_layers, num_positions,
            hidden_size]. With the first shape, all steered tokens get the same vectors. With the
            second shape, each position has its own vectors. An array, lists or JSON are possible
            too.
        layer_indices: one layer for each index of the first dimension of `activations`.
        scale: the factor of the vectors.
        norm_match: whether each vector is first scaled to the length of the token's row.
        position_indices: absolute positions without repeats, or None. If `activations` has two
            dimensions, only the tokens at these positions get the vectors. None then means every
            token. If `activations` has three dimensions, `position_indices` has one position for
            each index of the second dimension. None then means the positions 0 to
            num_positions - 1.

    Raises:
        SpecError: `activations` is not such a tensor or does not fit the indices, an index is not a
            whole number, or a position is negative or repeated.
    """

    activations: Tensor
    layer_indices: Sequence[int]
    scale: float = 1.0
    norm_match: bool = False
    position_indices: Sequence[int] | None = None

    def __post_init__(self) -> None:
        layers = _numbers(self.layer_indices, "SteeringVector.layer_indices")
        object.__setattr__(self, "layer_indices", layers)
        # This checks the shape before `_tensor` decodes bytes or makes a tensor from lists.
        shape = claimed_shape(self.activations)
        if shape is None or len(shape) not in (2, 3):
            raise SpecError(
                f"SteeringVector.activations has shape {shown(shape)}; it must be [num_layers, "
                "hidden_size] or [num_layers, num_positions, hidden_size]."
            )
        if shape[0] != len(layers):
            raise SpecError(
                f"SteeringVector.activations has {shape[0]} rows for {len(layers)} layer_indices."
            )
        if self.position_indices is not None:
            positions = _numbers(self.position_indices, "SteeringVector.position_indices")
            object.__setattr__(self, "position_indices", positions)
            if (first := min(positions, default=0)) < 0:
                raise SpecError(
                    f"SteeringVector.position_indices has {first}; positions are absolute, from 0. "
                    "The last token of a prompt of n tokens has the position n - 1."
                )
            if len(set(positions)) < len(positions):
                raise SpecError(
                    f"SteeringVector.position_indices {shown(positions)} has a position twice."
                )
            if len(shape) == 3 and len(positions) != shape[1]:
                raise SpecError(
                    f"SteeringVector.activations has {shape[1]} positions for "
                    f"{len(positions)} position_indices."
                )
        object.__setattr__(self, "activations", _tensor(self.activations))

    @property
    def num_edits(self) -> int:
        """The number of actions: one for each position of 3-D activations, otherwise 1."""
        return 1 if self.activations.dim() == 2 else int(self.activations.shape[1])

    def to_actions(self) -> list[Action]:
        values, positions = self.activations, self.position_indices
        parts: list[tuple[Tensor, Sequence[int] | str]]
        if values.dim() == 2:
            parts = [(values, "all" if positions is None else positions)]
        else:
            parts = [
                (values[:, i], [position])
                for i, position in enumerate(positions or range(values.shape[1]))
            ]
        return [
            Add(
                vectors, site=SITE, layers=self.layer_indices, scale=self.scale, tokens=tokens,
                norm_match=self.norm_match,
            )
            for vectors, tokens in parts
        ]  # fmt: skip

    def model_dump(self, mode: str = "json") -> dict[str, object]:
        """The JSON that `SteeringVector.model_validate` reads. `mode` has no effect."""
        body = {name: getattr(self, name) for name in FIELDS}
        return body | {"activations": serialize_tensor(self.activations, compress=False)}


FIELDS = tuple(field.name for field in fields(SteeringVector))


def claimed_shape(values: object) -> list[int] | None:
    """The shape of a tensor, an array or lists, or the shape in a tensor's JSON. Otherwise None.

    This function reads only the first item of each list.
    """
    if isinstance(values, Mapping):
        shape = values.get("shape")
        return shape if is_shape(shape) else None
    if isinstance(values, list | tuple):
        found: list[int] = []
        while isinstance(values, list | tuple) and len(found) < 4:
            found.append(len(values))
            values = values[0] if values else None
        return [*found, *getattr(values, "shape", ())]
    return list(values.shape) if hasattr(values, "shape") else None


def _numbers(values: object, where: str) -> list[int]:
    few(values, MOST["positions"], "numbers", where)
    found = as_numbers(values)
    if not isinstance(found, list) or not set(map(type, found)) <= {int}:
        raise SpecError(f"{where} is {shown(values)}; it must be a list of whole numbers.")
    return found


def _tensor(values: object) -> Tensor:
    where = "SteeringVector.activations"
    if isinstance(values, Tensor):
        return values
    if isinstance(values, Mapping):
        return deserialize_tensor(values, MAX_NUMBERS * 8, where)
    try:
        found = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where} is {shown(values)}, which is no tensor: {error}.") from None
    if found.dtype.kind not in "fiu":
        raise SpecError(
            f"{where} is {shown(values)}; it must be a tensor, an array or lists of numbers."
        )
    tensor = torch.from_numpy(np.ascontiguousarray(found))
    # torch.tensor converts a list of floats to float32, and so does this function.
    return (
        tensor.float() if isinstance(values, list | tuple) and found.dtype.kind == "f" else tensor
    )
