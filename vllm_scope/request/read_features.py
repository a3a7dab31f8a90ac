"""Which features of an SAE were read.

Owns:  ReadFeatures, `check_feature`.
Runs:  in front-ends, workers and clients. No torch.
From:  resolved.   To: batch.sparse, files.index, server.encode, client.parsing.

Promise: if it is known which features were read, asking for another feature is an error, and never
gives a row of zeros.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vllm_scope.errors import shown


class ReadFeatures(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which features the result of a `Features` can have. A field that is not known is not in JSON.

    Attributes:
        num_features: how many features the SAE has. None for a read with `indices` of an SAE that
            is not TopK: the workers get the rows of these features alone.
        asked: the features that the read named (`indices`); None if it named none (`top_k`).
    """

    num_features: int | None = None
    asked: tuple[int, ...] | None = None


#: For answers and files of earlier versions, which do not say which features were read.
NOT_KNOWN = ReadFeatures()


def check_feature(index: object, num_features: int | None, asked: tuple[int, ...] | None) -> None:
    """Raises KeyError if a feature cannot be in a result.

    Args:
        num_features, asked: as in ReadFeatures.
    """
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or index < 0:
        raise KeyError(f"feature {shown(index)} is not there; features are whole numbers from 0.")
    if asked is not None and index not in asked:
        raise KeyError(
            f"feature {index} was not read; the read named {shown(list(asked))}. Add it to "
            "Features(indices=...) and run the request again."
        )
    if num_features is not None and index >= num_features:
        raise KeyError(
            f"feature {index} is not there; the SAE has features 0 to {num_features - 1:,}."
        )
