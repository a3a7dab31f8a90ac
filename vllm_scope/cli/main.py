"""The commands and their options. Each command's code is in the file with its name."""

from __future__ import annotations

import gc
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Read what language models compute while vLLM serves them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model's text can have characters that the terminal's encoding does not have.
            stream.reconfigure(errors="backslashreplace")


Url = Annotated[str, typer.Option(envvar="VLLM_SCOPE_URL", help="The server's URL.")]
ApiKey = Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="As vLLM's --api-key.")]
Layers = Annotated[str, typer.Option(help="Layers: all, or numbers such as 2,5 or 0-3.")]
MaxTokens = Annotated[int, typer.Option(min=1)]
Temperature = Annotated[float, typer.Option(min=0)]
_LOCAL = "http://localhost:8000"


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="A model's name or folder, as vLLM takes it.")],
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="As vLLM's --dtype.")] = "auto",
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1,
            help="As in vLLM, the share of memory that must be free. Default: 0.01.",
        ),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(
            help="Sites to configure, such as resid_mid,attn_out. Default: as in an engine."
        ),
    ] = None,
    saes: Annotated[
        str | None,
        typer.Option(help="Sparse autoencoders to measure, such as toy=FOLDER,other=FILE."),
    ] = None,
    lenses: Annotated[
        str | None,
        typer.Option(help="Tuned or Jacobian lenses to measure, such as tuned=FILE."),
    ] = None,
    trust_remote_code: bool = False,
) -> None:
    """Say which sites and layers of MODEL can be read with this vLLM, and why
    other sites cannot be read.

    The model is built without weights. Only the model's configuration is
    downloaded, and nothing is compiled. A server can run at the same time. The
    command tries each site, also sites that are tapped only if they are
    configured.

    The exit status is 0 if an engine with these sites can read the model, and 1
    if the engine cannot read the model. The exit status is 2 if there is no
    answer (an unknown model, wrong options, or no memory), or if an SAE or a
    lens cannot be used.
    """
    gc.disable()  # saves 1.5 s of 10 s; imported objects stay in memory anyway
    from vllm_scope.cli.doctor import examine

    options: dict[str, object] = {
        "tensor_parallel_size": tensor_parallel_size,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "max_num_batched_tokens": max_num_batched_tokens,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    given = {name: value for name, value in options.items() if value is not None}
    named = None if sites is None else [site.strip() for site in sites.split(",")]
    sys.exit(examine(model, given, named, _paths("--saes", saes), _paths("--lenses", lenses)))


def _paths(option: str, text: str | None) -> dict[str, str]:
    """The paths by name, from a text such as "name=path,other=path"."""
    pairs = [] if text is None else [each.partition("=") for each in text.split(",")]
    for name, _, path in pairs:
        if not (name.strip() and path):
            raise typer.BadParameter(
                f"{option} has {name!r}; it must be NAME=PATH, or several with commas between them."
            )
    return {name.strip(): path for name, _, path in pairs}


@app.command()
def read(
    prompt: str,
    site: Annotated[str, typer.Option(help="A site, such as q or z.")] = "resid_post",
    layers: Layers = "all",
    tokens: Annotated[
        str, typer.Option(help="Tokens: all, prompt, generated, last_prompt or last.")
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
def harvest(
    dataset: Annotated[
        str,
        typer.Argument(help="A Parquet, JSONL or text file, a folder, or a Hugging Face data set."),
    ],
    model: Annotated[str, typer.Option(help="A model's name or folder, as vLLM takes it.")],
    out: Annotated[str, typer.Option(help="A folder, or a URL that fsspec knows.")],
    site: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    layers: Layers = "all",
    tokens: Annotated[str, typer.Option(help="Tokens: all, last, or a selector as JSON.")] = "all",
    codec: Annotated[str | None, typer.Option(help="A codec, or its options as JSON.")] = None,
    column: Annotated[str | None, typer.Option(help="Column of texts or ids.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column of document ids.")] = None,
    split: Annotated[str, typer.Option(help="Split of a Hugging Face data set.")] = "train",
    config: Annotated[
        str | None, typer.Option(help="Configuration of a Hugging Face data set.")
    ] = None,
    long: Annotated[str, typer.Option(help="Long documents: truncate, split or pack.")] = "split",
    context: Annotated[int | None, typer.Option(help="Most tokens of one prompt.")] = None,
    file_mib: Annotated[int, typer.Option(min=1, help="Size of a shard.")] = 256,
    fsync: Annotated[bool, typer.Option("--fsync", help="Wait for the disk.")] = False,
    mode: Annotated[str, typer.Option(help="Permissions of the files.")] = "600",
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    dtype: Annotated[str | None, typer.Option(help="As vLLM's --dtype.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="As vLLM's.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="As vLLM's.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="As vLLM's.")] = None,
    engine: Annotated[str | None, typer.Option(help="Further arguments of LLM, as JSON.")] = None,
    engines: Annotated[
        int | None,
        typer.Option(min=1, help="Number of engines. Default with --ray: as many as fit."),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run the engines on a Ray cluster.")] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Address of the Ray cluster. Default: RAY_ADDRESS, or a new cluster."),
    ] = None,
) -> None:
    """Compute the rows of DATASET's documents, and write them to shards.

    If the command was killed, the same command continues the work. No row is
    lost, no row is stored twice, and rows in a shard are not computed again.
    """
    from vllm_scope.cli.harvest import harvest as run

    options: dict[str, object] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    given = {name: value for name, value in options.items() if value is not None}
    run(
        dataset, site or ["resid_post"], layers, tokens, codec, given, engine, model=model, out=out,
        column=column, id_column=id_column, split=split, config=config, long=long, context=context,
        file_mib=file_mib, fsync=fsync, mode=mode, progress=not quiet, engines=engines,
        ray=ray_address or ray,
    )  # fmt: skip


@app.command()
def steer(
    prompt: str,
    module: Annotated[str, typer.Option(help="A file of vectors, or a steering module's name.")],
    scale: Annotated[list[float] | None, typer.Option(help="May be given several times.")] = None,
    url: Url = _LOCAL,
    api_key: ApiKey = None,
    max_tokens: MaxTokens = 32,
    temperature: Temperature = 0.0,
) -> None:
    """Complete PROMPT without a steering module, and with it at each scale."""
    from vllm_scope.cli.remote import Server
    from vllm_scope.cli.steer import steer as run

    run(Server(url, api_key, max_tokens, temperature), prompt, module, [0.0, *(scale or [1.0])])


@app.command()
def watch(
    prompt: str,
    probe: Annotated[list[Path], typer.Option(help="A probe's file; can be repeated.")],
    layer: Annotated[
        int | None,
        typer.Option(min=0, help="Layer of the scored rows, for a probe without a .json file."),
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="PROMPT is a user's message, or a JSON list of messages.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system message of the chat.")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens: all, prompt, generated, ... Default: generated if the probe was fitted "
            "to generated tokens, otherwise all."
        ),
    ] = None,
    url: Url = _LOCAL,
    api_key: ApiKey = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
) -> None:
    """Complete PROMPT, and show the scores of probes while the tokens stream.

    On a terminal each token has the colour of the first probe's score. In a
    pipe, or if NO_COLOR is set, each token has a line with the position, the
    scores of the token's row, and the text as JSON, with tabs between them.
    """
    from vllm_scope.cli.remote import Server
    from vllm_scope.cli.watch import watch as run

    server = Server(url, api_key, max_tokens, temperature)
    run(server, prompt, probe, layer, chat, system, tokens)


@app.command()
def monitor(
    url: Annotated[str, typer.Argument(envvar="VLLM_SCOPE_URL", help="The server's URL.")] = _LOCAL,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between requests.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table, and end.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write this .html file, and end.")] = None,
    api_key: ApiKey = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="VLLM_SCOPE_ADMIN_KEY", help="The operator's key.")
    ] = None,
) -> None:
    """Show a server's monitors, and their findings since they were set.

    On a terminal the table is refreshed until Ctrl-C. In a pipe, the table is
    printed once. The server's page /scope/monitors shows the same table in a
    browser.
    """
    from vllm_scope.cli.monitor import monitor as run

    run(url, api_key, admin_key, interval, once, page)
