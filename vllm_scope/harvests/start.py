"""Checks a harvest's arguments, locks its folder, starts its engine, and then runs the job.

Owns:  `harvest_with`, which `vllm_scope.harvest` and the command `harvest` call.
To:    job.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, get_args

from vllm_scope.errors import SpecError, checked_word, shown
from vllm_scope.files.options import FileOptions
from vllm_scope.harvests.contexts import Long
from vllm_scope.harvests.documents import find_documents
from vllm_scope.harvests.engines import Engine
from vllm_scope.harvests.guard import guarded
from vllm_scope.harvests.job import Harvest, Job
from vllm_scope.harvests.manifest import locked
from vllm_scope.harvests.member import Setup
from vllm_scope.harvests.pools import Pool
from vllm_scope.harvests.processes import Processes
from vllm_scope.harvests.ray_pool import RayPool
from vllm_scope.harvests.several import SeveralEngines
from vllm_scope.harvests.shards import take_left
from vllm_scope.harvests.storing import Storing
from vllm_scope.request.actions import MEMORY, Read

MOST_ENGINES = 4096
#: The words before `_parallel_size` in the names of some of vLLM's arguments. The product of these
#: arguments is the number of GPUs of an engine.
_PARALLEL = ("tensor", "pipeline", "data", "prefill_context")


def harvest_with(
    dataset: object,
    reads: Sequence[Read],
    model: object,
    out: str,
    *,
    column: str | None,
    id_column: str | None,
    split: str,
    config: str | None,
    long: Long,
    context: int | None,
    file_mib: int,
    fsync: bool,
    mode: str,
    progress: bool,
    engine: Mapping[str, Any] | None,
    engines: int | None,
    ray: bool | str,
) -> Harvest:
    """Run a harvest. The docstring of `vllm_scope.harvest` explains the arguments."""
    check_reads(reads, long)
    _check_engines(model, engines, ray)
    files = FileOptions.parse({"root": out, "file_mib": file_mib, "fsync": fsync, "mode": mode})
    documents = find_documents(dataset, column, id_column, split, config)
    options = _digest(engine or {}) if isinstance(model, str) else None
    job = Job(documents, tuple(reads), files, long, context, progress, options)
    with locked(out, files.fsync, files.file_mode):
        take_left(files)
        if isinstance(model, str) and (found := job.finished(model)) is not None:
            return found
        make = partial(_engine, model, engine or {}, job.reads)
        if ray is not False or engines is not None:
            return _with_several(job, make, ray, engines, engine or {})
        with closing(make()) as made:
            if (found := job.finished(made)) is not None:
                return found
            with closing(Storing(made, job.reads, files)) as store:
                return job.run(made, store)


def _engine(model: object, options: Mapping[str, Any], reads: Sequence[Read]) -> Engine:
    # The import is here, because it loads vLLM, which takes seconds.
    from vllm_scope.engine.offline import OfflineEngine

    with guarded():
        return OfflineEngine(model, options, reads)


def _with_several(
    job: Job,
    make: Callable[[], Engine],
    ray: bool | str,
    engines: int | None,
    options: Mapping[str, Any],
) -> Harvest:
    sizes = [options.get(f"{kind}_parallel_size") for kind in _PARALLEL]
    gpus = math.prod(size for size in sizes if type(size) is int)  # vLLM refuses other types
    pool: Pool
    if ray is False:
        count = engines or 1
        pool = Processes(count, gpus)
    else:
        pool = RayPool(None if ray is True else ray, engines, gpus)
        count = pool.count
    setup = Setup(make, job.reads, job.files, os.getcwd())
    with closing(SeveralEngines(pool, count, setup)) as made:
        found = job.finished(made)
        return job.run(made, made) if found is None else found


def _digest(options: Mapping[str, Any]) -> str:
    """The SHA-256 of an engine's options. If an option is not JSON, the digest can differ at each
    start."""
    text = json.dumps(options, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def check_reads(reads: Sequence[Read], long: str) -> None:
    """Raise SpecError if a harvest cannot use these reads, or if `long` is unknown."""
    if not reads or not all(isinstance(read, Read) for read in reads):
        raise SpecError(
            f"the reads are {shown(list(reads))}; give one Read or more, each as an argument."
        )
    for read in reads:
        if read.to != MEMORY:
            raise SpecError(
                f"a Read goes to {shown(read.to)}; harvests and streams take the rows themselves, "
                "so leave `to` out of their reads."
            )
        if read.tokens.to_json() == "generated":
            raise SpecError(
                "tokens is 'generated'; harvests and streams generate no tokens; name other tokens."
            )
    checked_word(long, get_args(Long), "long")


def _check_engines(model: object, engines: int | None, ray: bool | str) -> None:
    """Raise SpecError if `engines` or `ray` is wrong, or is given together with an LLM."""
    if engines is not None and (type(engines) is not int or not 1 <= engines <= MOST_ENGINES):
        raise SpecError(f"engines is {shown(engines)}; it must be 1 to {MOST_ENGINES}.")
    if not isinstance(ray, bool | str):
        raise SpecError(
            f"ray is {shown(ray)}; it must be True, False, or the address of a cluster."
        )
    if not isinstance(model, str) and (ray is not False or engines is not None):
        raise SpecError(
            "the model is an LLM, and engines or ray is given; name the model, so that each engine "
            "starts in a process of its own."
        )
