"""A harvest of the toy model on two cores, beside a loop with Hugging Face.

python -m benchmarks.harvest        # also longer documents, unpacked ones, and a loop over batches
"""

from __future__ import annotations

import pytest

from benchmarks.harvest import ENGINE, TOYWORLD, compare, facts, harvest, huggingface
from tests.conftest import process_engine


@pytest.mark.alone
def test_packed_short_documents_are_harvested_five_times_as_fast_as_by_a_loop():
    model, tokenizer = huggingface()
    with process_engine(TOYWORLD, **ENGINE) as llm:
        harvest(llm, facts(tokenizer, 256))  # connects, and warms up
        (ratio,) = compare(llm, model, facts(tokenizer, 4000), "pack", 5, {"loop": 1})
    assert ratio.median >= 5
