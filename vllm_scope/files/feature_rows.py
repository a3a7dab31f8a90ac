"""Converts features to the rows of a stream in a sink's files, and back.

Owns:  SUFFIX, MOST_INDEX, `stored_features`, `features_in`.
Runs:  the process that writes rows calls `stored_features`. Any process may call `features_in`.
To:    sinks.filesystem (writes), captured (reads).

In a file, the features with the name NAME are stored as the stream `NAME.features`. The rows of the
stream are float32 [n, 2 * places], with room for `places` features in each row. A row has first the
indices of its features, then the values of these features. A place without a feature has the index
-1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_scope.batch.sparse import SparseRows
from vllm_scope.codecs import make_codec
from vllm_scope.codecs.packed import EncodedRows, Packing
from vllm_scope.errors import FileError
from vllm_scope.request.read_features import ReadFeatures

#: The name of a stream of features is the name of the features, followed by this ending.
SUFFIX = ".features"
#: float32 can represent each whole number up to this one.
MOST_INDEX = 1 << 24


def stored_features(indices: Tensor, values: Tensor) -> EncodedRows:
    """Features as rows of a stream. A file stores these rows without a codec, even if other rows
    have a codec.

    Args:
        indices: int32 [n, places]. -1 in a place without a feature.
        values: float32 [n, places].

    Raises:
        FileError: an index is above MOST_INDEX.
    """
    if indices.numel() and (most := int(indices.max())) > MOST_INDEX:
        raise FileError(
            f"a feature has the index {most:,}; files have indices up to {MOST_INDEX:,}. Send "
            "these features to memory."
        )
    rows = torch.cat([indices.float(), values], dim=1)
    packing = Packing(make_codec("none", rows.shape[1], torch.float32))
    return EncodedRows(packing.codec, packing.pack(rows))


def features_in(rows: Tensor, read: ReadFeatures) -> SparseRows:
    """The features in rows that `stored_features` made."""
    places = rows.shape[1] // 2
    return SparseRows(rows[:, :places].to(torch.int32), rows[:, places:], read=read)
