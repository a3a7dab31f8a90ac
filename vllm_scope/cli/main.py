"""The commands and their options; what they do is in files of their names."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Read what language models compute while vLLM serves them."""


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="A model's name or folder, as vLLM takes it.")],
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="As vLLM's --dtype.")] = "auto",
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    trust_remote_code: bool = False,
) -> None:
    """Say which sites and layers of MODEL can be read with this vLLM, and why not.

    Builds the model with random weights on this machine's device; downloads no weights.
    Exits with 1 where the model cannot be read.
    """
    from vllm_scope.cli.doctor import examine

    options: dict[str, object] = {
        "tensor_parallel_size": tensor_parallel_size,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    if max_num_batched_tokens is not None:
        options["max_num_batched_tokens"] = max_num_batched_tokens
    sys.exit(examine(model, options))
