"""The answer to one request that stands for several variants.

In a sweep, the front-end sends one request for several edits of one prompt. EngineCore makes a
request of each edit. These requests are the variants.

Owns:  Answers, and the error text NO_LOGPROBS.
Runs:  EngineCore makes Answers, and the front-end reads Answers. numpy, no torch.
From:  engine.core.variants.   To: engine.frontend.sweeping.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: The error text if vLLM did not return the log-probabilities that a sweep needs.
NO_LOGPROBS = (
    "vLLM did not return the log-probabilities of the metric's tokens. With speculative decoding, "
    "Model Runner V1 returns no log-probabilities of named tokens; start the engine without "
    "speculative decoding."
)
#: EngineCore sends Answers in the dict `EngineCoreOutput.kv_transfer_params`, under this key.
_KEY = "scope_answers"


class Answers(NamedTuple):
    """The results of the variants of a request.

    Attributes:
        logprobs: float32 [number of variants, number of tokens]. Each row has the log-probabilities
            of the tokens in SamplingParams.logprob_token_ids, in this order. If that list is None,
            each row has the log-probabilities of all token ids. If a variant has an error, its row
            is NaN. If all variants have errors, the number of tokens is 0.
        errors: the reason why a variant failed, by the index of the variant.
        others: True if, in the last step with variants, EngineCore also had requests that belong to
            no sweep.
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
