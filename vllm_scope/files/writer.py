"""Captured rows into files: the seam that an engine's sink drives.

    writer = open_writer(FileOptions.parse({"root": "captures"}))
    request = writer.begin()
    request.write("resid_post", 5, positions, rows)     # any interleaving
    stored = request.finish(RequestRecord(...))         # stored.manifest holds, once
    writer.flush()                                     # (or its file is full)
    stored.published.result()                          # this has returned
    writer.close()

Owns:  Writer, RequestWriter, Layout (what differs between layouts), `open_writer`.
Runs:  on one thread at a time. `sharded` writes its files on threads of its own.
To:    one of per_request, packed, sharded, npz.

Promise: `finish` returns what will be found on disk, and a future that says when. The
file is there when `finish` returns (per_request, npz); else (packed, sharded) when it
is full, or once `flush` or `close` has returned.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_scope.codecs import Codec, make_codec
from vllm_scope.codecs.packed import EncodedRows, Packing
from vllm_scope.codecs.zstd import zstd_library
from vllm_scope.files.buffers import Buffers
from vllm_scope.files.manifest import RequestRecord, stream_name
from vllm_scope.files.options import FileOptions
from vllm_scope.files.publish import Publisher
from vllm_scope.files.roots import make_publisher
from vllm_scope.files.rows import RequestRows, Stream
from vllm_scope.files.stored import EncodedStream, FinishedRequest, Stored


class Layout(Protocol):
    """How requests become files. One thread at a time."""

    def add(self, request: FinishedRequest) -> Stored:
        """Take a request. Raises FileError where it is known to be lost already."""
        ...

    def flush(self) -> None:
        """Return once everything taken is published, or has failed to be. Raises the
        first FileError of files that it waited for."""
        ...

    def close(self) -> None:
        """`flush`, and let go of threads."""
        ...


class RequestWriter:
    """One request. Nothing is written before `finish`; dropping it leaves no trace."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._rows = RequestRows(writer.buffers)

    def write(
        self, site: str, layer: int, positions: np.ndarray, rows: Tensor | EncodedRows
    ) -> None:
        """Take a copy of some rows. A position that comes twice: the last one holds.

        Args:
            site, layer: the stream; `embed` has layer 0.
            positions: int64 [n], absolute.
            rows: [n, hidden_size], model dtype, on any device; or n rows in the parts of
                a codec, which are stored as they are, whatever the writer's own codec.

        Raises:
            ValueError: shapes that do not fit each other or the stream.
        """
        self._rows.add(site, layer, positions, rows)

    def finish(self, record: RequestRecord) -> Stored:
        """Encode and store. To be called once.

        Raises:
            FileError: the request's own file could not be written.
            ConfigError: the codec cannot take rows of this size.
        """
        return self._writer.finish(record, self._rows)


class Writer:
    """All requests of one root. Use as a context, or call `close`.

    Attributes:
        buffers: memory of the rows that wait for a file.
    """

    def __init__(self, options: FileOptions, publisher: Publisher, layout: Layout) -> None:
        self._options = options
        self._publisher = publisher
        self._layout = layout
        # What two files in the making and one being filled take.
        self.buffers = Buffers(3 * options.file_bytes)
        self._codecs: dict[tuple[int, torch.dtype], Codec] = {}

    def begin(self) -> RequestWriter:
        return RequestWriter(self)

    def finish(self, record: RequestRecord, rows: RequestRows) -> Stored:
        streams: dict[str, EncodedStream] = {}
        for stream, found in rows.streams(record.num_positions).items():
            codec, encoded = self._encoded(found)
            streams[stream_name(stream)] = EncodedStream(
                positions=torch.from_numpy(found.positions),
                parts={part: [one[part] for one in encoded] for part in codec.part_names},
                codec=codec,
                shape=(len(found.positions), codec.hidden_size),
                dtype=str(codec.torch_dtype).removeprefix("torch."),
            )
        token_ids = torch.tensor([*record.prompt_ids, *record.output_ids], dtype=torch.int32)
        return self._layout.add(FinishedRequest(record, streams, token_ids))

    def _encoded(self, found: Stream) -> tuple[Codec, list[dict[str, Tensor]]]:
        """The codec of a stream, and the parts of each of its blocks."""
        if found.codec is not None:
            packing = Packing(found.codec)
            return found.codec, [
                {name: part.contiguous() for name, part in packing.parts(block).items()}
                for block in found.blocks
            ]
        first = found.blocks[0]
        codec = self._codec(first.shape[1], first.dtype)
        # A codec whose rows cannot be told apart sees all of them at once.
        blocks = found.blocks if codec.rowwise else [torch.cat(found.blocks)]
        return codec, [codec.encode(block) for block in blocks]

    def _codec(self, hidden_size: int, dtype: torch.dtype) -> Codec:
        key = (hidden_size, dtype)
        if key not in self._codecs:
            options = self._options
            self._codecs[key] = make_codec(options.codec, *key, **options.codec_options)
        return self._codecs[key]

    def flush(self) -> None:
        """Return once every finished request is visible. Raises FileError."""
        self._layout.flush()

    def close(self) -> None:
        try:
            self._layout.close()
        finally:
            self._publisher.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_writer(options: FileOptions) -> Writer:
    """A writer; removes what killed writers left in a local root.

    Raises:
        FileError: the root cannot be written to.
        ConfigError: a package for this root or codec is missing.
    """
    if options.codec == "zstd":
        zstd_library()
    from vllm_scope.files.npz import NpzLayout
    from vllm_scope.files.packed import PackedLayout
    from vllm_scope.files.per_request import PerRequestLayout
    from vllm_scope.files.sharded import ShardedLayout

    layouts: dict[str, type] = {
        "per_request": PerRequestLayout,
        "packed": PackedLayout,
        "sharded": ShardedLayout,
        "npz": NpzLayout,
    }
    publisher = make_publisher(options.root, options.fsync, options.file_mode)
    return Writer(options, publisher, layouts[options.layout](options, publisher))
