"""`vllm-scope read`: completes one prompt, shows a table of the rows, and can save the rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_scope.cli.remote import (
    Server,
    asking,
    check_whole,
    layers_of,
    print_answer,
    printable,
    scope_of,
)
from vllm_scope.errors import FileError, ScopeError
from vllm_scope.request.actions import Read
from vllm_scope.request.sites import MODEL_SITES

if TYPE_CHECKING:
    from vllm_scope.client import ScopeData


def read(
    server: Server, prompt: str, site: str, layers: str, tokens: str, save: Path | None
) -> None:
    """Complete a prompt, and print the text and a table of the streams. If `save` is given, write
    the rows to this file."""
    console = Console()
    with asking(server, console) as client:
        if save is not None and not save.absolute().parent.is_dir():
            raise ScopeError(f"there is no folder {save.absolute().parent} to save {save.name} in.")
        if save is not None and save.is_dir():
            raise ScopeError(f"--save is {save}, which is a folder; name a file in it.")
        found = None if site in MODEL_SITES else layers_of(layers)
        out = client.complete(prompt, Read(site, layers=found, tokens=tokens), **server.fields)
        scope = scope_of(server, out.scope)
        if save is not None:  # write first, so that a later error does not lose the rows
            _write(save, scope)
        print_answer(console, Text(printable(prompt)).append(printable(out.text), "bold"))
        console.print(_table(scope))
        check_whole(scope)
        if save is not None:
            console.print(Text(f"{save}: {save.stat().st_size:,} bytes"))


def _table(scope: ScopeData) -> Table:
    table = Table(title=f"{scope.status}: {scope.delivered} of {scope.expected} rows")
    for heading in ("site", "layer", "positions", "shape", "mean length"):
        table.add_column(heading, justify="left" if heading == "site" else "right")
    for site, layer in scope.keys():
        rows, positions = scope[site, layer], scope.positions(site, layer)
        shown = f"{positions[0]} to {positions[-1]}" if len(positions) else "none"
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float64)
        length = np.linalg.norm(flat, axis=1).mean() if len(rows) else 0.0
        table.add_row(site, str(layer), shown, str(list(rows.shape)), f"{length:.3f}")
    return table


def _write(path: Path, scope: ScopeData) -> None:
    from safetensors.numpy import save

    arrays = {}
    for site, layer in scope.keys():
        arrays[f"{site}.{layer}"] = np.ascontiguousarray(scope[site, layer])
        arrays[f"{site}.{layer}.positions"] = scope.positions(site, layer)
    try:
        # `save_file` would give the file the mode 0600, whatever the umask is.
        path.write_bytes(save(arrays))
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}. Name another file.") from None
