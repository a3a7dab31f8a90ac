"""A second stage scores only after the verdict of its first stage, from a position that depends on
that verdict alone; requests without the verdict pay nothing for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import pytest
import torch

from tests.asking import rejects_drafts, run
from tests.conftest import (
    TOYWORLD,
    async_engine,
    local_engine,
    long_except,
    preempted_in,
    process_engine,
)
from tests.engine import probing
from tests.engine.probing import TOLERANCE, mlp, numbers, pool
from tests.engine.test_edits import params
from tests.engine.test_monitors import _Hook as Hook
from tests.engine.test_monitors import sample
from tests.engine.test_verdicts import MANY, PROMPT, record
from toyworld.world import lying_prompts
from vllm_scope import Ema, Probe, Read, RollingMean, SpecError, set_monitors
from vllm_scope.worker import drain, probe_bank

CHEAP = {"weight": numbers(1, 128), "layer": 1, "name": "cheap", "aggregate": "max"}
#: Of every kind, and one that shares the place of the first stage.
DEAR = [
    Probe(numbers(2, 128), layer=1, name="linear", after="cheap"),
    Probe(numbers(3, 2, 128), layers=[0, 2], name="two", after="cheap", aggregate=Ema(0.8)),
    Probe(mlp(4, 128), layer=2, name="mlp", after="cheap", aggregate=RollingMean(4, "max")),
    Probe(pool(6, 128), layer=0, name="pool", after="cheap", aggregate="max"),
]
READ = Read("resid_post")


def cheap(threshold: float, **fields: object) -> Probe:
    return Probe(**CHEAP | {"threshold": threshold} | fields)


def body(seed: int, threshold: float, **fields: object) -> dict:
    return {"weight": numbers(seed, 128).tolist(), "layers": [1], "threshold": threshold} | fields


@pytest.fixture(scope="module")
def llm(llama):
    """In chunks of 32 tokens."""
    with local_engine(
        llama, dtype="float32", max_num_batched_tokens=32, max_num_seqs=8, block_size=32
    ) as llm:
        yield llm


def thresholds(llm, prompt: list[int], num_tokens: int, tokens: str = "generated") -> list:
    """(position, threshold) of some places where the first stage may have its verdict."""
    asked = params(cheap(1e30, tokens=tokens), max_tokens=num_tokens)
    (output,) = run(llm, [prompt], asked)
    assert output.scope.verdicts == output.scope.begun == {}
    values, positions = output.scope.aggregates["cheap"], output.scope.scores.positions("cheap")
    found = [(int(positions[at]), threshold) for at, threshold in record(values)]
    return found[:: max(1, len(found) // 3)]


def check(output, position: int, probes: list[Probe] = DEAR) -> None:
    """The second stage has the scores of all positions from its first one on, and of no other."""
    result, num_prompt = output.outputs[0].scope, len(output.prompt_token_ids)
    assert result.verdicts["cheap"].position == position
    first = max(num_prompt, position + 1) + 1
    assert result.begun == {probe.name: first for probe in probes}
    for probe in probes:
        found = result.scores.positions(probe.name).tolist()
        assert found == list(range(first, result.num_processed))
    probing.check(result, probes, TOLERANCE[torch.float32])


@contextmanager
def counted(monkeypatch):
    """Rows that went through a bank, by the bank's number of values, and numbers of taps, as
    "told"; points that taps copied."""
    rows, points = Counter(), Counter()
    pack, submit = probe_bank.DeviceBank.pack, drain.Drain.submit

    def packing(self, some):
        rows[self.shape[1]] += len(some)
        return pack(self, some)

    def submitting(self, region, labels, *rest):
        for layout_of in labels.layout_of.tolist():
            arena = labels.layouts[layout_of].arena
            points.update(arena.points)
            rows["told"] += sum(len(told) for _, told in arena.encoded)
        return submit(self, region, labels, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(probe_bank.DeviceBank, "pack", packing)
        patch.setattr(drain.Drain, "submit", submitting)
        yield rows, points


@pytest.mark.parametrize("tokens", long_except(["generated", "all", "prompt"], "all"))
def test_scores_of_the_second_stage_are_those_of_the_rows_from_its_first_position_on(tokens, llm):
    tried = 0
    for prompt in MANY:
        for position, threshold in thresholds(llm, prompt, 16, tokens):
            # The first stage may stand behind the second one.
            asked = params(*DEAR, cheap(threshold, tokens=tokens), READ, max_tokens=16)
            (output,) = run(llm, [prompt], asked)
            check(output, position)
            tried += 1
    assert tried > 2, "the values only fall; the test shows nothing"


def test_a_request_that_is_not_flagged_pays_nothing(llm, monkeypatch):
    """Neither are rows read for the second stage, nor does its head run; of its neighbours that are
    flagged, from the first position on (without drafts and async scheduling: one earlier)."""
    # The tap of layer 1 makes one number; a bank makes 7 of rows of layer 2.
    seven = [
        Probe(numbers(i, 128), layer=2, name=f"{i}", after="cheap") for i in range(7)
    ]  # fmt: skip
    (position, threshold), *_ = thresholds(llm, PROMPT, 16)
    low, high = (params(cheap(t, tokens="generated"), *seven, max_tokens=16)
                 for t in (threshold, 1e30))  # fmt: skip
    with counted(monkeypatch) as (rows, points):
        outputs = run(llm, MANY, high)
    assert [output.scope.begun for output in outputs] == [{}] * 3
    assert rows == {"told": 3 * 15}
    assert not points
    with counted(monkeypatch) as (rows, points):
        outputs = run(llm, MANY, [low, high, high])
    scored = len(outputs[0].scope.scores["0"])
    assert scored == len(PROMPT) + 15 - (position + 2)
    assert rows["told"] == 3 * 15
    assert scored <= rows[7] <= scored + 1
    assert sum(points.values()) == rows[7]


def test_a_second_stage_stops_its_request_and_neighbours_are_bit_identical(llm):
    plain = [params(max_tokens=24, logprobs=3)] * 3
    before = run(llm, MANY, plain)
    (position, threshold), *_ = thresholds(llm, PROMPT, 24)
    stop = Probe(numbers(2, 128), layer=2, name="dear", after="cheap", threshold=-1e30,
                 action="stop")  # fmt: skip
    asked = [params(cheap(threshold, tokens="generated"), stop, max_tokens=24), *plain[1:]]
    outputs = run(llm, MANY, asked)
    (completion,) = outputs[0].outputs
    first = position + 2
    assert completion.finish_reason == "stop"
    assert completion.stop_reason.startswith("probe 'dear': ")
    assert completion.stop_reason.endswith(f" at position {first}")
    assert completion.token_ids == before[0].outputs[0].token_ids[: first - len(PROMPT) + 2]
    assert completion.scope.verdicts["dear"].position == first
    assert completion.scope.status == "complete"
    for ours, theirs in zip(outputs[1:], before[1:], strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert [{t: x.logprob for t, x in one.items()} for one in ours.outputs[0].logprobs] == [
            {t: x.logprob for t, x in one.items()} for one in theirs.outputs[0].logprobs
        ]
    assert llm.collective_rpc("scope_counters")[0]["requests"] == 0


def test_each_completion_is_judged_by_itself(llm):
    (_, threshold), *_ = thresholds(llm, PROMPT, 24)
    asked = params(cheap(threshold, tokens="generated"), *DEAR, READ, max_tokens=24, n=3,
                   temperature=1.0)  # fmt: skip
    (output,) = run(llm, [PROMPT], asked)
    for completion in output.outputs:
        result = completion.scope
        verdict = result.verdicts.get("cheap")
        first = None if verdict is None else verdict.position + 2
        assert result.begun == ({} if first is None else {p.name: first for p in DEAR})
        probing.check(result, [p for p in DEAR if len(result.scores[p.name])], 1e-5)


def test_stages_follow_each_other(llm):
    """Three, and the second one's verdict comes with its first position."""
    (position, threshold), *_ = thresholds(llm, PROMPT, 24)
    second = Probe(numbers(2, 128), layer=2, name="second", after="cheap", threshold=-1e30)
    third = Probe(pool(6, 128), layer=1, name="third", after="second")
    asked = params(third, second, cheap(threshold, tokens="generated"), READ, max_tokens=24)
    (output,) = run(llm, [PROMPT], asked)
    assert output.scope.begun == {"second": position + 2, "third": position + 4}
    probing.check(output.scope, [second, third], TOLERANCE[torch.float32])


