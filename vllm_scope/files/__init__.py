"""Captured rows on disk: written as requests end, read back lazily.

Owns:  the layouts, what is said beside the rows, and the reader. No engine.
Runs:  the writer where rows are drained; the reader anywhere.

`open_writer` is where an engine's sink begins, `open` where an analysis does.
"""

from vllm_scope.files.captured import CapturedRequest
from vllm_scope.files.export import export_dataset, export_saelens
from vllm_scope.files.manifest import Manifest, RequestRecord
from vllm_scope.files.options import FileOptions
from vllm_scope.files.reader import Capture, open
from vllm_scope.files.writer import RequestWriter, Writer, open_writer

__all__ = [
    "Capture",
    "CapturedRequest",
    "FileOptions",
    "Manifest",
    "RequestRecord",
    "RequestWriter",
    "Writer",
    "export_dataset",
    "export_saelens",
    "open",
    "open_writer",
]
