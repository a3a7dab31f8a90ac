"""vllm-scope: read and edit what a transformer computes, while stock vLLM serves it.

    from vllm_scope import Read, scope
    params = SamplingParams(extra_args=scope(Read("resid_post", layers=[2, 5])))
    out = llm.generate(prompts, params)[0]
    out.scope["resid_post", 5]            # Tensor [positions, hidden_size]

Importing this package does not import torch or vLLM.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from vllm_scope.errors import (
    CapacityError,
    CompatError,
    ConfigError,
    FileError,
    ScopeError,
    SpecError,
    shown,
)
from vllm_scope.request.actions import (
    Ablate,
    Add,
    Clamp,
    Features,
    Gate,
    Hysteresis,
    Latch,
    LensTopK,
    Moments,
    Pid,
    Policy,
    Probe,
    Read,
    Replace,
    ScaleFeature,
    SetFeature,
)
from vllm_scope.request.nets import AttentionPool, Ema, Mlp, RollingMean
from vllm_scope.request.schema import spec_schema
from vllm_scope.request.selectors import Except, Positions, TokenIds, Union
from vllm_scope.request.spec import Spec, scope
from vllm_scope.sweeps import KL, Cell, LogitDifference, Logprob, Metric, Sweep, SweepTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Literal

    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_scope.batch.sums import Sums
    from vllm_scope.engine.vllm_types import LLMEngine
    from vllm_scope.feeds.row_feed import RowFeed
    from vllm_scope.files import Capture
    from vllm_scope.harvests.job import Harvest

__version__ = "0.1.0"

__all__ = [
    "KL",
    "Ablate",
    "Add",
    "AttentionPool",
    "CapacityError",
    "Cell",
    "Clamp",
    "CompatError",
    "ConfigError",
    "Ema",
    "Except",
    "Features",
    "FileError",
    "Gate",
    "Hysteresis",
    "Latch",
    "LensTopK",
    "LogitDifference",
    "Logprob",
    "Metric",
    "Mlp",
    "Moments",
    "Pid",
    "Policy",
    "Positions",
    "Probe",
    "Read",
    "Replace",
    "RollingMean",
    "ScaleFeature",
    "ScopeError",
    "SetFeature",
    "Spec",
    "SpecError",
    "Sweep",
    "SweepTable",
    "TokenIds",
    "Union",
    "__version__",
    "drop_moments",
    "harvest",
    "moments",
    "scope",
    "set_monitors",
    "spec_schema",
    "stream",
    "sweep",
    "sweep_async",
]


def _engine_of(llm: LLM, other: str) -> LLMEngine:
    """The engine of an LLM. Raises SpecError for any other object.

    Args:
        other: the call for an AsyncLLM. The text of the error contains this call.
    """
    if not hasattr(llm, "llm_engine"):
        raise SpecError(
            f"the engine is {shown(llm)}; it must be a vllm.LLM. With an AsyncLLM: {other}."
        )
    engine: LLMEngine = llm.llm_engine
    return engine


def set_monitors(llm: LLM, monitors: Mapping[str, object]) -> None:
    """Set the monitors of an `LLM`: the probes that the `LLM` adds to every request from now on.

    Args:
        llm: a vllm.LLM. For an AsyncLLM, call `vllm_scope.engine.monitors.set_on_async`. For a
            server, send `PUT /v1/scope/monitors`.
        monitors: maps a name to the fields of a probe with a threshold, as in JSON
            (docs/monitors.md). These monitors replace the earlier monitors. An empty mapping ends
            all monitors.

    Raises:
        SpecError: `llm` is not a vllm.LLM, or a monitor is malformed or not possible on this
            engine. The earlier monitors stay set.
    """
    from vllm_scope.engine.monitors import set_on

    other = "await vllm_scope.engine.monitors.set_on_async(engine, monitors)"
    set_on(_engine_of(llm, other), monitors)


def moments(llm: LLM, name: str = "moments") -> dict[tuple[str, int, str], Sums]:
    """The sums to which requests with Moments have added rows.

    After a request has ended, the sums contain all its selected rows. Rows that could not be added
    are counted as `missing`. For an AsyncLLM, call `vllm_scope.engine.moments.moments_of_async`.
    For a server, send `GET /v1/scope/moments/NAME`.

    Args:
        llm: vllm.LLM.
        name: the name that the requests gave in Moments.

    Returns:
        A mapping of (site, layer, label) to `Sums` in float64 numpy. `Sums` have `count` and
        `mean`. If the Moments asked for it, they also have `covariance`.
        `vllm_scope.analysis.moments` makes probes from these sums.

    Raises:
        SpecError: `llm` is not a vllm.LLM, or there are no sums with this name. In the second case,
            the error's text lists at most 8 names that have sums.
    """
    from vllm_scope.engine.moments import moments_of

    other = "await vllm_scope.engine.moments.moments_of_async(engine, name)"
    return moments_of(_engine_of(llm, other), name)


def drop_moments(llm: LLM, name: str = "moments") -> bool:
    """Drop the sums of a name. Running requests do not add rows to these sums any more.

    Returns:
        False if the name had no sums.
    """
    from vllm_scope.engine.moments import drop_moments_of

    other = "await vllm_scope.engine.moments.drop_moments_of_async(engine, name)"
    return drop_moments_of(_engine_of(llm, other), name)


def harvest(
    dataset: object,
    *reads: Read,
    model: str | LLM,
    out: str | os.PathLike[str],
    column: str | None = None,
    id_column: str | None = None,
    split: str = "train",
    config: str | None = None,
    long: Literal["truncate", "split", "pack"] = "split",
    context: int | None = None,
    file_mib: int = 256,
    fsync: bool = False,
    mode: str = "600",
    progress: bool = True,
    engine: Mapping[str, Any] | None = None,
    engines: int | None = None,
    ray: bool | str = False,
) -> Harvest:
    """Compute the rows of a data set's documents, and write them to large files (shards).

    docs/harvest.md describes harvests. If an earlier call with the same arguments was killed, this
    call continues its work: rows that are already in shards are not computed again.
    `vllm_scope.open(out)` reads the rows by document id.

    Args:
        dataset: a Parquet, JSONL or text file, a folder of such files, the name or folder of a
            Hugging Face data set, a `datasets.Dataset`, or a list of texts or of token ids.
        reads: at least one Read. A read's `codec` makes rows smaller on the device.
        model: a model's name or folder, as for vLLM, or an LLM. An LLM stays open after the call.
        out: a folder, or a URL that fsspec supports.
        column: the column with the documents. By default, the first of `text`, `input_ids`,
            `token_ids` and `tokens` that has a value.
        id_column: the column of the ids. All documents must have different ids. If `id_column` is
            None, an id consists of the start of the data set's fingerprint, and the document's row
            number in the data set.
        split, config: the split and the configuration of a Hugging Face data set.
        long: how documents become contexts, which are the prompts of the model. "truncate" makes
            one context of a document, and leaves out later tokens. "split" makes several contexts
            of a long document. "pack" joins all documents and cuts them into contexts of equal
            length.
        context: the largest number of tokens of a context, by default max_model_len - 1.
        file_mib, fsync, mode: options of the shards, as in docs/files.md.
        progress: if True, show a line with the rate and the remaining time.
        engine: further arguments of `vllm.LLM`, such as {"dtype": "bfloat16"}.
        engines: the number of engines, each in its own process and on its own GPUs. If None, there
            is one engine in this process. If None and `ray` is given, there are as many engines as
            the cluster's GPUs allow. If an engine in another process dies, a new engine replaces
            it. As with `multiprocessing`, a script's main part must be below `if __name__ ==
            "__main__":`.
        ray: if True, the engines are Ray actors on the cluster at RAY_ADDRESS. If RAY_ADDRESS is
            not set, the engines are on a new cluster of this host. If `ray` is a text, the text is
            the address of the cluster. All hosts of the cluster must have access to `out`.

    Raises:
        ConfigError: the folder has a harvest with other settings, or there is no room for the
            engines.
        SpecError: the engine cannot do these reads, or an entry of the data set has no document.
        FileError: a file cannot be read or written, or another process writes to the folder.
    """
    from vllm_scope.harvests.start import harvest_with

    return harvest_with(
        dataset, reads, model, os.fspath(out), column=column, id_column=id_column, split=split,
        config=config, long=long, context=context, file_mib=file_mib, fsync=fsync, mode=mode,
        progress=progress, engine=engine, engines=engines, ray=ray,
    )  # fmt: skip


def open(path: str | os.PathLike[str]) -> Capture:
    """Open the captured requests in a folder, a file or at a URL (`vllm_scope.files`).

    Raises:
        FileError: there are no captured requests, or a file of this package is damaged.
    """
    from vllm_scope.files import open as open_files

    return open_files(path)


def stream(
    dataset: object,
    *reads: Read,
    model: str | LLM,
    batch_size: int = 4096,
    buffer_rows: int = 65_536,
    seed: int = 0,
    column: str | None = None,
    split: str = "train",
    config: str | None = None,
    long: Literal["truncate", "split", "pack"] = "split",
    context: int | None = None,
    engine: Mapping[str, Any] | None = None,
) -> RowFeed:
    """Compute the rows of a data set's documents for a trainer. No row is written to a disk.

        for batch in stream(texts, Read("resid_post", layer=5), model="Qwen/Qwen3-8B"):
            batch["resid_post", 5]  # [batch_size, hidden_size]

    Each row comes one time, in the order that docs/harvest.md describes. If the trainer is slower
    than the engine, the engine waits.

    Args:
        dataset: as for `harvest`. A `datasets.Dataset` is allowed only if `model` is an LLM.
        reads: at least one Read. All reads must have the same `tokens`.
        model: the name or folder of a model, or an LLM. With a name or folder, the feed starts an
            engine in another process, and stops the engine when the feed ends. The feed uses an LLM
            on a thread of this process, and the LLM stays open. Do not use the LLM before the feed
            has ended.
        batch_size: number of rows of a batch. The last batch can have fewer rows.
        buffer_rows: the number of rows in shared memory, at least twice `batch_size`. A batch is
            drawn at random from one half, while the feed writes later rows into the other half.
        seed: at least 0. Calls with the same arguments give the same batches.
        column, split, config, long, context, engine: as for `harvest`.

    Raises:
        SpecError: an argument is wrong. An error that only the engine can find is raised at the
            first batch (SpecError, ConfigError or FileError). If the engine has died, the error is
            a ScopeError.
    """
    from vllm_scope.feeds.messages import Settings
    from vllm_scope.feeds.start import start_feed

    settings = Settings(batch_size, buffer_rows, seed, column, split, config, long, context)
    return start_feed(dataset, reads, model, settings, engine or {})


def sweep(
    llm: LLM,
    prompts: object,
    sweep: Sweep,
    *,
    on_cell: Callable[[Cell], object] | None = None,
    progress: bool | Literal["map"] = True,
    share: float = 1.0,
) -> SweepTable:
    """Measure how single edits of prompts' rows change the next token (docs/sweeps.md).

    The sweep makes one edit for each chosen layer, position and head of each prompt. If an
    exception in `on_cell` or an interrupt ends the sweep, the sweep's requests end too.

    Args:
        llm: a vllm.LLM without running requests.
        prompts: a text, {"prompt_token_ids": [...]}, or a list of texts and such dicts.
        on_cell: a function that is called with each Cell when its value arrives, in any order.
        progress: if True, show a progress bar. If "map", show the table in the notebook, and add
            each value when it arrives. "map" needs vllm-scope[notebook].
        share: the largest part of a step's sequences and tokens that the sweep can take, above 0
            and at most 1.

    Raises:
        ConfigError: `progress` is "map", and anywidget is not installed.
        SpecError: an argument is wrong, or the sweep is not possible on this engine or with these
            prompts.
        ScopeError: a request that reads a prompt failed, or the LLM has running requests.
    """
    from vllm_scope.engine.frontend.sweep_runs import run

    engine = _engine_of(llm, "await vllm_scope.sweep_async(engine, prompts, sweep)")
    return run(engine, prompts, sweep, on_cell, progress, share)


async def sweep_async(
    engine: AsyncLLM,
    prompts: object,
    sweep: Sweep,
    *,
    on_cell: Callable[[Cell], object] | None = None,
    progress: bool | Literal["map"] = True,
    share: float = 0.5,
) -> SweepTable:
    """The same as `sweep`, on an AsyncLLM, which can serve other requests at the same time.

    The arguments and the errors are those of `sweep`. If the call is cancelled, the sweep's
    requests end. While the engine has other requests, the sweep sends only a few edits at a time
    and then pauses. The sweep thus uses the engine for about `share / 5` of the time.
    """
    from vllm_scope.engine.frontend.sweep_runs import run_async

    return await run_async(engine, prompts, sweep, on_cell, progress, share)
