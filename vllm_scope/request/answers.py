"""The answer to one request that stands for several variants.

Owns:  Answers, and the error text NO_LOGPROBS.
Runs:  EngineCore makes Answers, and the front-end reads Answers. numpy, no torch.
From:  engine.core.variants.   To: engine.frontend.sweeping.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: The reason why a cell or a prompt of a sweep has no value.
NO_LOGPROBS = (
    "vLLM did not return the log-probabilities of the metric's tokens. With speculative decoding, "
    "Model Runner V1 returns no log-probabilities of named tokens; start the engine without "
    "speculative decoding."
)
#: The only key of the mapping that EngineCore sends to the front-end.
_KEY = "scope_answers"


class Answers(NamedTuple):
    """The results of the variants of a request.

    Attributes:
        logprobs: float32 [number of variants, number of tokens], log-probabilities of the tokens in
            SamplingParams.logprob_token_ids, in the order of this list. If
            SamplingParams.logprob_token_ids is not set, the log-probabilities of all token ids. The
            numbers of a variant with an error are NaN.
        errors: the reason why a variant failed, by the index of the variant.
        others: True if the engine at the same time had requests that do not belong to a sweep.
    """

    logprobs: NDArray[np.float32]
    errors: dict[int, str]
    others: bool = False

    def encode(self) -> dict[str, object]:
        return {_KEY: [self.logprobs.shape, self.logprobs.tobytes(), self.errors, self.others]}

    @staticmethod
    def decode(body: Any) -> Answers:
        shape, data, errors, others = body[_KEY]
        return Answers(np.frombuffer(data, np.float32).reshape(shape), errors, others)
