"""The answer to one request that stands for several variants.

Owns:  Answers, and the error text NO_LOGPROBS.
Runs:  EngineCore makes Answers, and the front-end reads Answers. numpy, no torch.
From:  engine.core.variants.   To: engine.frontend.sweeping.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: The error text for a cell or a prompt of a sweep, if vLLM did not return its log-probabilities.
NO_LOGPROBS = (
    "vLLM did not return the log-probabilities of the metric's tokens. With speculative decoding, "
    "Model Runner V1 returns no log-probabilities of named tokens; start the engine without "
    "speculative decoding."
)
#: The only key of `EngineCoreOutput.kv_transfer_params`, in which the front-end gets Answers.
_KEY = "scope_answers"


class Answers(NamedTuple):
    """The results of the variants of a request.

    Attributes:
        logprobs: float32 [number of variants, number of tokens], log-probabilities of the tokens in
            SamplingParams.logprob_token_ids, in the order of this list. If the list is None, the
            log-probabilities of all token ids, in the order of the ids. The numbers of a variant
            with an error are NaN. If all variants have errors, the number of tokens is 0.
        errors: the reason why a variant failed, by the index of the variant.
        others: True if EngineCore had requests outside of sweeps at its last step with variants.
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
