"""Sinks: where drained rows go.

Owns:  Sink, Block, RequestInfo, Ending, Report (what a sink is given, and what it returns);
       Manifest (what callers are told of a report);
       RowBatch and BatchSink (what the drain gives to the router).
Runs:  RowBatch on the drain thread of each worker that drains; a Sink on its own thread.

    drain -> router -> memory                       (rows back to the caller)
                    -> sink queue -> sink thread -> filesystem, plugins

router.py      which sink gets which rows, and when a request is done
memory.py      rows to the front-end that made the request
sink_thread.py one sink: its thread, its overload policy
guarded_sink.py  the calls of a sink: what they raise, and whether they hang
sink_queue.py  what waits for a sink, in bounded memory
spill.py       queued rows in a file, when the memory is full
quota.py       how many bytes of one API key a sink takes
request.py     one request at one sink: its rows, and which rows are missing
streams.py     what a sink gets from a request, and where it lies in a token's layout
filesystem.py  requests into files
max_activating.py  features into tables of their strongest tokens
options.py     the operator's options of each sink; plugin look-up
manifest.py    what became of one request at one sink
reports.py     a sink's report on a request, checked, as the manifest that callers get
counters.py    counts of one sink
metrics.py     the counts on vLLM's /metrics

A plugin is a class, or a function that makes a sink, under the entry-point group
`vllm_scope.sinks`. The class or function is called with the operator's options as keywords.
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
    """The request that rows belong to.

    Attributes:
        key: unique among all requests of the engine.
        request_id: the id that the caller or vLLM gave; may repeat.
        uid: unique; the same for all stages and completions of one request.
        tag, name: the tag and the name of the read.
        child: index of the completion, if the request has n > 1.
        stage, num_stages: the pipeline stage of this worker, and the number of stages. The worker
            has only the layers of its stage.
        model: name of the engine's model.
        owner: over HTTP a digest of the sender's API key; "" offline, and at global sinks.
        num_layers: of the model; None: not known.
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
    """Rows of one stream, scores of one probe, or some features, of one request.

    Attributes:
        site, layer: the stream. If the rows were read before the edits of their site
            (`when="before"`), `site` ends in ".before".
        positions: int64 [n], absolute.
        values: the rows, encoded if their read has a codec, the scores, or the values of features.
            Valid only during the call: copy what you keep.
        probe: the name of the probe, or of the features.
        indices: for features, int32 [n, places]: the number of the feature that each value belongs
            to. A place without a feature has the index -1 and the value 0.
        sae: the SAE's name, for features that neither `indices` nor `threshold` chose; else None.
        num_features: for features, how many features the SAE has; None if that is not known.
        asked: for features, those that the read named (`indices`); None if the read named none.
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
        """[n, hidden_size], the model's dtype, CPU; float32 [n] for a probe, and [n, places] for
        features. If the site has heads, a row has one head's numbers after another's. Rows of a
        read with a codec are decoded."""
        return decoded(self.values)

    @property
    def encoded(self) -> EncodedRows | None:
        """The encoded rows; None if the read has no codec."""
        return self.values if isinstance(self.values, EncodedRows) else None


@dataclass(frozen=True)
class Ending:
    """How a request ended, at one sink.

    Attributes:
        output_ids: the tokens that the engine generated. With a stop string, the caller may
            see fewer.
        finish_reason: vLLM's finish reason: stop, length, abort, error.
        expected: rows and scores of this stage that were asked for, of processed tokens.
        delivered: how many of these rows and scores the sink was given.
        reason: why the status is not `ok`; None if it is.
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
    """What a sink returns for a request that ended; it goes into the manifest.

    Attributes:
        files: the files that have the rows.
        streams: `site.layer` -> shape, dtype, and other facts.
        status, reason: replace those of an Ending that is `ok`.
        details: any JSON object.
        published: set by a sink that may still lose the rows; done when the rows can no longer
            be lost. The caller waits for it. If it fails, the request ends with status `error`
            and its exception as the reason.
        public: True if reason and streams may be shown to every API key.
    """

    files: list[str] = field(default_factory=list)
    streams: dict[str, dict[str, object]] = field(default_factory=dict)
    status: Status | None = None
    reason: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    published: Future[None] | None = None
    public: bool = False


class Sink(Protocol):
    """Where blocks go.

    An instance is called from one thread of its own. With `threads` above 1 there are as many
    instances, and all calls of one request go to the same instance.

    Order: the blocks of a request, then `finish`, once, also for a request that had no block
    or failed. A request that began and ended while the sink was stalled is left out. Requests
    interleave.

    The contents of a block depend on the class attribute `live`:

    - False (the default): a request's rows come when it has ended, one block per stream, in
      ascending positions, exactly those that were asked for.
    - True: rows come as they are computed. A position may be computed twice; its last row is
      the right one. Some rows may be of tokens that are never accepted.

    Class attributes say which actions may name the sink: `takes_rows` for reads, `takes_scores` for
    probes and lenses, `takes_features` for features, `takes_some_features` for features with
    `indices` or `threshold`, and `takes_edited` for requests with edits. If an attribute is left
    out, it counts as True; if `takes_features` is left out, it counts as `takes_scores` does.

    If a call raises, its request ends with status `error` and the exception as the reason.
    Other requests and the engine go on. The engine waits for a call at most `patience_s`, an
    option of every sink (`sinks.options`).

    Lifetime: made when the worker loads its model, closed when the worker shuts down. A killed
    worker closes nothing.
    """

    def write(self, block: Block) -> None: ...

    def finish(self, ending: Ending) -> Report | None: ...

    def flush(self) -> None:
        """Make finished requests visible: every `published` is done when this returns. Called
        `flush_s` after a request has ended; earlier if a request waits to be published and no
        request is running; and by the remote call `scope_flush`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class RowBatch:
    """The rows of one step, or of one tap of a step that is larger than the arena.

    Attributes:
        labels: one entry per token.
        lease: the batch's span in the worker's host ring.
        widths: bytes of a raw row, by kind.
        boundary: the tap's boundary, if the batch is of one tap. Each token then has the same
            number of slots, and its layout at this boundary uses the first of these slots.
    """

    labels: Labels
    lease: Lease
    widths: Widths
    boundary: int | None = None

    @property
    def slots(self) -> Tensor:
        """uint8 [num_slots, SLOT_BYTES], host. A token's slots are consecutive: its rows
        in the order of its layout's points, then the results of heads."""
        return self.lease.slots

    @property
    def nbytes(self) -> int:
        """`slots.nbytes`, without a slice of the ring: slicing takes 80 us if caches are cold."""
        return (self.lease.stop - self.lease.start) * SLOT_BYTES


class BatchSink(Protocol):
    """Takes batches from the drain.

    Called from the drain thread only. Rows of one (request, point) arrive in the order in
    which they were computed. If a position comes twice (recomputation, rejected drafts), its
    last row is the right one. `finish` comes last, once. `batch.slots` is reused after `write`
    returns, unless the sink has retained `batch.lease`, which it releases when done.
    """

    def write(self, batch: RowBatch) -> None: ...

    def finish(self, key: int, error: str | None) -> None: ...

    def finish_all(self, ends: Sequence[tuple[int, str | None]]) -> None:
        """`finish` of several requests, (key, error) each."""

    def close(self) -> None: ...
