"""The interface of sinks, which take the rows that a worker drains.

Owns:  Sink, Block, RequestInfo and Ending (inputs of a sink), Report (output of a sink), Manifest
       (the part of a report that the caller gets), RowBatch and BatchSink (between drain and
       router).
Runs:  a BatchSink on the drain thread of a worker that drains rows; each Sink on its own thread.

    drain -> router -> memory                       (rows back to the caller)
                    -> sink queue -> sink thread -> filesystem, plugins

router.py      gives rows to sinks, and reports the ends of requests
memory.py      sends rows to the front-end of the request
sink_thread.py one sink instance, with its thread and its overload policy
guarded_sink.py  calls of a sink that may raise or hang
sink_queue.py  the items that wait for a sink, in bounded memory
spill.py       queued rows in a file, if the memory is full
quota.py       the limits of bytes of one API key at a sink
request.py     the rows of one request at one sink, and the missing rows
streams.py     the streams that a sink gets, and their bytes in a token's layout
filesystem.py  writes requests into files
max_activating.py  makes tables of the strongest tokens of features
options.py     the operator's options of each sink; plugin look-up
manifest.py    how one request ended at one sink
reports.py     checks the report of a sink, and makes a manifest
counters.py    counts of one sink
metrics.py     the counts as metrics on vLLM's /metrics

A plugin is a class, or a function that returns a sink, in the entry-point group `vllm_scope.sinks`.
The worker calls the class or function with the operator's options as keywords.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.batch.labels import Labels
from vllm_scope.codecs.packed import EncodedRows, decoded
from vllm_scope.files.index import Status as Status
from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.sinks.manifest import Manifest as Manifest
from vllm_scope.transport.ring import Lease


@dataclass(frozen=True)
class RequestInfo:
    """The data about a request that a sink gets with each block of the request.

    Attributes:
        key: a number of the request, or of one completion of the request, unique in the engine.
        request_id: the id that the caller or vLLM gave the request. Two requests may have the same
            id.
        uid: an id that is unique among all requests. All stages and completions of one request have
            the same uid.
        tag, name: the tag and the name of the request's reads that go to this sink.
        child: index of the completion if the request has n > 1.
        stage, num_stages: the pipeline stage of this worker, and the number of stages. A worker has
            only the layers of its stage.
        model: name of the engine's model.
        owner: for a request over HTTP, a digest of the sender's API key. "" offline, and at sinks
            in `global_sinks`.
        num_layers: the model's number of layers. None: not known.
    """

    key: int
    request_id: str
    uid: str
    prompt_ids: tuple[int, ...]
    tag: str | None = None
    name: str | None = None
    child: int = 0
    stage: int = 0
    num_stages: int = 1
    model: str = ""
    owner: str = ""
    num_layers: int | None = None


@dataclass(frozen=True)
class Block:
    """Rows of one stream, scores of one probe, features of one `Features`, or tokens of a lens at
    one layer. All values belong to one request.

    Attributes:
        site, layer: the place of the values. If the rows were read before the edits of the site
            (`when="before"`), `site` ends in ".before".
        positions: the absolute positions of the values, int64 [n].
        values: the rows (encoded if the read has a codec), the scores, the values of features, or
            the log-probabilities of tokens. The values are valid only during the call. A sink must
            copy values that it keeps.
        probe: the name of the probe or of the features; for a lens, its name and layer. For rows,
            None.
        indices: for features, int32 [n, entries]: the feature number of each value. For a lens, the
            token ids. An entry without a feature has the index -1 and the value 0.
        sae: the SAE's name if the values are of a `Features` without `indices` and without
            `threshold`. For a lens, "". Otherwise None.
        num_features: for features, the SAE's number of features. None: not known.
        asked: for features, the read's `indices`. None if the read has no `indices`.
    """

    request: RequestInfo
    site: str
    layer: int
    positions: NDArray[np.int64]
    values: Tensor | EncodedRows
    probe: str | None = None
    indices: Tensor | None = None
    sae: str | None = None
    num_features: int | None = None
    asked: tuple[int, ...] | None = None

    @cached_property
    def rows(self) -> Tensor:
        """The rows on the CPU, [n, row_size] in the model's dtype. For a probe, the scores,
        float32 [n]. For features or a lens, the values, float32 [n, entries]. If the site has
        heads, a row has the numbers of head 0, then of head 1, and so on. Encoded rows are decoded
        first."""
        return decoded(self.values)

    @property
    def encoded(self) -> EncodedRows | None:
        """The encoded rows. None if the read has no codec."""
        return self.values if isinstance(self.values, EncodedRows) else None


@dataclass(frozen=True)
class Ending:
    """How a request ended at one sink.

    Attributes:
        output_ids: the tokens that the engine generated. If a stop string ended the request, the
            caller may get fewer tokens.
        finish_reason: the finish reason that vLLM reports (stop, length, abort or error).
        expected: number of rows and scores that the sink gets from this pipeline stage for the
            processed tokens, if none is lost.
        delivered: number of expected rows and scores that the sink got.
        reason: the reason of the status. None if the status is `ok`.
    """

    request: RequestInfo
    output_ids: tuple[int, ...]
    finish_reason: str
    expected: int
    delivered: int
    status: Status
    reason: str | None

    @property
    def dropped(self) -> int:
        return self.expected - self.delivered


@dataclass(frozen=True)
class Report:
    """A sink's return value for a request that ended. The manifest of the request contains the data
    of the report.

    Attributes:
        files: the names of the files that have the rows.
        streams: shape, dtype, and other facts of each stream, by `site.layer`.
        status, reason: if `status` is not None and the Ending has the status `ok`, these values
            replace the status and the reason of the Ending.
        details: any JSON object. In the manifest, None replaces NaN and infinity.
        published: a future that is done when the rows can no longer be lost. None if the rows are
            already safe. The caller waits for this future. If the future fails, the request ends
            with the status `error` and the exception as the reason.
        public: True if every API key may see `reason` and `streams`.
    """

    files: list[str] = field(default_factory=list)
    streams: dict[str, dict[str, object]] = field(default_factory=dict)
    status: Status | None = None
    reason: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    published: Future[None] | None = None
    public: bool = False


class Sink(Protocol):
    """The interface of a sink. The worker calls a sink with blocks.

    Each instance has its own thread, and only this thread calls the instance. The option `threads`
    is the number of instances. All calls of one request go to the same instance.

    Order: for each request, the worker calls `write` with the blocks of the request, then calls
    `finish` one time. For a failed request, or a request without blocks, the worker calls `finish`
    too. There is one exception: a request of which no row was queued. If the sink is stalled at the
    end of this request, or if the API key has reached `key_mib`, the sink gets no call for the
    request. Between two calls for one request, there can be calls for other requests.

    The contents of a block depend on the class attribute `live`:

    - False (the default): the sink gets the rows of a request after the request's end. There is
      one block per stream, with exactly the requested rows, in ascending positions.
    - True: the sink gets rows as soon as they are computed. If a position is computed twice, only
      the last row is correct. Some rows may belong to rejected tokens.

    Class attributes state which actions may name the sink:

    - `takes_rows`: reads.
    - `takes_scores`: probes and lenses.
    - `takes_features`: features. The default is the value of `takes_scores`.
    - `takes_some_features`: features with `indices` or `threshold`.
    - `takes_edited`: actions of requests with edits.

    Except for `takes_features`, the default of each of these attributes is True.

    If a call raises an exception, the request of the call ends with the status `error`, and the
    exception is the reason. Other requests and the engine continue. The engine waits for a call at
    most `patience_s` seconds. Every sink has the option `patience_s` (`sinks.options`).

    Lifetime: the worker makes the sink when the worker loads its model, and closes the sink when
    the worker shuts down. A killed worker does not close its sinks.
    """

    def write(self, block: Block) -> None: ...

    def finish(self, ending: Ending) -> Report | None: ...

    def flush(self) -> None:
        """Make the rows of finished requests visible. When `flush` returns, the future `published`
        of every Report must be done. The sink thread calls this function in three cases: at most
        `flush_s` seconds after a request has ended, after a front-end's remote call `scope_flush`,
        and before `close`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class RowBatch:
    """The rows of one step, or of one tap of a step that is larger than the arena.

    Attributes:
        labels: the labels, with one entry per token.
        lease: the span of the batch in the worker's host ring.
        widths: number of bytes of a raw row, for each kind of site.
        boundary: if the batch has the rows of only one tap, this tap's boundary; otherwise None. In
            a batch of one tap, all tokens have the same number of slots. The values of a token fill
            its slots from the first slot on, in the order of the token's layout at this boundary.
    """

    labels: Labels
    lease: Lease
    widths: Widths
    boundary: int | None = None

    @property
    def slots(self) -> Tensor:
        """The slots in host memory, uint8 [num_slots, SLOT_BYTES]. The slots of a token are
        consecutive. The slots have the raw rows in the order of the layout's points, then the
        results of heads."""
        return self.lease.slots

    @property
    def nbytes(self) -> int:
        """The value of `slots.nbytes`, computed without `slots`. If the CPU's caches are cold,
        making the slice `slots` takes 80 us."""
        return (self.lease.stop - self.lease.start) * SLOT_BYTES


class BatchSink(Protocol):
    """The interface of an object that takes batches from the drain.

    Only the drain thread calls the methods, except `close`. The rows of one request and one point
    arrive in the order in which they were computed. If a position arrives twice, after a
    recomputation or a rejected draft, only the last row is correct. The last call for a request is
    `finish`. After `write` returns, the worker reuses `batch.slots`. To prevent the reuse, a sink
    can retain `batch.lease` and release the lease later.
    """

    def write(self, batch: RowBatch) -> None: ...

    def finish(self, key: int, error: str | None) -> None: ...

    def finish_all(self, ends: Sequence[tuple[int, str | None]]) -> None:
        """Call `finish` for several requests. `ends` has (key, error) of each request."""

    def close(self) -> None: ...
