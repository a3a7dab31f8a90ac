"""Writes the rows of ended requests to files, and reads these files. Needs no engine.

Runs:  writers run on the thread of a sink or in a harvest's process. Readers run in any process.

An engine's sink calls `open_writer`. Code that analyses rows calls `open`.

writer.py options.py                          one writer, and its options
per_request.py packed.py sharded.py npz.py    one layout each
rows.py stored.py buffers.py                  the data of a request before it is written
tensors.py publish.py names.py roots.py       safetensors files, publishing, file names, roots
reader.py captured.py streams.py              reading requests
datafile.py folder.py                         reading files
feature_rows.py features.py                   features as rows and as Parquet
index.py                                      the data that is stored with the rows
iterate.py training.py                        rows for training
export.py card.py draft.py arrow.py           exports to other tools
remote.py                                     roots that are URLs
staged.py                                     files that another process writes
"""

from vllm_scope.files.captured import CapturedRequest
from vllm_scope.files.draft import export_speculators
from vllm_scope.files.export import export_dataset, export_saelens
from vllm_scope.files.features import export_features
from vllm_scope.files.index import IndexedRequest, RequestRecord
from vllm_scope.files.options import FileOptions
from vllm_scope.files.reader import Capture, open
from vllm_scope.files.rows import RequestWriter
from vllm_scope.files.training import RowDataset
from vllm_scope.files.writer import Writer, open_writer

__all__ = [
    "Capture",
    "CapturedRequest",
    "FileOptions",
    "IndexedRequest",
    "RequestRecord",
    "RequestWriter",
    "RowDataset",
    "Writer",
    "export_dataset",
    "export_features",
    "export_saelens",
    "export_speculators",
    "open",
    "open_writer",
]
