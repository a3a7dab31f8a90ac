"""Sinks: where drained rows go.

Owns:  Sink, Block, RequestInfo, Ending, Report (what a sink is given, and what it returns);
       RowBatch and BatchSink (what the drain gives to the router).
Runs:  RowBatch on the drain thread of each worker that drains; a Sink on its own thread.

    drain -> router -> memory                       (rows back to the caller)
                    -> queue -> lane -> filesystem, plugins

router.py      which sink gets which rows, and when a request is done
memory.py      rows to the front-end that made the request
lane.py        one sink: its thread, its bounded queue, its overload policy
spill.py       queued rows in a file, when the queue is full
quota.py       how many bytes of one API key a sink takes
request.py     one request at one sink: its rows, and what is missing
filesystem.py  requests into files
options.py     the operator's options of each sink; plugin look-up
reports.py     a sink's report on a request, checked, as the manifest that callers get
counters.py    counts of one sink
metrics.py     the counts on vLLM's /metrics

A plugin is a class, or a function that makes a sink, under the entry-point group
`vllm_scope.sinks`. It is called with the operator's options as keyword arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.codecs.packed import EncodedRows, decoded
from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.transport.ring import Lease
from vllm_scope.worker.plan import Labels

#: `ok`: everything that was asked for; `partial`: some of it; `error`: see the reason.
Status = Literal["ok", "partial", "error"]


@dataclass(frozen=True)
class RequestInfo:
    """Whose rows they are.

    Attributes:
        key: unique among all requests of the engine.
        request_id: the caller's name for it, or vLLM's; may repeat.
        uid: unique; the same for all stages and all completions of one request.
        prompt_ids: the prompt.
        tag, name: what the read said.
        child: which completion of a request with n > 1.
        stage, num_stages: the pipeline stage of this worker, which has its layers only.
        model: the engine's.
        owner: over HTTP a digest of the API key that sent it; "" offline, and at global sinks.
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


@dataclass(frozen=True)
class Block:
    """Rows of one stream, or scores of one probe, of one request.

    Attributes:
        site, layer: the stream. Rows from before the edits of their site have
            ".before" after the site's name.
        positions: int64 [n], absolute.
        source: the rows, or what their read's codec made of them. Valid during the call:
            copy what you keep.
        probe: the probe's name, where these are scores.
    """

    request: RequestInfo
    site: str
    layer: int
    positions: NDArray[np.int64]
    source: Tensor | EncodedRows
    probe: str | None = None

    @cached_property
    def rows(self) -> Tensor:
        """[n, hidden_size], the model's dtype, CPU; float32 [n] for a probe. Of a site per
        head, the heads are one after another. Decoded here where the read has a codec."""
        return decoded(self.source)

    @property
    def encoded(self) -> EncodedRows | None:
        """The rows as they came, where the read has a codec."""
        return self.source if isinstance(self.source, EncodedRows) else None