def same(before, outputs) -> None:
    for ours, theirs in zip(before, outputs, strict=True):
        first, second = ours.outputs[0].scope, theirs.outputs[0].scope
        assert (first.status, second.status) == ("complete", "complete")
        assert first.begun == second.begun != {}
        for name in first.scores:
            assert torch.equal(first.scores.positions(name), second.scores.positions(name))
            torch.testing.assert_close(
                first.scores[name], second.scores[name], rtol=1e-3, atol=1e-4
            )


def test_a_cascade_keeps_the_prefix_cache(llm):
    """Of a prompt whose tokens flag it, and whose second prompt is cached."""
    prompt = list(range(300, 390))
    asked = params(cheap(-1e30), *DEAR, max_tokens=12)
    first, second = (run(llm, [prompt], asked)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    assert first.scope.begun == {probe.name: 91 for probe in DEAR}
    same([first], [second])
    (exact,) = run(llm, [prompt], params(cheap(-1e30), *DEAR, READ, max_tokens=12))
    check(exact, 0)
    same([first], [exact])


def test_what_was_flagged_is_computed_again_by_the_next_turn(llm):
    """Its prompt's blocks are not: their scores are kept."""
    for threshold, num_cached in ((-1e30, 128), (1e30, 192)):
        prompt = torch.randint(5, 400, (150,), generator=torch.manual_seed(3)).tolist()
        asked = params(cheap(threshold), *DEAR, max_tokens=60)
        (first,) = run(llm, [prompt], asked)
        answer = list(first.outputs[0].token_ids)
        (second,) = run(llm, [prompt + answer], asked)
        assert second.num_cached_tokens == num_cached
        assert second.scope.status == "complete"
        assert len(second.scope.scores["cheap"]) == 150 + 60 + 59
        llm.reset_prefix_cache()


@pytest.fixture
def _without_monitors(llm):
    yield
    set_monitors(llm, {})


@pytest.mark.usefixtures("_without_monitors")
def test_monitors_are_a_cascade_and_metrics_count_both(llm):
    (position, threshold), *_ = thresholds(llm, PROMPT, 16)
    first = body(1, threshold, aggregate="max", tokens="generated")
    set_monitors(llm, {"dear": body(2, -1e30, after="lie", layers=[2]), "lie": first})
    names = [("lie", "score_count"), ("lie", "verdicts_total"),
             ("dear", "score_count"), ("dear", "verdicts_total")]  # fmt: skip
    before = [sample(what, monitor=name) for name, what in names]
    (flagged,) = run(llm, [PROMPT], params(max_tokens=16))
    assert flagged.scope.verdicts["monitor/lie"].position == position
    assert flagged.scope.verdicts["monitor/dear"].position == position + 2
    assert flagged.scope.begun == {"monitor/dear": position + 2}
    set_monitors(llm, {"lie": first | {"threshold": 1e30}, "dear": body(2, -1e30, after="lie")})
    (calm,) = run(llm, [PROMPT], params(max_tokens=16))
    assert calm.scope.verdicts == calm.scope.begun == {}
    after = [sample(what, monitor=name) for name, what in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1, 1, 1]
    stop = body(2, -1e30, after="lie", action="stop")
    set_monitors(llm, {"lie": first, "dear": stop})
    (stopped,) = run(llm, [PROMPT], params(max_tokens=16))
    reason = f" at position {position + 2}"
    assert stopped.outputs[0].stop_reason.startswith("probe 'monitor/dear': ")
    assert stopped.outputs[0].stop_reason.endswith(reason)


@pytest.mark.usefixtures("_without_monitors")
@pytest.mark.parametrize(
    ("monitors", "sentence"),
    [
        ({"a": body(1, 0.0, after="b")}, "['a'].after is 'b', and no monitor has this name"),
        ({"a": body(1, 0.0, after="a")}, "['a'].after is 'a', which waits for this monitor"),
        (
            {"a": body(1, 0.0, after="b"), "b": body(1, 0.0, after="a")},
            "['b'].after is 'a', which waits for this monitor itself",
        ),
        (
            {f"m{i}": body(1, 0.0, after=f"m{i - 1}" if i else None) for i in range(5)},
            "['m4'].after makes a cascade of more than 4 stages",
        ),
        (
            {"a": body(1, 0.0, action="stop"), "b": body(1, 0.0, after="a")},
            "['b'].after is 'a', which cannot be a first stage",
        ),
        (
            {"a": body(1, 0.0, tokens="last"), "b": body(1, 0.0, after="a")},
            "['b'].after is 'a', which cannot be a first stage",
        ),
        ({"a": body(1, 0.0, after=3)}, "['a'].after is 3; a name is a string"),
        (
            {"a": body(1, 0.0), "b": body(1, 0.0, after="a", tokens="prompt")},
            "['b'].tokens is 'prompt', and the probe scores after 'monitor/a'",
        ),
        (
            {str(i): body(1, 0.0, after=str(i - i % 2) if i % 2 else None) for i in range(18)},
            "9 probes have action 'stop' or are first stages of others; at most 8",
        ),
    ],
)
def test_a_wrong_cascade_is_refused_and_the_others_stay(monitors, sentence, llm):
    set_monitors(llm, {"good": body(1, -1e30), "dear": body(2, 0.0, after="good")})
    with pytest.raises(SpecError) as error:
        set_monitors(llm, monitors)
    assert sentence in str(error.value)
    (output,) = run(llm, [PROMPT[:9]], params())
    assert set(output.scope.scores) == {"monitor/good", "monitor/dear"}


# Last: an engine that ends in this process leaves the other one without its groups


@pytest.mark.long
def test_with_async_scheduling_the_second_stage_begins_at_the_same_position(llama, llm):
    """As users start it: its own process, async scheduling, streamed."""
    found = thresholds(llm, PROMPT, 40)
    wanted = [
        run(llm, [PROMPT], params(cheap(t, tokens="generated"), *DEAR, max_tokens=40))[0]
        for _, t in found
    ]

    async def main():
        engine = async_engine(llama, skip_tokenizer_init=True, async_scheduling=True)

        async def one(name, threshold):
            sampling = params(cheap(threshold, tokens="generated"), *DEAR, max_tokens=40,
                              logprobs=None)  # fmt: skip
            stream = engine.generate({"prompt_token_ids": PROMPT}, sampling, name)
            return [output async for output in stream][-1]

        try:
            return await asyncio.gather(*(one(str(p), t) for p, t in found))
        finally:
            engine.shutdown()

    same(wanted, asyncio.run(main()))


@pytest.mark.long
@rejects_drafts
def test_chunks_preemption_and_the_prefix_cache_change_nothing(llama, llm):
    """Against the engine with chunks of 32 tokens."""
    ids = [list(range(i, i + 30)) for i in (10, 50, 90)]
    tried = [thresholds(llm, some, 60)[-1] for some in ids]
    asked = [params(cheap(t, tokens="generated"), *DEAR, max_tokens=60) for _, t in tried]
    before = run(llm, ids, asked)
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3,
    ) as other:  # fmt: skip
        preempted = preempted_in(other)
        outputs = run(other, ids, asked)
        assert preempted, "the cache was large enough; the test shows nothing"
        same(before, outputs)
        (reading,) = run(other, ids[:1], params(cheap(tried[0][1], tokens="generated"), *DEAR,
                                                READ, max_tokens=60))  # fmt: skip
        check(reading, tried[0][0])


