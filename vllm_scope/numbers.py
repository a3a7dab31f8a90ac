"""Numbers in options: finite, and no booleans."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FiniteFloat
from pydantic.functional_validators import BeforeValidator


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a valid number")
    return value


Number = Annotated[FiniteFloat, BeforeValidator(_no_bool)]
