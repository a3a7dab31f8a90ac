"""A harvest computes the rows of documents, and writes shards. A killed harvest can be resumed.

    documents -> contexts -> store (one engine or several, and shards) -> manifest and page

Owns:  Job, and Harvest (the result of a job).
From:  start.
Runs:  in the caller's process. A thread reads the documents.

Promise: a harvest computes a context only if no visible shard has the context. A shard becomes
visible only when the shard is complete. Therefore the folder has each row exactly one time, even if
a harvest was killed and resumed.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from vllm_scope.errors import FileError
from vllm_scope.files.options import FileOptions
from vllm_scope.files.publish import Publisher, write_bytes
from vllm_scope.files.roots import find_folder, make_publisher
from vllm_scope.files.tensors import write_tensors
from vllm_scope.harvests import manifest as manifests
from vllm_scope.harvests.computing import context_size, contexts_ahead
from vllm_scope.harvests.contexts import Context, Long
from vllm_scope.harvests.documents import Documents
from vllm_scope.harvests.engines import EngineFacts, Store
from vllm_scope.harvests.manifest import (
    HarvestManifest,
    Run,
    check_same,
    read_manifest,
    versions,
)
from vllm_scope.harvests.progress import Progress
from vllm_scope.harvests.shards import Shards
from vllm_scope.harvests.skipped import Skipped
from vllm_scope.request.actions import Read
from vllm_scope.views.harvest import HarvestPage

#: The job writes the manifest at this interval, in seconds.
MANIFEST_S = 10.0


@dataclass(frozen=True)
class Harvest:
    """A finished harvest.

    Attributes:
        out: the folder or URL of the shards. `vllm_scope.open(out)` reads the rows.
        computed: number of contexts that this run computed. Earlier runs computed the other
            contexts of the harvest.
    """

    out: str
    manifest: HarvestManifest
    computed: int


@dataclass(frozen=True)
class Job:
    """The documents and reads of a harvest, and the options of its files.

    Attributes:
        long: the rule for documents that are longer than a context.
        context: the largest number of tokens of a context, or None for the engine's maximum.
        files: the options of the shards' files.
        options: a digest of the options that start the engine, or None if the caller gave an LLM.
    """

    documents: Documents
    reads: tuple[Read, ...]
    files: FileOptions
    long: Long = "split"
    context: int | None = None
    progress: bool = True
    options: str | None = None

    def settings(self) -> dict[str, Any]:
        """The settings that change the rows, without the settings that only the engine knows."""
        found: dict[str, Any] = {
            "dataset": self.documents.fingerprint,
            "column": self.documents.column,
            "id_column": self.documents.id_column,
            "reads": [msgspec.json.decode(msgspec.json.encode(r.to_json())) for r in self.reads],
            "long": self.long,
        }
        return found | ({} if self.context is None else {"context": self.context})

    def settings_with(self, engine: EngineFacts) -> dict[str, Any]:
        """All settings that change the rows.

        Raises:
            SpecError: the engine has no tap for one of the reads.
            ConfigError: `context` is below 1, or above the engine's maximum.
        """
        size = context_size(engine, self.context)
        return self.settings() | {"context": size} | engine.settings(self.reads)

    def earlier(self, settings: Mapping[str, Any]) -> HarvestManifest | None:
        """The manifest of the harvest's folder. None if the folder has no manifest or no shards.

        Raises:
            ConfigError: a setting differs from the setting in the manifest.
            FileError: the manifest cannot be read.
        """
        root = self.files.root
        found = read_manifest(root)
        if found is None or not set(find_folder(root).names()) - {manifests.MEANS}:
            return None
        check_same(found, settings, root)
        return found

    def finished(self, model: str | EngineFacts) -> Harvest | None:
        """The harvest, if it is complete and its folder has every shard of the manifest. Else None.

        Args:
            model: the engine, or the name of its model. If only the name is given, the engine's
                settings are not known. In this case, the result is None if no earlier run started
                its engine with the same options.

        Raises:
            ConfigError, FileError, SpecError: the errors of `earlier` and `settings_with`.
        """
        if isinstance(model, str):
            found = self.earlier(self.settings() | {"model": model})
            known = found is not None and self.options in [run.options for run in found.runs]
        else:
            found, known = self.earlier(self.settings_with(model)), True
        if found is None or not found.complete or not known:
            return None
        there = set(found.shards) <= set(find_folder(self.files.root).names())
        return Harvest(self.files.root, found, 0) if there else None

    def run(self, engine: EngineFacts, store: Store) -> Harvest:
        """Compute the contexts that are in no shard. The caller holds the folder's lock.

        Args:
            engine: the engine, which makes prompts and knows the settings.
            store: the store, which computes rows, and writes shards below the root of `files`.

        Raises:
            ScopeError: a setting is wrong, a file is damaged, or rows are missing.
        """
        settings = self.settings_with(engine)
        earlier = self.earlier(settings)
        begun = HarvestManifest(
            settings, self.documents.source, self.documents.count,
            [*([] if earlier is None else earlier.runs), _this_run(self.options, store)],
            shards={} if earlier is None else earlier.shards,
        )  # fmt: skip
        files = self.files
        with closing(make_publisher(files.root, files.fsync, files.file_mode)) as publisher:
            return _Running(self, engine, store, publisher, begun).run(settings["context"])


class _Running:
    """A job that is running."""

    def __init__(
        self,
        job: Job,
        engine: EngineFacts,
        store: Store,
        publisher: Publisher,
        begun: HarvestManifest,
    ) -> None:
        self._job, self._engine, self._store = job, engine, store
        self._publisher, self._manifest = publisher, begun
        self._computed = self._num_contexts = 0
        self._skipped = Skipped(job.reads)
        self._put(manifests.NAME, begun.encode())  # creates the root folder if it is missing
        self._shards = Shards(find_folder(job.files.root), job.long == "truncate")
        self._shards.take({name: (one.sha256, one.num_bytes) for name, one in begun.shards.items()})

    def run(self, size: int) -> Harvest:
        job, engine = self._job, self._engine
        begun = sum(shard.documents for shard in self._shards.found.values())
        contexts = contexts_ahead(
            job.documents, engine, size, job.long, self._skipped, self._is_missing
        )
        told = time.monotonic()
        with (
            Progress(job.documents.count, begun, job.progress) as progress,
            closing(contexts) as ahead,
            closing(self._store.compute(ahead)) as computed,
        ):
            for context in computed:
                self._computed += 1
                progress.add(context, self._skipped.num_documents)
                if time.monotonic() - told > MANIFEST_S:
                    self._tell(complete=False)
                    told = time.monotonic()
            progress.finish()
        self._store.flush()
        if self._skipped.count and not self._num_contexts:
            raise self._skipped.error(job.documents.source)
        self._tell(complete=True)
        return Harvest(job.files.root, self._manifest, self._computed)

    def _is_missing(self, context: Context) -> bool:
        self._num_contexts += 1
        return context.key not in self._shards.done

    def _tell(self, complete: bool) -> None:
        """Write the manifest of the visible shards.

        If the harvest is complete, also write the statistics and the page. Raises FileError if the
        shards do not have all contexts.
        """
        shards = self._shards
        shards.take(self._store.found)
        if complete and len(shards.done) != self._num_contexts:
            raise FileError(
                f"{self._job.files.root} has {len(shards.done)} contexts, and the data set has "
                f"{self._num_contexts}; shards were removed or added meanwhile. Run the harvest "
                "again."
            )
        found = shards.found.values()
        fields = ("contexts", "documents", "tokens", "truncated", "num_bytes")
        totals = {
            name.removeprefix("num_"): sum(getattr(one, name) for one in found) for name in fields
        }
        if complete:
            skipped = self._skipped
            documents = totals["documents"] + skipped.num_documents
            totals |= {"empty": self._manifest.documents - documents, "skipped": skipped.count}
        self._manifest = msgspec.structs.replace(
            self._manifest, complete=complete, totals=totals, shards=shards.found,
            skipped=dict(self._skipped.reasons) if complete else {},
            streams={name: one.to_json() for name, one in sorted(shards.statistics.items())},
        )  # fmt: skip
        if complete:
            tensors = {
                f"{stream}.{name}": [torch.from_numpy(numbers).float()]
                for stream, one in shards.statistics.items()
                for name, numbers in (("mean", one.mean), ("variance", one.variance))
            }
            write = partial(write_tensors, tensors=tensors, metadata={})
            self._publisher.publish({manifests.MEANS: write})
            self._put(manifests.PAGE, HarvestPage(self._manifest).page().encode())
        # The manifest is the last file, because it lists the other files.
        self._put(manifests.NAME, self._manifest.encode())

    def _put(self, name: str, body: bytes) -> None:
        self._publisher.publish({name: partial(write_bytes, body=body)})


def _this_run(options: str | None, store: Store) -> Run:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Run(started, {**versions(), **store.versions}, options)
