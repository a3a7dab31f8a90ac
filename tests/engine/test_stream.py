"""A feed's rows are what reads give to memory; its engine may die, and an LLM goes on."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import psutil
import pytest

import vllm_scope
from tests import asking
from tests.asking import run
from tests.conftest import MEMORY, TOYWORLD, local_engine
from vllm_scope import Read, ScopeError, SpecError, scope

READS = (
    Read("resid_post", layers=[1, 4]),
    Read("q", layer=2),
    Read("resid_post", layer=3, codec="int8"),
)
SITES = {"scope": {"sites": ["resid_post", "q"]}}
LAYERS = [("resid_post", 1), ("resid_post", 3), ("resid_post", 4), ("q", 2)]
PROMPTS = [
    [random.Random(seed).randrange(5, 500) for _ in range(1 + seed % 90)] for seed in range(120)
]


@pytest.fixture(scope="module")
def llm():
    with local_engine(
        TOYWORLD, dtype="float32", max_model_len=128, max_num_seqs=64, skip_tokenizer_init=None,
        additional_config=SITES,
    ) as llm:  # fmt: skip
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    """(token, position, rows of all places) of every prompt, sorted."""
    outputs = run(llm, PROMPTS, asking.params(scope(*READS), max_tokens=1))
    return sorted(
        (token, position, *(output.scope[stream][position].flatten().tolist() for stream in LAYERS))
        for ids, output in zip(PROMPTS, outputs, strict=True)
        for position, token in enumerate(ids)
    )


def taken(batches):
    return sorted(
        (
            int(batch.token_ids[i]), int(batch.positions[i]),
            *(batch[stream][i].flatten().tolist() for stream in LAYERS),
        )
        for batch in batches
        for i in range(len(batch))
    )  # fmt: skip


def test_an_llm_feeds_the_rows_that_reads_give_and_serves_on(llm, expected):
    def stream(**options):
        return vllm_scope.stream(PROMPTS, *READS, model=llm, **options)

    batches = list(stream(batch_size=256, buffer_rows=1024))
    assert taken(batches) == expected
    with stream(batch_size=64, buffer_rows=128) as closed:
        next(closed)
    (output,) = run(llm, [[5, 6]], asking.params(scope(READS[0]), max_tokens=1))
    assert output.scope.status == "complete"
    with pytest.raises(SpecError, match="layer"):
        next(vllm_scope.stream(PROMPTS, Read("resid_post", layer=99), model=llm))


def lives(process):
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def engine_of(feed):
    """The processes that the feed's process has started."""
    return psutil.Process(feed._feeder.pid).children(recursive=True)


@pytest.mark.long
def test_a_process_feeds_the_same_rows_and_its_death_is_a_sentence(expected, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # `llm` is in this process
    engine = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True, **MEMORY}
    feed = vllm_scope.stream(
        PROMPTS + [[7] * 50] * 400, *READS, model=str(TOYWORLD), batch_size=256, buffer_rows=2048,
        engine=engine,
    )  # fmt: skip
    found = next(feed)
    assert set(map(str, taken([found]))) <= set(map(str, expected))
    started = engine_of(feed)
    assert started
    for process in started:
        process.kill()
    # Or the feed's process has: vLLM closes its sockets on another thread, which may be fatal.
    with pytest.raises(ScopeError, match="engine has died"):
        list(feed)
    limit = time.monotonic() + 60
    while any(map(lives, started)):
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert feed.num_rows < sum(map(len, PROMPTS)) + 400 * 50
