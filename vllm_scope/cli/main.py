"""The commands and their options; what they do is in files of their names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Read what language models compute while vLLM serves them."""


Url = Annotated[str, typer.Option(envvar="VLLM_SCOPE_URL", help="Of the server.")]
ApiKey = Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="As vLLM's --api-key.")]
MaxTokens = Annotated[int, typer.Option(min=1)]
Temperature = Annotated[float, typer.Option(min=0)]
_LOCAL = "http://localhost:8000"


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


@app.command()
def read(
    prompt: str,
    site: Annotated[str, typer.Option(help="resid_post, q, ...: docs/reading.md.")] = (
        "resid_post"
    ),
    layers: Annotated[str, typer.Option(help="all, or numbers such as 2,5 or 0-3.")] = "all",
    tokens: Annotated[
        str, typer.Option(help="all, prompt, generated, last_prompt or last.")
    ] = "all",
    save: Annotated[Path | None, typer.Option(help="A .safetensors file to write.")] = None,
    url: Url = _LOCAL,
    api_key: ApiKey = None,
    max_tokens: MaxTokens = 16,
    temperature: Temperature = 0.0,
) -> None:
    """Complete PROMPT on a server, and show or save the rows that were computed."""
    from vllm_scope.cli.read import read as run
    from vllm_scope.cli.remote import Server

    run(Server(url, api_key, max_tokens, temperature), prompt, site, layers, tokens, save)


@app.command()
def steer(
    prompt: str,
    module: Annotated[str, typer.Option(help="A file of vectors, or a name the server holds.")],
    scale: Annotated[list[float] | None, typer.Option(help="May be given several times.")] = None,
    url: Url = _LOCAL,
    api_key: ApiKey = None,
    max_tokens: MaxTokens = 32,
    temperature: Temperature = 0.0,
) -> None:
    """Complete PROMPT plainly, and with a steering module at each scale."""
    from vllm_scope.cli.remote import Server
    from vllm_scope.cli.steer import steer as run

    run(Server(url, api_key, max_tokens, temperature), prompt, module, [0.0, *(scale or [1.0])])


@app.command()
def watch(
    prompt: str,
    probe: Annotated[list[Path], typer.Option(help="A probe's .safetensors; may be several.")],
    layer: Annotated[
        int | None,
        typer.Option(min=0, help="Whose rows the probes score, where no .json beside them says."),
    ] = None,
    chat: Annotated[bool, typer.Option(help="PROMPT is a user's message.")] = False,
    url: Url = _LOCAL,
    api_key: ApiKey = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
) -> None:
    """Complete PROMPT, and show the scores of probes while the tokens stream."""
    from vllm_scope.cli.remote import Server
    from vllm_scope.cli.watch import watch as run

    run(Server(url, api_key, max_tokens, temperature), prompt, probe, layer, chat)
