"""Exports captured rows to a folder from which speculators trains draft models.

    dataset files                    input_ids, loss_mask, seq_len; one row per request
    hidden_states/hs_0.safetensors   hidden_states [tokens, places, hidden_size], token_ids [tokens]

Owns:  `export_speculators`.

speculators is a Python package that trains draft models for speculative decoding. Source of the
format: the class ArrowDataset of speculators, and the class FileTransfer of hs-connectors.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_scope.errors import FileError
from vllm_scope.files.arrow import arrow
from vllm_scope.files.export import check_empty, chosen, list_of, save, value_of
from vllm_scope.files.index import stream_name
from vllm_scope.files.publish import LocalPublisher
from vllm_scope.files.tensors import write_tensors
from vllm_scope.request.sites import SiteLayer

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from vllm_scope.files.captured import CapturedRequest
    from vllm_scope.files.reader import Capture


def export_speculators(
    capture: Capture,
    folder: str | Path,
    streams: list[SiteLayer],
    loss_mask: Callable[[CapturedRequest], Sequence[int]] | None = None,
) -> int:
    """Write a folder from which the package speculators trains draft models. Returns the number of
    samples.

    A sample is one request, which has rows at consecutive positions from 0 on. The dtype of the
    rows does not change. If the function raises an error, the samples that it wrote are removed.

    Args:
        folder: an empty folder, or the path of a new folder.
        streams: the places whose rows the draft model reads, in the draft model's order. The last
            place must be `resid_post` of the captured model's last layer, because its rows enter
            the final norm.
        loss_mask: a function that returns one int for each row of a request. If None, the loss mask
            has 1 for each row.

    Raises:
        FileError: the folder is not empty, a request lacks rows of some tokens, a loss mask has the
            wrong length, the rows' widths or dtypes differ, or the last of `streams` is wrong. If
            an earlier version of this package wrote the files, the last of `streams` is not
            checked.
        KeyError: a place was not captured.
        ConfigError: pyarrow is missing, or `streams` is not a list of (site, layer).
    """
    pa = arrow()
    requests, widths = chosen(capture, streams)
    if len(set(widths.values())) != 1:
        raise FileError(f"the rows are {list(widths.values())} wide; they must be of one width.")
    _check_last(requests, streams[-1])
    root = Path(folder)
    check_empty(root)  # check before the first write
    whole = pa.list_(pa.int64())
    schema = pa.schema([("input_ids", whole), ("loss_mask", whole), ("seq_len", pa.int64())])
    features = {"input_ids": list_of("int64"), "loss_mask": list_of("int64")}

    def batches() -> Iterator[RecordBatch]:
        with closing(LocalPublisher(root / "hidden_states")) as publisher:
            for number, request in enumerate(requests):
                tokens = _tokens(request, streams)
                rows = _stacked(request, streams)
                tensors = {"hidden_states": [rows], "token_ids": [tokens]}
                write = partial(write_tensors, tensors=tensors, metadata={})
                publisher.publish({f"hs_{number}.safetensors": write})
                mask = [1] * len(tokens) if loss_mask is None else list(loss_mask(request))
                if len(mask) != len(tokens):
                    raise FileError(
                        f"{request!r}: the loss mask has {len(mask)} numbers; it needs one for "
                        f"each of {len(tokens)} rows."
                    )
                columns = [[tokens.tolist()], [mask], [len(tokens)]]
                arrays = [pa.array(c, type=f.type) for c, f in zip(columns, schema, strict=True)]
                yield pa.record_batch(arrays, schema=schema)

    try:
        return save(root, schema, features | {"seq_len": value_of("int64")}, batches, "torch")
    except BaseException:
        shutil.rmtree(root / "hidden_states", ignore_errors=True)
        raise


def _check_last(requests: Sequence[CapturedRequest], stream: SiteLayer) -> None:
    """Raise FileError if `stream` is not `resid_post` of the model's last layer. If the file of a
    request does not have the number of layers, this request is not checked."""
    for num_layers in {request.manifest.num_layers for request in requests} - {None}:
        assert num_layers is not None
        if stream != (last := ("resid_post", num_layers - 1)):
            raise FileError(
                f"the last place is {stream_name(stream)}, and the model has {num_layers} layers; "
                f"a draft model learns from {stream_name(last)}, so read and name it last."
            )


def _stacked(request: CapturedRequest, streams: Sequence[SiteLayer]) -> torch.Tensor:
    """The rows of all places, [rows, places, width]. Raises FileError if the dtypes differ, because
    torch would convert all rows to one dtype."""
    rows = [request[stream] for stream in streams]
    dtypes = dict.fromkeys(str(some.dtype).removeprefix("torch.") for some in rows)
    if len(dtypes) != 1:
        raise FileError(
            f"{request!r}: its rows are in {' and '.join(dtypes)}; they must be in one dtype, so "
            "read all places with the same codec."
        )
    return torch.stack(rows, dim=1)


def _tokens(request: CapturedRequest, streams: Sequence[SiteLayer]) -> torch.Tensor:
    """The ids of the tokens that have a row in each stream, int64 [rows].

    Raises:
        FileError: a stream's positions have a gap, or the streams have different numbers of rows.
    """
    counts = set()
    for stream in streams:
        positions = request.positions(*stream)
        if not torch.equal(positions, torch.arange(len(positions))):
            raise FileError(
                f"{request!r}: {stream_name(stream)} has rows of some tokens only; read "
                "tokens='all'."
            )
        counts.add(len(positions))
    if len(counts) != 1:
        raise FileError(
            f"{request!r}: its places have {sorted(counts)} rows; the numbers must be equal."
        )
    return request.tokens_at(torch.arange(counts.pop())).long()
