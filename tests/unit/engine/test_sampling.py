"""V1's sampler: each row of a step has the log-probabilities that its request asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_scope.engine.worker.sampling import _forward

VOCABULARY, ROWS = 12, 4
LOGITS = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3))


def asking(rows, most, named):
    """What some rows of a greedy step ask for."""
    zeros = torch.zeros(len(rows))
    return SamplingMetadata(
        temperature=None, all_greedy=True, all_random=False, top_p=None, top_k=None, generators={},
        max_num_logprobs=most, no_penalties=True, prompt_token_ids=None, frequency_penalties=zeros,
        presence_penalties=zeros, repetition_penalties=zeros, output_token_ids=[[] for _ in rows],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
        logprob_token_ids={i: named[row] for i, row in enumerate(rows) if row in named} or None,
    )  # fmt: skip


def sampled(rows, most, named):
    found = _forward(Sampler.forward, Sampler(), LOGITS[rows].clone(), asking(rows, most, named))
    return found.logprobs_tensors


@pytest.mark.parametrize("most", [0, 2, 5, VOCABULARY])
@pytest.mark.parametrize(
    "named", [{1: [7, 0, 3]}, {0: [5], 3: [0, 1, 2, 3, 4, 5, 6]}, {2: [11]}], ids=str
)
def test_a_row_beside_others_is_as_it_is_alone(most, named):
    """vLLM's front-end reads as many columns as the request asked for, and the sampled token."""
    together = sampled([0, 1, 2, 3], most, named)
    for row in range(ROWS):
        size = 1 + (len(named[row]) if row in named else most)
        alone = sampled([row], None if row in named else most, named)
        for of_all, one in ((together.logprob_token_ids, alone.logprob_token_ids),
                            (together.logprobs, alone.logprobs)):  # fmt: skip
            torch.testing.assert_close(of_all[row, :size], one[0, :size])
        assert together.selected_token_ranks[row] == alone.selected_token_ranks[0]


def test_the_sampler_of_drafts_gets_the_whole_vocabulary():
    found = sampled([0, 1, 2, 3], -1, {1: [7, 3]})
    torch.testing.assert_close(found.logprobs, LOGITS.log_softmax(-1))


def test_steps_of_one_kind_are_vllms_own():
    calls = []

    def original(self, logits, metadata):
        calls.append(metadata)

    for most, named in ((3, {}), (None, {0: [1]}), (None, {})):
        asked = asking([0, 1], most, named)
        _forward(original, None, None, asked)
        assert calls[-1] is asked
        assert asked == replace(asked)
