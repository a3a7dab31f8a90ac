"""Writes the rows of one engine to shards.

Owns:  Storing.
Runs:  in the process that has the engine. Other threads write the shards.
From:  job, or member if there are several engines.   To: files.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing

from vllm_scope.files.index import RequestRecord
from vllm_scope.files.options import FileOptions
from vllm_scope.files.roots import make_publisher
from vllm_scope.files.sharded import ShardedLayout
from vllm_scope.files.writer import Writer
from vllm_scope.harvests.computing import rows_of
from vllm_scope.harvests.contexts import Context
from vllm_scope.harvests.engines import Engine, Rows
from vllm_scope.harvests.manifest import versions
from vllm_scope.harvests.shards import HashingPublisher
from vllm_scope.harvests.statistics import Statistics, compiled_count
from vllm_scope.request.actions import Read

#: The smallest and the largest number of threads that write shards.
_LEAST_WRITERS, _MOST_WRITERS = 2, 8


class Storing:
    """The Store of one engine. `close` writes the computed rows, and does not close the engine.

    Args:
        files: the options of the shards' files. Shards become visible below the root of `files`.

    Raises:
        FileError: this process cannot write to the root of `files`.
    """

    def __init__(
        self,
        engine: Engine,
        reads: Sequence[Read],
        files: FileOptions,
    ) -> None:
        compiled_count()  # compiles the function before a writing thread needs it
        self._engine, self._reads = engine, reads
        self._num_layers = engine.num_layers
        self._publisher = HashingPublisher(make_publisher(files.root, files.fsync, files.file_mode))
        layout = ShardedLayout(files, self._publisher, Statistics.summary, _num_writers())
        # The writer makes no copies, because no other code uses the rows of an ended request.
        self._writer = Writer(files, self._publisher, layout, copies=False)
        #: The `uid` of a request consists of `_run` and the request's number in this run.
        self._run, self._num_stored = secrets.token_hex(8), 0
        #: Futures of the shards that are not written yet, in the order in which the shards were
        #: begun.
        self._unpublished: deque[Future[None]] = deque()

    @property
    def found(self) -> Mapping[str, tuple[str, int]]:
        return self._publisher.found

    @property
    def versions(self) -> Mapping[str, str]:
        return versions()

    def compute(self, contexts: Iterable[Context]) -> Generator[Context]:
        """As in Store."""
        with closing(rows_of(contexts, self._engine, self._reads)) as computed:
            for context, rows in computed:
                published = self._stored(context, rows)
                if not self._unpublished or self._unpublished[-1] is not published:
                    self._unpublished.append(published)
                self._settle()
                yield context

    def _stored(self, context: Context, rows: Rows) -> Future[None]:
        request = self._writer.begin()
        for column in rows.columns():
            assert isinstance(column.label, tuple)  # the column of a Read has a tuple as label
            site, layer, when = column.label
            name = f"{site}.before" if when == "before" else site
            request.write(name, layer, column.positions, column.source)  # type: ignore[arg-type]
        self._num_stored += 1
        stored = request.finish(
            RequestRecord(
                context.name, context.token_ids, (), self._engine.model, rows.expected,
                rows.expected, name=context.name, documents=context.spans,
                uid=f"{self._run}{self._num_stored:016x}", num_layers=self._num_layers,
            )
        )  # fmt: skip
        return stored.published

    def _settle(self) -> None:
        """Raise the FileError of a shard that could not be written."""
        while self._unpublished and self._unpublished[0].done():
            self._unpublished.popleft().result()

    def flush(self) -> None:
        """As in Store."""
        self._writer.flush()
        self._settle()

    def close(self) -> None:
        self._writer.close()


def _num_writers() -> int:
    """The number of threads that write shards: a quarter of the processors, but at least
    _LEAST_WRITERS and at most _MOST_WRITERS.

    Each thread writes 0.3 to 0.7 GB/s. A thread spends most of its time on the hash.
    """
    return max(_LEAST_WRITERS, min(_MOST_WRITERS, len(os.sched_getaffinity(0)) // 4))
