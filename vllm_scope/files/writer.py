"""Writes captured rows into files. An engine's sink uses this interface.

    writer = open_writer(FileOptions.parse({"root": "captures"}))
    request = writer.begin()
    request.write("resid_post", 5, positions, rows)     # streams and positions in any order
    stored = request.finish(RequestRecord(...))
    writer.flush()                                     # not needed once the file is full
    stored.published.result()                          # the file of stored.manifest is visible now
    writer.close()

Owns:  Writer, `open_writer`.
Runs:  on one thread at a time. The layout `sharded` writes files on additional threads.
To:    one of the layouts per_request, packed, sharded, npz.

Promise: `finish` returns the manifest that will be on disk, and a future that is done when the file
is visible. With the layouts per_request and npz, the file is visible when `finish` returns. With
the layouts packed and sharded, the file becomes visible after the file is full, or when `flush` or
`close` returns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_scope.codecs import Codec, make_codec
from vllm_scope.codecs.packed import Packing
from vllm_scope.codecs.zstd import zstd_library
from vllm_scope.files.buffers import Buffers
from vllm_scope.files.index import RequestRecord, stream_name
from vllm_scope.files.npz import NpzLayout
from vllm_scope.files.options import FileOptions
from vllm_scope.files.packed import PackedLayout
from vllm_scope.files.per_request import PerRequestLayout
from vllm_scope.files.publish import Publisher
from vllm_scope.files.roots import make_publisher
from vllm_scope.files.rows import RequestWriter, Stream
from vllm_scope.files.sharded import ShardedLayout
from vllm_scope.files.stored import EncodedStream, FileLayout, FinishedRequest, Stored

_LAYOUTS: dict[str, type[FileLayout]] = {
    "per_request": PerRequestLayout,
    "packed": PackedLayout,
    "sharded": ShardedLayout,
    "npz": NpzLayout,
}


class Writer:
    """Writes the requests of one root. Use it as a context manager, or call `close`.

    Args:
        layout: the layout of the files. If None, the layout that the options name.
        copies: if False, most rows are kept without a copy. See RequestWriter.

    Attributes:
        buffers: memory for the rows that wait for a file.
    """

    def __init__(
        self,
        options: FileOptions,
        publisher: Publisher,
        layout: FileLayout | None = None,
        copies: bool = True,
    ) -> None:
        self._options = options
        self._publisher = publisher
        self._layout = layout or _LAYOUTS[options.layout](options, publisher)
        # The reused memory is enough for two files that threads write, and one that `add` fills.
        self.buffers = Buffers(3 * options.file_bytes)
        self._copies = copies
        self._codecs: dict[tuple[int, torch.dtype], Codec] = {}

    def begin(self) -> RequestWriter:
        return RequestWriter(self.buffers, self._finish, self._copies)

    def _finish(self, record: RequestRecord, rows: RequestWriter) -> Stored:
        streams: dict[str, EncodedStream] = {}
        for stream, found in rows.streams(record.num_positions).items():
            codec, encoded = self._encoded(found)
            streams[stream_name(stream)] = EncodedStream(
                positions=found.positions,
                parts={part: [one[part] for one in encoded] for part in encoded[0]},
                codec=codec,
                read=found.read,
            )
        token_ids = np.array([*record.prompt_ids, *record.output_ids], np.int32)
        return self._layout.add(FinishedRequest(record, streams, torch.from_numpy(token_ids)))

    def _encoded(self, found: Stream) -> tuple[Codec, list[dict[str, Tensor]]]:
        """Returns the codec of a stream, and the encoded parts of each block of the stream."""
        if found.codec is not None:
            packing = Packing(found.codec)
            return found.codec, [
                {name: part.contiguous() for name, part in packing.parts(block).items()}
                for block in found.blocks
            ]
        first = found.blocks[0]
        codec = self._codec(first.shape[1], first.dtype)
        # A codec that is not rowwise, such as zstd, encodes all rows of the stream at once.
        blocks = found.blocks if codec.rowwise else [torch.cat(found.blocks)]
        return codec, [codec.encode(block) for block in blocks]

    def _codec(self, hidden_size: int, dtype: torch.dtype) -> Codec:
        key, options = (hidden_size, dtype), self._options
        if key not in self._codecs:
            self._codecs[key] = make_codec(
                options.codec, hidden_size, dtype, **options.codec_options
            )
        return self._codecs[key]

    def flush(self) -> None:
        """Wait until the file of each finished request is visible or has failed. Raises FileError
        if a file cannot be written during this call. If an earlier file could not be written, the
        error may be only in `Stored.published`."""
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
    """A writer for a root. If the root is local, the temporary files of killed writers are removed.

    Raises:
        FileError: the root cannot be written to.
        ConfigError: a package that the root or the codec needs is missing, fsspec cannot open the
            root, or the root is a URL and `fsync` is true.
    """
    if options.codec == "zstd":
        zstd_library()
    return Writer(options, make_publisher(options.root, options.fsync, options.file_mode))