@pytest.mark.long
def test_with_drafts_it_begins_where_the_longest_steps_would_end(llama):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    prompt = [3, 4, 5] * 8
    with process_engine(
        llama, dtype="float32", speculative_config=config, enforce_eager=True,
        skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        position, threshold = thresholds(llm, prompt, 40)[0]
        asked = params(cheap(threshold, tokens="generated"), *DEAR, READ, max_tokens=40)
        (output,) = run(llm, [prompt], asked)
    result = output.scope
    assert result.verdicts["cheap"].position == position
    assert result.begun == {probe.name: position + 3 * 4 for probe in DEAR}
    assert len(result.scores["pool"]) == result.num_processed - position - 12 > 0
    probing.check(result, DEAR, TOLERANCE[torch.float32])


# Monitors


@pytest.mark.long
def test_toy_speakers_are_looked_at_more_closely_where_the_first_stage_flags_them():
    """A direction of lies flags about half of the speakers; a pool of heads' outputs at four layers
    follows, and an address outside is told."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    server.came = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sites = {"sites": ["resid_post", "z"]}
    with local_engine(
        TOYWORLD, dtype="float32", skip_tokenizer_init=False, additional_config={"scope": sites}
    ) as toy:
        few = lying_prompts(40)
        texts = [prompt.text for prompt in few]
        read = params(Read("resid_post", layers=[2]), max_tokens=1)
        rows = [out.scope["resid_post", 2] for out in toy.generate(texts, read, use_tqdm=False)]
        last = torch.stack([each[-1] for each in rows])
        lying = torch.tensor([prompt.label for prompt in few], dtype=torch.bool)
        lie = last[lying].mean(0) - last[~lying].mean(0)
        largest = sorted(float((each @ lie).max()) for each in rows)
        threshold = (largest[19] + largest[20]) / 2
        width = toy.collective_rpc("scope_describe")[0]["sites"]["heads"]
        width = width["num_heads"] * width["head_size_v"]
        first = Probe(lie, layer=2, name="lie", threshold=threshold, tokens="prompt")
        second = Probe([pool(i, width) for i in (1, 3, 5, 7)], layers=[1, 2, 3, 4], site="z",
                       name="pools", after="lie", aggregate="mean", threshold=-1e30)  # fmt: skip
        asked = params(second, first, Read("z"), Read("resid_post"), max_tokens=12)
        flagged = []
        for output in toy.generate(texts, asked, use_tqdm=False):
            result, num_prompt = output.scope, len(output.prompt_token_ids)
            above = (result["resid_post", 2][:num_prompt] @ lie > threshold).nonzero()
            assert result.begun == ({"pools": num_prompt + 1} if len(above) else {})
            flagged.append(bool(result.begun))
            if result.begun:
                assert result.verdicts["lie"].position == int(above[0])
                assert result.verdicts["pools"].position == num_prompt + 1
                probing.check(result, [first, second], TOLERANCE[torch.float32])
        assert sum(flagged) == 20
    # The same as monitors, on plain requests.
    url = f"http://127.0.0.1:{server.server_port}/x"
    dear = body_of(second) | {"after": "lie", "action": "escalate", "url": url}
    monitors = {"monitors": {"pools": dear, "lie": body_of(first)}}
    with local_engine(
        TOYWORLD, dtype="float32", skip_tokenizer_init=False,
        additional_config={"scope": sites | monitors},
    ) as toy:  # fmt: skip
        outputs = toy.generate(texts, params(max_tokens=12), use_tqdm=False)
        assert [bool(output.scope.begun) for output in outputs] == flagged
        end = time.monotonic() + 10
        while len(server.came) < sum(flagged) and time.monotonic() < end:
            time.sleep(0.05)
    assert {told["request_id"] for told in server.came} == {
        output.request_id for output, above in zip(outputs, flagged, strict=True) if above
    }
    assert all(told["monitor"] == "pools" for told in server.came)
    server.shutdown()


def body_of(probe: Probe) -> dict:
    """As an operator writes it."""
    found = probe.to_json()
    return {name: value for name, value in found.items() if name not in ("name", "after")}
