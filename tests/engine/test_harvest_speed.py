"""A harvest of the toy model on two cores, beside a loop with Hugging Face.

VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m benchmarks.harvest  # more documents, and other loops
"""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from benchmarks.harvest import ENGINE, TOYWORLD, compare, facts, harvest, process_of_loops
from tests.conftest import local_engine


@pytest.mark.alone
def test_packed_short_documents_are_harvested_five_times_as_fast_as_by_a_loop():
    tokenizer = AutoTokenizer.from_pretrained(TOYWORLD)
    # An engine in this process computes on both cores, as the loop may.
    with process_of_loops() as pool, local_engine(TOYWORLD, **ENGINE, enforce_eager=False) as llm:
        harvest(llm, facts(tokenizer, 256))  # connects, and warms up
        (ratio,) = compare(llm, pool, facts(tokenizer, 4000), "pack", 5, {"loop": 1})
    assert ratio.median >= 5
