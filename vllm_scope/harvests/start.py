"""A harvest's beginning: its arguments, its folder, its engine.

Owns:  `harvest_with`: what `vllm_scope.harvest` and the command call.
To:    job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, get_args

from vllm_scope.errors import SpecError, shown
from vllm_scope.files.options import FileOptions
from vllm_scope.harvests.contexts import Long
from vllm_scope.harvests.documents import find_documents
from vllm_scope.harvests.job import Harvest, Job
from vllm_scope.harvests.manifest import locked
from vllm_scope.request.actions import MEMORY, Read


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
) -> Harvest:
    """See `vllm_scope.harvest`, which has the defaults."""
    check_reads(reads, long)
    files = FileOptions.parse({"root": out, "file_mib": file_mib, "fsync": fsync, "mode": mode})
    documents = find_documents(dataset, column, id_column, split, config)
    options = _digest(engine or {}) if isinstance(model, str) else None
    job = Job(documents, tuple(reads), files, long, context, progress, options)
    with locked(out, files.fsync, files.file_mode):
        if isinstance(model, str) and (found := job.finished(model)) is not None:
            return found
        # vLLM, which takes seconds to import.
        from vllm_scope.engine.offline import OfflineEngine

        sites = sorted({read.site for read in reads})
        with closing(OfflineEngine(model, engine or {}, sites)) as made:
            found = job.finished(made)
            return job.run(made) if found is None else found


def _digest(options: Mapping[str, Any]) -> str:
    """The SHA-256 of an engine's options. An object that is no JSON may have another each time."""
    text = json.dumps(options, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def check_reads(reads: Sequence[Read], long: str) -> None:
    """Raises SpecError."""
    if not reads or not all(isinstance(read, Read) for read in reads):
        raise SpecError(f"the reads are {shown(list(reads))}; give at least one Read.")
    for read in reads:
        if read.to != MEMORY:
            raise SpecError(f"a Read goes to {shown(read.to)}; a harvest's goes to no sink.")
        if read.tokens.to_json() == "generated":
            raise SpecError("tokens is 'generated'; a harvest generates none, so name others.")
    if long not in get_args(Long):
        raise SpecError(f"long is {shown(long)}; it is one of {', '.join(get_args(Long))}.")
