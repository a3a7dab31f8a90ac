"""Sends values from a worker to EngineCore, as attributes of a step's output.

Owns:  `is_output`, `carrying`, `carried`, `carries`.
Runs:  `carrying` in the worker, where an output is made; `carried` and `carries` in EngineCore.
To:    faults, verdicts; core.outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any


def is_output(output: object) -> bool:
    """True for a step's output, which may be asynchronous; False for a result before sampling."""
    return hasattr(output, "get_output") or hasattr(output, "sampled_token_ids")


def carrying(output: Any, name: str, find: Callable[[], dict[str, Any]]) -> Any:
    """The output with the result of `find`, by request, as its attribute `name`; no attribute if
    the result is empty.

    Args:
        output: what `execute_model` or `sample_tokens` returned.
        find: called when the output is made: by its `get_output` if it is asynchronous, else now.
    """
    if hasattr(output, "get_output"):
        make = output.get_output
        output.get_output = lambda: carrying(make(), name, find)
        return output
    found = find() if is_output(output) else {}
    if found:
        output = copy(output)  # vLLM uses one object for all steps without tokens
        setattr(output, name, found)
        output.scope_carries = True
    return output


def carries(output: object) -> bool:
    """True if an output carries anything."""
    return getattr(output, "scope_carries", False)


def carried(output: object, name: str) -> Mapping[str, Any]:
    """The values that an output carries under a name, by request; empty if there are none."""
    found = getattr(output, name, None)
    return found if isinstance(found, dict) else {}
