"""`vllm-scope doctor`: what can be read of a model, on this machine, with this vLLM.

Builds the very worker that would serve the model, with random weights, and asks it.
"""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_scope import __version__
from vllm_scope.engine.describe import describe_model
from vllm_scope.errors import ScopeError
from vllm_scope.sites import KNOWN_SITES, SITES, boundary_of


def examine(model: str, options: dict[str, Any]) -> int:
    """Print the findings; the exit status, 0 where the model can be read."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = Console()
    try:
        ranks, vllm_version = describe_model(model, options)
    except (ScopeError, OSError, ValueError) as error:
        # vLLM and Transformers answer a wrong model with one of these.
        console.print(f"[red]{escape(model)}: {escape(_first_line(error))}[/red]")
        return 1
    first = ranks[0]
    console.print(f"vllm-scope {__version__}, vLLM {vllm_version}, model runner {first['runner']}")
    if first["reason"] is not None:
        console.print(
            f"[red]{escape(model)} cannot be read:[/red] {escape(first['reason'])}.\n"
            "It is served plainly; a request with reads is refused with this reason."
        )
        return 1
    console.print(_table(first, ranks))
    for rank in ranks:
        if rank["drains"]:
            console.print(
                f"Stage {rank['stage']}: {len(rank['taps_here'])} taps, "
                f"arena {rank['arena_mib']:.1f} MiB."
            )
    return 0


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _table(first: dict[str, Any], ranks: list[dict[str, Any]]) -> Table:
    sites = first["sites"]
    boundaries = {b for rank in ranks for b in rank["taps_here"]}
    table = Table(title=f"{sites['num_layers']} layers of {sites['hidden_size']}, {sites['dtype']}")
    table.add_column("site")
    table.add_column("layers")
    table.add_column("why not")
    for site in KNOWN_SITES:
        if site not in SITES:
            table.add_row(site, "-", "this version has no tap there")
            continue
        if site == "embed":
            found = "yes" if 0 in boundaries else "-"
        else:
            layers = range(sites["num_layers"])
            found = _ranges([k for k in layers if boundary_of((site, k)) in boundaries])
        table.add_row(site, found, "" if found != "-" else "not among the configured sites")
    return table


def _ranges(numbers: list[int]) -> str:
    """0-3, 7 for [0, 1, 2, 3, 7]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts) or "-"
