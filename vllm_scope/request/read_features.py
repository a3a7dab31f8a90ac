"""The features of an SAE that a result can have.

Owns:  ReadFeatures, `check_feature`.
Runs:  in front-ends, workers and clients. No torch.
From:  resolved.   To: batch.sparse, files.index, server.encode, client.parsing.

Promise: if a ReadFeatures says that a result cannot have a feature, an access to this feature
raises an error. The access does not return zeros, because zeros would mean that the feature is
inactive.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vllm_scope.errors import shown


class ReadFeatures(msgspec.Struct, frozen=True, omit_defaults=True):
    """The features that the result of a `Features` action can have. The JSON form leaves out fields
    that are None.

    Attributes:
        num_features: number of features of the SAE, or None. If the action has `indices` and the
            SAE is not a TopK SAE, the workers receive only these features' rows of the encoder, and
            `num_features` is None.
        asked: the features that the action named (`indices`). None if the action has `top_k`.
    """

    num_features: int | None = None
    asked: tuple[int, ...] | None = None


#: For answers and files of earlier versions of this package. Those answers and files do not name
#: the read features.
NOT_KNOWN = ReadFeatures()


def check_feature(index: object, num_features: int | None, asked: tuple[int, ...] | None) -> None:
    """Raises KeyError if a feature cannot be in a result.

    Args:
        num_features, asked: the same as the attributes of ReadFeatures.
    """
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or index < 0:
        raise KeyError(f"feature {shown(index)} is not there; features are whole numbers from 0.")
    if asked is not None and index not in asked:
        raise KeyError(
            f"feature {index} was not read; the read named {shown(list(asked))}. Add the feature "
            "to Features(indices=...) and run the request again."
        )
    if num_features is not None and index >= num_features:
        raise KeyError(
            f"feature {index} is not there; the SAE has features 0 to {num_features - 1:,}."
        )
