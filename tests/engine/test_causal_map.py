"""The causal map of capitals, by a compiled engine in processes of its own."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import pytest

from examples.causal_map import NUM_PAIRS, QUESTION, causal_map, pairs, write_figure
from tests.conftest import TOYWORLD, process_engine

pytestmark = pytest.mark.long

#: Seconds for 20 prompts of 12 tokens at 6 layers, on two CPU cores.
MOST_SECONDS = 5.0


@pytest.fixture(scope="module")
def llm():
    with process_engine(TOYWORLD, max_model_len=256) as llm:
        yield llm


def test_the_country_is_in_its_own_row_first_and_in_the_last_row_then(llm, tmp_path):
    table = causal_map(llm, 4)
    assert table.values.shape == (4, 6, 12)
    assert not table.errors
    found = np.mean(table.normalised().values, 0)
    ids = [llm.get_tokenizer().encode(QUESTION.format(c.name))
           for c, _ in pairs(llm.get_tokenizer(), 2)]  # fmt: skip
    (country,) = [p for p, (a, b) in enumerate(zip(*ids, strict=True)) if a != b]
    assert (found[:2, country] > 0.9).all()
    assert (found[2:, -1] > 0.9).all()
    others = np.delete(found, [country, 11], 1)
    assert np.abs(others).max() < 0.1
    write_figure(tmp_path / "map.png", table)
    assert (tmp_path / "map.png").stat().st_size > 10_000


@pytest.mark.alone
def test_a_map_takes_less_than_5_seconds(llm, capsys):
    from vllm import SamplingParams

    causal_map(llm, 2)
    seconds, plain = [], []
    encode = llm.get_tokenizer().encode
    asked = [{"prompt_token_ids": encode(QUESTION.format(c.name))}
             for c, _ in pairs(llm.get_tokenizer()) for _ in range(72)]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, logprob_token_ids=[5, 6])
    for _ in range(3):
        began = perf_counter()
        table = causal_map(llm)
        seconds.append(perf_counter() - began)
        began = perf_counter()
        llm.generate(asked, params, use_tqdm=False)
        plain.append(perf_counter() - began)
    num = table.values.size
    assert num == NUM_PAIRS * 6 * 12
    assert not np.isnan(table.values).any()
    with capsys.disabled():
        rates = ", ".join(f"{num / s:,.0f} (plain {num / p:,.0f})"
                          for s, p in zip(seconds, plain, strict=True))  # fmt: skip
        print(f"\n{num:,} cells; cells/s and plain requests/s: {rates}")
    assert min(seconds) < MOST_SECONDS
