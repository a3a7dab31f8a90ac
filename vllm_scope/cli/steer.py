"""`vllm-scope steer`: completes one prompt without and with a steering module."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from vllm_scope.cli.remote import (
    Server,
    asking,
    check_whole,
    print_answer,
    printable,
    scope_of,
)
from vllm_scope.errors import ScopeError
from vllm_scope.request.actions import Action, Add
from vllm_scope.request.sites import MODEL_SITES
from vllm_scope.vectors import load_vectors


def steer(server: Server, prompt: str, module: str, scales: list[float]) -> None:
    """Print a completion for each scale. With scale 0, the steering module is not added."""
    console = Console()
    with asking(server, console) as client:
        each = [_additions(module, scale) if scale else [] for scale in scales]
        for scale, actions in zip(scales, each, strict=True):
            out = client.complete(prompt, *actions, **server.fields)
            if actions:  # if a request is not complete, the module may not have been added
                check_whole(scope_of(server, out.scope))
            answer = Text(f"{scale:+g} ", "cyan").append(printable(out.text), "default")
            print_answer(console, answer)


def _additions(module: str, scale: float) -> list[Action]:
    """An Add for each vector of a file, or one Add for a steering module that the server holds."""
    if Path(module).suffix not in (".safetensors", ".gguf", ".npz", ".json"):
        if Path(module).is_file():
            raise ScopeError(
                f"{module} is no file of vectors; its name must end in .safetensors, .gguf, .npz "
                "or .json. Give such a file, or the name of a module that the server holds."
            )
        return [Add(module, scale=scale)]
    return [
        Add(
            vector,
            site=site,
            layers=None if site in MODEL_SITES else layer,
            scale=scale,
            tokens="".join(tier) or "all",
        )
        for (site, layer, *tier), vector in load_vectors(module).placed()
    ]
