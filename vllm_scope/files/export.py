"""Exports captured rows to folders of Hugging Face `datasets`, through pyarrow.

Owns:  `export_dataset` (one row per token), `export_saelens` (contexts of equal length, in
       SAELens's format). draft.py has `export_speculators`.

All three functions write folders that `datasets.load_from_disk` can read. The functions do not
import `datasets`. A file becomes visible only after it is complete.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from vllm_scope.codecs.casts import halved
from vllm_scope.errors import ConfigError, FileError, shown
from vllm_scope.files.arrow import arrow
from vllm_scope.files.card import card_of
from vllm_scope.files.index import stream_name
from vllm_scope.files.publish import LocalPublisher, whole_writes, write_bytes
from vllm_scope.request.sites import SiteLayer

if TYPE_CHECKING:
    from pyarrow import Array, DataType, RecordBatch, Schema

    from vllm_scope.files.captured import CapturedRequest
    from vllm_scope.files.reader import Capture

Dtype = Literal["float32", "float16"]
#: The type of a column, as `datasets` writes it in JSON.
_Feature = dict[str, object]
#: Largest number of bytes of the float32 rows in a batch. A batch has at least one token.
_BATCH_BYTES = 64 << 20


class Exported(int):
    """The number of contexts that were written.

    Attributes:
        left_out: number of rows that were left out because they do not fill a whole context. They
            are at the end of a request, or before a gap in the positions of a request.
    """

    left_out: int

    def __new__(cls, contexts: int, left_out: int) -> Exported:
        found = super().__new__(cls, contexts)
        found.left_out = left_out
        return found


def export_dataset(
    capture: Capture, folder: str | Path, streams: list[SiteLayer], dtype: Dtype = "float32"
) -> int:
    """Write a dataset with one row per token, and a card (README.md). Returns the number of rows.

    The columns are `request`, `position`, `token_id` and one column `site.layer` for each stream.
    Requests that lack one of the streams are left out. You must fill in the license in the card.
    Rows exported as float32 equal the captured rows, because float32 can represent every number of
    the other dtypes.

    Args:
        folder: an empty folder, or the path of a new folder.
        dtype: the dtype of the exported rows. The dtype cannot be bf16, because Arrow has no bf16.

    Raises:
        FileError: the folder is not empty, a file cannot be read or written, the streams of a
            request have different positions, or the rows of one stream have different widths.
        ConfigError: pyarrow is missing, `streams` is not a list of (site, layer), or `dtype` is
            unknown.
        KeyError: a stream was not captured.
    """
    pa = arrow()
    requests, width = chosen(capture, streams)
    values = {stream: pa.list_(_arrow_type(dtype), size) for stream, size in width.items()}
    schema = pa.schema(
        [("request", pa.string()), ("position", pa.int64()), ("token_id", pa.int32())]
        + [(stream_name(stream), kind) for stream, kind in values.items()]
    )
    features = {
        "request": value_of("string"), "position": value_of("int64"), "token_id": value_of("int32"),
    } | {stream_name(stream): list_of(dtype, size) for stream, size in width.items()}  # fmt: skip

    def batches() -> Iterator[RecordBatch]:
        for request in requests:
            positions = request.positions(*streams[0])
            for stream in streams[1:]:
                if not torch.equal(request.positions(*stream), positions):
                    raise FileError(
                        f"{request!r}: {stream_name(stream)} has other positions than "
                        f"{stream_name(streams[0])}; export each stream alone."
                    )
            tokens = request.tokens_at(positions)
            stored = {stream: request.stored(stream) for stream in streams}
            step = max(1, _BATCH_BYTES // (4 * sum(width.values())))
            for start in range(0, len(positions), step):
                stop = min(start + step, len(positions))
                columns = [
                    pa.array([request.manifest.uid] * (stop - start)),
                    pa.array(positions[start:stop].numpy()),
                    pa.array(tokens[start:stop].numpy()),
                ]
                for stream, kind in values.items():
                    flat = _numbers(stored[stream].rows(start, stop), dtype)
                    columns.append(pa.FixedSizeListArray.from_arrays(flat, type=kind))
                yield pa.record_batch(columns, schema=schema)

    return save(
        Path(folder), schema, features, batches,
        card=lambda num_rows: card_of(requests, width, dtype, num_rows),
    )  # fmt: skip


def export_saelens(
    capture: Capture,
    folder: str | Path,
    site: str,
    layer: int,
    hook_name: str,
    context_size: int,
    dtype: Dtype = "float32",
) -> Exported:
    """Write a folder that SAELens can read with its option `cached_activations_path`. Returns the
    number of contexts.

    Each request is cut into contexts of `context_size` consecutive positions. Rows that do not fill
    a context are left out. The result counts them in `left_out`.

    Args:
        hook_name: the name of the column, as in SAELens's configuration. An example is
            `blocks.5.hook_resid_post`.

    Raises:
        As `export_dataset`. Also raises ConfigError if `context_size` is below 1.
    """
    pa = arrow()
    if context_size < 1:
        raise ConfigError(f"context_size is {context_size}; it must be at least 1.")
    stream = (site, layer)
    requests, widths = chosen(capture, [stream])
    width = widths[stream]
    storage = pa.list_(pa.list_(_arrow_type(dtype)))
    # In Arrow files, `datasets` marks a column of matrices with this extension type.
    marks = {
        "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
        "ARROW:extension:metadata": json.dumps([[context_size, width], dtype]),
    }
    schema = pa.schema(
        [
            pa.field(hook_name, storage, metadata=marks),
            pa.field("token_ids", pa.list_(pa.int32(), context_size)),
        ]
    )
    features: dict[str, _Feature] = {
        hook_name: {"shape": [context_size, width], "dtype": dtype, "_type": "Array2D"},
        "token_ids": list_of("int32", context_size),
    }
    inner = np.arange(context_size + 1, dtype=np.int32) * width
    outer = np.array([0, context_size], np.int32)
    left_out = 0

    def batches() -> Iterator[RecordBatch]:
        nonlocal left_out
        for request in requests:
            stored = request.stored(stream)
            positions = stored.positions
            tokens = request.tokens_at(positions)
            starts = _context_starts(positions.numpy(), context_size)
            left_out += len(positions) - len(starts) * context_size
            for start in starts:
                stop = start + context_size
                flat = _numbers(stored.rows(start, stop), dtype)
                rows = pa.ListArray.from_arrays(inner, flat)
                ids = tokens[start:stop].numpy()
                yield pa.record_batch(
                    [
                        pa.ListArray.from_arrays(outer, rows),
                        pa.FixedSizeListArray.from_arrays(pa.array(ids), context_size),
                    ],
                    schema=schema,
                )

    return Exported(save(Path(folder), schema, features, batches), left_out)


def _context_starts(positions: np.ndarray, context_size: int) -> list[int]:
    """The indices of the rows at which the contexts begin. A context has `context_size` consecutive
    positions."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    starts: list[int] = []
    for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(positions)], strict=True):
        starts += range(first, last - context_size + 1, context_size)
    return starts


