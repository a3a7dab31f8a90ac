"""The sink `to="filesystem"`, which writes requests into files.

Owns:  FilesystemSink (calls `vllm_scope.files`).
Runs:  on a sink thread. Several instances may write into one root.

A failed request has no file. If rows are missing, the request's file states the status `partial`.
With the layouts `per_request` and `npz`, the files of each API key are in a separate folder (option
`key_folders`). Therefore the requests of one API key cannot replace the files of another API key.
The end of a request is reported when its file is visible. With the layouts `packed` and `sharded`,
the file is visible after it is full or flushed.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from vllm_scope.files import FileOptions, RequestRecord, RequestWriter, open_writer
from vllm_scope.files.feature_rows import SUFFIX, stored_features
from vllm_scope.request.read_features import NOT_KNOWN, ReadFeatures
from vllm_scope.sinks import Block, Ending, Report


class FilesystemSink:
    live: ClassVar[bool] = False
    takes_scores: ClassVar[bool] = False
    takes_features: ClassVar[bool] = True

    def __init__(self, options: FileOptions) -> None:
        self._options = options
        self._writer = open_writer(options)
        self._requests: dict[int, RequestWriter] = {}

    def write(self, block: Block) -> None:
        request = self._requests.get(block.request.key)
        if request is None:
            request = self._requests[block.request.key] = self._writer.begin()
        site, rows, read = block.site, block.values, NOT_KNOWN
        if block.indices is not None:
            site, rows = f"{block.probe}{SUFFIX}", stored_features(block.indices, block.rows)
            read = ReadFeatures(block.num_features, block.asked)
        request.write(site, block.layer, block.positions, rows, read)

    def finish(self, ending: Ending) -> Report | None:
        request = ending.request
        writer = self._requests.pop(request.key, None)
        if ending.status == "error":
            return None
        record = RequestRecord(
            request.request_id, request.prompt_ids, ending.output_ids, request.model,
            ending.expected, ending.delivered, ending.dropped, ending.status, ending.reason,
            request.tag, request.name, request.uid, request.child, request.stage,
            request.num_stages, request.owner if self._options.key_folders else "",
            num_layers=request.num_layers,
        )  # fmt: skip
        stored = (writer or self._writer.begin()).finish(record)
        manifest, root = stored.manifest, self._options.root
        streams = {name: msgspec.to_builtins(one) for name, one in manifest.streams.items()}
        paths = [f"{root}/{stored.path(file)}" for file in manifest.files]
        return Report(
            manifest.files, streams, manifest.status, manifest.reason,
            {"root": root, "paths": paths}, stored.published, public=True,
        )  # fmt: skip

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
