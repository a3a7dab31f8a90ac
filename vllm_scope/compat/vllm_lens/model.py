"""Methods like those of pydantic's models, for Hook and SteeringVector. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields
from typing import Self

from vllm_scope.errors import SpecError, shown

NO_HOOKS = (
    "hooks are Python functions, which are arbitrary code: a server runs none. Use Read, Probe, "
    "Add, Ablate, Clamp and Replace of vllm_scope; docs/faces.md has one for each use."
)


@dataclass(frozen=True, eq=False)
class Model:
    """The base class of dataclasses that check their fields in `__post_init__`."""

    @classmethod
    def model_validate(cls, obj: object) -> Self:
        """Return `obj` if `obj` is an instance of this class. Otherwise make one from its fields.

        Raises:
            SpecError: `obj` is of another type, or has an unknown, a missing or a wrong field.
        """
        if isinstance(obj, cls):
            return obj
        known = {field.name: field for field in fields(cls)}
        name = cls.__name__
        if not isinstance(obj, Mapping):
            raise SpecError(
                f"{name} is {shown(obj)}; it must be an object with the fields {', '.join(known)}."
            )
        if unknown := set(obj) - set(known):
            raise SpecError(
                f"{name} has {shown(min(unknown, key=str))}; its fields are {', '.join(known)}."
            )
        for field in known.values():
            if field.default is MISSING and field.name not in obj:
                raise SpecError(f"{name} has no {field.name!r}; give one.")
        return cls(**obj)

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> Self:
        """A copy with new values for some fields. Unlike pydantic, this method checks the values.

        Args:
            deep: whether the values of the other fields are copied too.
        """
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return self.model_validate({**(deepcopy(held) if deep else held), **(update or {})})