def chosen(
    capture: Capture, streams: list[SiteLayer]
) -> tuple[list[CapturedRequest], dict[SiteLayer, int]]:
    """Returns the requests that have all of the streams, and the width of the rows of each stream.

    Raises:
        ConfigError: `streams` is not a list of (site, layer).
        FileError: the rows of one stream have different widths, or an index is damaged.
        KeyError: a stream was not captured.
    """
    listed = isinstance(streams, list | tuple) and len(streams) > 0
    if not listed or not all(isinstance(one, tuple) and len(one) == 2 for one in streams):
        raise ConfigError(
            f"streams is {shown(streams)}; it must be a list of (site, layer), such as "
            f"{shown(capture.keys()[:1] or [('resid_post', 5)])}."
        )
    width: dict[SiteLayer, int] = {}
    for stream in streams:
        name = stream_name(stream)
        for request in (request for request in capture if stream in request):
            found = request.stored(stream).codec.hidden_size
            if width.setdefault(stream, found) != found:
                raise FileError(
                    f"{request!r}: rows of {name} have {found} numbers, and rows of earlier "
                    f"requests have {width[stream]}; export the rows of one model alone."
                )
        if stream not in width:
            raise KeyError(f"{stream!r} was not captured; captured are {capture.keys()}")
    return [request for request in capture if all(s in request for s in streams)], width


def value_of(dtype: str) -> _Feature:
    return {"dtype": dtype, "_type": "Value"}


def list_of(dtype: str, length: int = -1) -> _Feature:
    """The type of a column of lists. If the length is -1, the lists may have any length."""
    return {"feature": value_of(dtype), "length": length, "_type": "List"}


def _arrow_type(dtype: Dtype) -> DataType:
    if dtype not in ("float32", "float16"):
        raise ConfigError(f"dtype is {dtype!r}; exports are float32 or float16.")
    return arrow().float32() if dtype == "float32" else arrow().float16()


def _numbers(rows: Tensor, dtype: Dtype) -> Array:
    numbers = halved(rows) if dtype == "float16" else rows.float()
    return arrow().array(numbers.reshape(-1).numpy())


def check_empty(folder: Path) -> None:
    """Raise FileError if the folder exists and is not empty, or cannot be read."""
    try:
        is_empty = not folder.exists() or not any(folder.iterdir())
    except OSError as error:  # for example, `folder` is a file
        raise FileError(
            f"{folder} cannot be read: {error.strerror}; export into a folder of its own."
        ) from None
    if not is_empty:
        raise FileError(f"{folder} is not empty; export into a folder of its own.")


def save(
    folder: Path,
    schema: Schema,
    features: dict[str, _Feature],
    batches: Callable[[], Iterator[RecordBatch]],
    form: str | None = None,
    card: Callable[[int], str] | None = None,
) -> int:
    """Write the files that `Dataset.save_to_disk` writes. Returns the number of rows.

    The file `state.json`, without which the folder cannot be read, becomes visible last.

    Args:
        form: the type of the values that `datasets` returns. If None, Python objects. If "torch",
            tensors.
        card: a function that returns the text of README.md for a number of rows. None: no card.
    """
    pa = arrow()
    check_empty(folder)
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    num_rows = 0

    def write(file: BinaryIO) -> None:
        nonlocal num_rows
        with (
            whole_writes(file) as whole,
            pa.ipc.new_stream(pa.PythonFile(whole, "w"), schema) as out,
        ):
            for batch in batches():
                out.write_batch(batch)
                num_rows += batch.num_rows

    data = "data-00000-of-00001.arrow"
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state: dict[str, object] = {
        "_data_files": [{"filename": data}],
        # `datasets` uses this fingerprint as the key of its caches.
        "_fingerprint": uuid.uuid4().hex[:16],
        "_format_columns": None if form is None else schema.names,
        "_format_kwargs": {},
        "_format_type": form,
        "_output_all_columns": False,
        "_split": None,
    }
    readme = {} if card is None else {
        "README.md": lambda file: write_bytes(file, body=card(num_rows).encode())
    }  # fmt: skip
    texts = {
        name: partial(write_bytes, body=json.dumps(body, indent=2).encode())
        for name, body in (("dataset_info.json", info), ("state.json", state))
    }
    with closing(LocalPublisher(folder)) as publisher:
        publisher.publish({data: write} | readme | texts)
    return num_rows
