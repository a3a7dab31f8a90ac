"""`vllm-scope harvest`: writes the rows of a data set's documents into shards."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from vllm_scope.cli.remote import layers_of
from vllm_scope.errors import ScopeError, shown
from vllm_scope.request.actions import Read
from vllm_scope.request.selectors import WORDS
from vllm_scope.request.sites import MODEL_SITES


def reads_of(sites: Sequence[str], layers: str, tokens: str, codec: str | None) -> list[Read]:
    """A Read for each site. Raises ScopeError if an option is wrong."""
    chosen = (
        tokens if tokens in WORDS else _json(tokens, "--tokens", f"{', '.join(WORDS)}, or JSON")
    )
    named = codec if codec is None or not codec.startswith("{") else _json(codec, "--codec", "JSON")
    return [
        Read(
            site,
            layers=None if site in MODEL_SITES else layers_of(layers),
            tokens=chosen,
            codec=named,
        )
        for site in sites
    ]


def _json(text: str, option: str, words: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ScopeError(
            f"{option} is {shown(text)}; it must be {words} as in docs/harvest.md."
        ) from None


def harvest(
    dataset: str,
    sites: Sequence[str],
    layers: str,
    tokens: str,
    codec: str | None,
    engine: dict[str, Any],
    further: str | None,
    **options: Any,
) -> None:
    """Run a harvest, and print one line at its end. After a ScopeError or Ctrl-C, the line is on
    standard error, and the program ends with status 1 or 130."""
    from vllm_scope import harvest as run

    try:
        reads = reads_of(sites, layers, tokens, codec)
        more = {} if further is None else _json(further, "--engine", "JSON of an object,")
        if not isinstance(more, dict):
            raise ScopeError(
                f"--engine is {shown(further)}; it must be an object of LLM's arguments."
            )
        found = run(dataset, *reads, engine=engine | more, **options)
    except ScopeError as error:
        Console(stderr=True, soft_wrap=True).print(Text(str(error)))
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted. The same command goes on from here.")
        sys.exit(130)
    totals = found.manifest.totals
    Console(soft_wrap=True).print(
        Text(
            f"{found.out}: {totals['documents']:,} documents, {totals['tokens']:,} tokens, "
            f"{len(found.manifest.shards):,} shards; {found.computed:,} of "
            f"{totals['contexts']:,} contexts were computed now"
            + (f"; {totals['skipped']:,} were skipped." if totals["skipped"] else ".")
        )
    )