@dataclass(frozen=True)
class Ending:
    """How a request ended, at one sink.

    Attributes:
        output_ids: what the engine generated. With a stop string, the caller may see
            less of it.
        finish_reason: vLLM's: stop, length, abort, error.
        expected: rows and scores of this stage that were asked for, of tokens that were
            processed.
        delivered: of those, how many the sink was given.
        status, reason: `ok`, or why not.
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
    """What a sink says of a request that ended; all of it is for the manifest.

    Attributes:
        files: where the rows are.
        streams: `site.layer` -> shape, dtype, and what else there is to know.
        status, reason: where the sink knows better than the Ending.
        details: anything that JSON can say.
        published: for a sink whose rows could still be lost: done when they no longer
            can. The caller is told then, and not before; where it fails, the request
            ends with status `error` and its exception as the reason.
        public: reason and streams name nothing that only the operator may know: every key is
            told them.
    """

    files: list[str] = field(default_factory=list)
    streams: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: Status | None = None
    reason: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    published: Future[None] | None = None
    public: bool = False


class Sink(Protocol):
    """Where blocks go. An instance is called from one thread, its own, and never twice
    at a time; with `threads` above 1 there are as many instances, and all calls of one
    request go to the same one.

    Order: the blocks of a request, then `finish`, once, also for a request that had no
    block or failed; not for one that came and went while the sink was stalled. Requests
    interleave.

    What a block holds depends on the class attribute `live`:

    - False (or none): a request's rows come when it has ended, one block for each
      stream, ascending positions, exactly those that were asked for.
    - True: rows come as they are computed. A position that comes twice was computed
      twice, and the last one holds; some may be of tokens that are never accepted.

    With the class attribute `takes_scores` false, probes cannot name the sink.

    A call that raises ends its request with status `error` and the exception as the
    reason. Others go on, and so does the engine; it waits for a call that hangs at most
    `patience_s`, one of the options that every sink has (`sinks.options`).

    Lifetime: made when the worker loads its model, closed with it. A worker that is
    killed closes nothing.
    """

    def write(self, block: Block) -> None: ...

    def finish(self, ending: Ending) -> Report | None: ...

    def flush(self) -> None:
        """Make what was finished visible: every `published` that was given out is done
        when this returns. Called `flush_s` after a request has ended; sooner where one
        waits to be published and none is running; and by the remote call `scope_flush`."""

    def close(self) -> None: ...


#: Names of files below a folder; neither a URL nor a path of another system.
_RELATIVE = re.compile(r"(?![/~])(?!(?:.*/)?\.\.(?:/|$))[^\\:]+", re.DOTALL)


class Manifest(msgspec.Struct, frozen=True):
    """What became of one request at one sink: `result.manifests[sink]`.

    Attributes:
        expected, delivered, dropped: rows and scores.
        files: where they are.
        streams: `site.layer` (or a probe's name) -> shape, dtype, codec, file.
        details: what the sink said beside it, one entry for each stage.
        said: reason and streams have a plugin's own words.
    """

    status: Status
    reason: str | None
    expected: int
    delivered: int
    dropped: int
    files: list[str] = []
    streams: dict[str, dict[str, Any]] = {}
    details: list[dict[str, Any]] = []
    said: bool = False

    def public(self, sink: str) -> Manifest:
        """What a key is told that is not the operator's: no path, and no text of an exception or
        of a plugin, which may have one. Files are those with a relative name."""
        reason, streams = self.reason, self.streams
        if self.status == "error":
            reason = f"sink {sink!r} failed; the server's log says why"
        elif self.said and reason is not None:
            reason = f"sink {sink!r} gives a reason, which the server's operator is told"
        if self.said:
            known = ("shape", "dtype", "codec")
            streams = {
                name: {key: entry[key] for key in known if key in entry}
                for name, entry in streams.items()
            }
        return msgspec.structs.replace(
            self, reason=reason, streams=streams, details=[],
            files=[file for file in self.files if _RELATIVE.fullmatch(file)],
        )  # fmt: skip

    def joined(self, other: Manifest) -> Manifest:
        """This stage's and another's as one."""
        worse = max(self, other, key=lambda m: ("ok", "partial", "error").index(m.status))
        return Manifest(
            worse.status, worse.reason,
            self.expected + other.expected, self.delivered + other.delivered,
            self.dropped + other.dropped, [*self.files, *other.files],
            self.streams | other.streams, [*self.details, *other.details],
            self.said or other.said,
        )  # fmt: skip


@dataclass(frozen=True)
class RowBatch:
    """What one step delivered, or one tap of a large step.

    Attributes:
        labels: one entry per token.
        lease: where it is in the worker's host ring.
        widths: of rows as they are.
        boundary: set where the batch holds one tap only: each token has equally many
            slots, of which its layout at this boundary uses the first.
    """

    labels: Labels
    lease: Lease
    widths: Widths
    boundary: int | None = None

    @property
    def slots(self) -> Tensor:
        """uint8 [num_slots, SLOT_BYTES], host. A token's slots are consecutive: its rows
        in the order of its layout's points, then its scores, then its encoded rows."""
        return self.lease.slots

    @property
    def nbytes(self) -> int:
        """What `slots.nbytes` is; to slice the ring takes 80 us where caches are cold."""
        return (self.lease.stop - self.lease.start) * SLOT_BYTES


class BatchSink(Protocol):
    """What the drain hands batches to.

    Called from the drain thread only. Rows of one (request, point) arrive in
    the order in which they were computed: a position that comes twice was
    computed twice (recompute, rejected drafts), and the last one holds. `finish`
    comes last, once. `batch.slots` is reused after `write` returns, unless the sink
    retained `batch.lease`; it releases it when done.
    """

    def write(self, batch: RowBatch) -> None: ...

    def finish(self, key: int, error: str | None) -> None: ...

    def close(self) -> None: ...
