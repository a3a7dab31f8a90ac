"""What a sweep asks for, and the requests that it is made of."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import re
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_scope import (
    KL,
    Ablate,
    Add,
    CapacityError,
    ConfigError,
    LogitDifference,
    Logprob,
    Read,
    Replace,
    ScopeError,
    SpecError,
    Sweep,
)
from vllm_scope.engine import heap
from vllm_scope.engine.frontend.sweep_bounds import (
    MAX_LOGPROBS,
    Bounded,
    cells_at_once,
    check_logprobs,
    check_tokens,
)
from vllm_scope.engine.frontend.sweep_runs import _names, follow, showing
from vllm_scope.engine.frontend.sweeping import Sweeping, _Peekable
from vllm_scope.request.answers import Answers
from vllm_scope.request.selectors import MAX_ITEMS
from vllm_scope.request.sites import Heads, Place, Sites
from vllm_scope.sweeps import metrics, yielding
from vllm_scope.sweeps.plan import Plan
from vllm_scope.sweeps.source import ReadRows, given_rows
from vllm_scope.sweeps.sweep import as_prompts
from vllm_scope.sweeps.yielding import Yielding

SITES = Sites(
    num_layers=3, hidden_size=8, dtype="float32", heads=Heads(2, 1, 3, 3),
    boundaries=(0, 2, 4, 6, *(Place("z", k).boundary for k in range(3))),
)  # fmt: skip
METRIC = LogitDifference(1, 2)


class Letters:
    """Each letter is a token; a text begins with token 0."""

    def encode(self, text, add_special_tokens=True):
        return [0] * add_special_tokens + [ord(c) - ord("a") + 1 for c in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + i - 1) if i else "^" for i in ids)


class Result:
    """Rows of ones, times the layer and the position, times `scale`, at the positions read."""

    error, dropped = None, 0

    def __init__(self, job, width, scale):
        (read,) = job.actions
        self.at = torch.tensor(getattr(read.tokens, "positions", range(len(job.ids))))
        self.width, self.scale = width, scale

    def positions(self, site, layer):
        return self.at

    def __getitem__(self, place):
        rows = (self.at + 10.0 * place[1])[:, None]
        return (self.scale * rows).expand(-1, self.width).bfloat16()


def plan(sweep, prompts=("abc", "ab")):
    return Plan(sweep, list(prompts), SITES, Letters())


def answer(p, job, width=8):
    found = np.array([-1.0, -3.0])
    reads = job.place is None and job.actions
    rows = ReadRows(Result(job, width, 2 if job.of_source else 1)) if reads else None
    return p.take(job, found, rows, None)


def all_jobs(p, width=8):
    """Every job, answered at once."""
    found = []
    for job in p.jobs():
        assert job is not None
        found.append(job)
        answer(p, job, width)
    return found


def test_reads_come_before_their_cells_and_the_next_prompts_beside_them():
    p = plan(Sweep(["xyz", "xy"], metric=METRIC))
    jobs = all_jobs(p)
    assert p.num_cells == 3 * (4 + 3) == sum(job.place is not None for job in jobs)
    assert [(job.prompt, job.of_source) for job in jobs[:4]] == [
        (0, False), (0, True), (1, False), (1, True),
    ]  # fmt: skip
    assert [job.prompt for job in jobs[4:]] == [0] * 12 + [1] * 9
    assert jobs[0].actions == ()
    assert isinstance(jobs[1].actions[0], Read)
    assert not np.isnan(p.table.values[0]).any()
    for known in p._of:  # nothing is kept of a prompt whose cells have come
        assert (known.source, known.plain, known.clean, known.of_source) == (None,) * 4
    assert np.isnan(p.table.values[1, :, 3]).all()


def test_cells_wait_for_what_is_read():
    p = plan(Sweep(["xyz", "xy"], metric=METRIC))
    jobs = p.jobs()
    reads = [next(jobs) for _ in range(4)]
    assert next(jobs) is None
    answer(p, reads[0])
    assert next(jobs) is None
    answer(p, reads[1])
    assert next(jobs).place == (0, 0)


def test_the_edit_of_a_cell_has_the_rows_of_the_source_at_its_place():
    for mode, kind in (("patch", Replace), ("add", Add), ("ablate", Ablate)):
        p = plan(
            Sweep(
                ["xyz", "xy"],
                metric=METRIC,
                mode=mode,
                positions=[-1],
                scale=4 if mode == "add" else 1,
            )
        )
        for job in all_jobs(p):
            if job.place is None:
                continue
            ((edit,), (layer, column)) = job.actions, job.place
            assert isinstance(edit, kind)
            assert (edit.site, edit.layer_numbers, column) == ("resid_pre", (layer,), 0)
            last = len(job.ids) - 1
            row = getattr(edit, edit.fields[0]).numpy.reshape(-1)
            assert row.tolist() == [2.0 * (10 * layer + last)] * 8
            chosen = edit.positions if mode == "patch" else edit.tokens.positions
            assert chosen == (last,)
            assert mode != "add" or edit.scale == 4


def test_only_rows_that_cells_use_are_read():
    p = plan(
        Sweep(["xyz", "xy"], metric=METRIC, site="z", heads=[0], layers=[2], positions=[-1, 1])
    )
    reads = [job.actions[0] for job in all_jobs(p, width=6) if job.place is None]
    assert [read.tokens.positions for read in reads] == [(1, 3)] * 2 + [(1, 2)] * 2
    whole = plan(Sweep(["xyz", "xy"], metric=METRIC))
    assert [j.actions[0].tokens.to_json() for j in all_jobs(whole) if j.of_source] == ["prompt"] * 2


def test_rows_that_are_missing_end_the_sweep(monkeypatch):
    monkeypatch.setattr(Result, "dropped", 1)
    monkeypatch.setattr(Result, "error", "they were let go")
    with pytest.raises(
        ScopeError, match=r"rows of Sweep.source\[0\] are missing: they were let go"
    ):
        all_jobs(plan(Sweep(["xyz", "xy"], metric=METRIC)))


def test_tokens_are_checked_before_anything_is_made_of_them():
    def check(ids, where):
        if max(ids) > 99:
            raise SpecError(f"{where} has no such token")

    class Never(Letters):
        def decode(self, ids):
            raise AssertionError(ids)

    def prompts(*each):
        return [{"prompt_token_ids": ids} for ids in each]

    good, bad = prompts([5], [5]), prompts([5], [2**40])
    for asked, source, where in (
        (bad, good, r"prompts\[1\]"), (good, bad, r"Sweep.source\[1\]"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=f"^{where} has no such token"):
            Plan(Sweep(source, metric=METRIC), asked, SITES, Never(), check=check)


@pytest.mark.parametrize(
    ("prompts", "source", "metric", "where"),
    [
        (["a", "b!"], ["a", "bc"], METRIC, r"prompts\[1\]: "),
        (["a", "bc"], ["a", "b!"], METRIC, r"Sweep.source\[1\]: "),
        (["a", "bc"], ["a", "bc"], Logprob([1, "!"]), r"Logprob.token\[1\]: "),
        (["a", "bc"], ["a", "bc"], Logprob("!"), "Logprob.token: "),
        (["a", "bc"], ["a", "bc"], Logprob([1, -1]), r"Logprob.token\[1\] is -1"),
    ],
    ids=["prompt", "source", "one-of-the-tokens", "token-of-all", "no-token"],
)
def test_a_text_that_cannot_be_is_named(prompts, source, metric, where):
    class Some(Letters):
        def encode(self, text, add_special_tokens=True):
            if "!" in text:
                raise SpecError("a text of the sweep is too long")
            return super().encode(text, add_special_tokens)

    with pytest.raises(SpecError, match=f"^{where}"):
        Plan(Sweep(source, metric=metric), prompts, SITES, Some())


def test_tokens_and_metrics_that_an_engine_does_not_take_are_named():
    model = SimpleNamespace(
        get_vocab_size=lambda: 30, max_model_len=4, logprobs_mode="raw_logprobs", max_logprobs=20
    )
    check_tokens(model, [29] * 3, "prompts[3]")
    for ids, said in (([1] * 4, "has 4 tokens"), ([30], "has the tokens 30 to 30")):
        with pytest.raises(SpecError, match=rf"^prompts\[3\] {said}"):
            check_tokens(model, ids, "prompts[3]")
    with pytest.raises(
        SpecError, match=r"the token 30 for prompts\[1\]; the vocabulary has 0 to 29"
    ):
        check_logprobs(model, [(1, 2), (30, 3), (99, 1)])


def sending(p, add):
    """A Sweeping of this plan whose requests go to `add`."""
    found = object.__new__(Sweeping)
    found.plan, found._alike, found._most, found._alone = p, None, 99, True
    found._yielding = Yielding(1.0)
    found._jobs, found._params = _Peekable(p.jobs()), dict.fromkeys(p.token_ids)
    found._request = lambda jobs: add(jobs[0]) or SimpleNamespace(jobs=jobs)
    return found


@pytest.mark.parametrize("is_source", [False, True], ids=["prompt", "source"])
def test_a_request_that_is_refused_is_named_by_its_prompt(is_source):
    def add(job):
        if job.prompt == 1 and job.of_source == is_source:
            raise SpecError("edits[0] is wrong.")

    p = plan(Sweep(["xyz", "xy"], metric=METRIC))
    name = r"Sweep.source\[1\]" if is_source else r"prompts\[1\]"
    with pytest.raises(SpecError, match=rf"^{name}: edits\[0\] is wrong\.$"):
        list(sending(p, add).due(0, lambda cell: None))


def test_a_text_that_no_prompt_can_be_is_not_tokenized():
    class Known(Letters):
        max_chars_per_token = 3

        def encode(self, text, add_special_tokens=True):
            assert len(text) <= 12, "it would take long"
            return super().encode(text, add_special_tokens)

    bounded = Bounded(Known(), SimpleNamespace(max_model_len=4, get_vocab_size=lambda: 30))
    assert bounded.encode("aa") == [0, 1, 1]
    with pytest.raises(SpecError, match="has 13 tokens; this engine takes at most 3, because"):
        bounded.encode("a" * 12)
    with pytest.raises(
        SpecError, match="13 characters; the longest possible prompt of this engine has at most 12"
    ):
        bounded.encode("a" * 13)


def test_a_head_keeps_the_other_heads_of_the_prompt():
    p = plan(Sweep(["xyz", "xy"], metric=METRIC, site="z", heads=[1], layers=2, positions=0))
    (cell, _) = [job for job in all_jobs(p, width=6) if job.place is not None]
    assert cell.actions[0].values.numpy.tolist() == [[20.0] * 3 + [40.0] * 3]
    assert p.table.values.shape == (2, 1, 1, 1)


def test_a_given_direction_of_all_positions_at_once_is_one_edit():
    p = plan(Sweep(np.ones(8), metric=METRIC, mode="add", together=True))
    cells = [job for job in all_jobs(p) if job.place is not None]
    assert [len(job.actions) for job in cells] == [1] * 6
    assert cells[0].actions[0].tokens.positions == (0, 1, 2, 3)
    p = plan(Sweep(["xyz", "xy"], metric=METRIC, mode="add", together=True))
    assert [len(j.actions) for j in all_jobs(p) if j.place is not None] == [4] * 3 + [3] * 3


def test_positions_with_equal_rows_are_one_edit():
    rows = np.array([1.0, 2.0, 1.0, 2.0])[None, :, None] * np.ones(8)
    p = plan(Sweep(rows, metric=METRIC, mode="add", together=True), ["xyz"])
    cells = [job for job in all_jobs(p) if job.place is not None]
    found = [(edit.vector.numpy.tolist(), edit.tokens.positions) for edit in cells[0].actions]
    assert found == [([1.0] * 8, (0, 2)), ([2.0] * 8, (1, 3))]


def rows_of(length, *, alike=False):
    rows = np.ones((1, length, 8))
    return rows if alike else rows * np.arange(1, length + 1)[:, None]


@pytest.mark.parametrize("receivers", [None, "logits"], ids=["plain", "paths"])
@pytest.mark.parametrize(
    ("length", "options", "said"),
    [
        pytest.param(256, {"source": rows_of(256)}, None, id="as-many-edits-as-a-request-has"),
        pytest.param(
            257, {"source": rows_of(257)},
            r"has 257 edits of prompts\[1\], one for each different row; at most 256 are allowed, "
            r"so name fewer positions, or give rows of which at most 256 differ \(equal",
            id="rows-of-the-caller",
        ),
        pytest.param(
            257, {"source": ["a", "ab" * 128]}, r"has 257 edits of prompts\[1\], one for each pos",
            id="rows-that-are-read",
        ),
        pytest.param(257, {"source": rows_of(257, alike=True)}, None, id="equal-rows"),
        pytest.param(400, {"source": rows_of(400) % 200}, None, id="each-row-twice"),
        pytest.param(257, {"source": np.ones(8)}, None, id="one-row"),
        pytest.param(257, {"source": {"module": "m"}}, None, id="module"),
        pytest.param(257, {"source": rows_of(257), "mode": "patch"}, None, id="patch"),
        pytest.param(257, {"source": rows_of(257), "together": False}, None, id="one-by-one"),
    ],
)  # fmt: skip
def test_a_cell_has_as_many_edits_as_a_request_may_have(length, options, said, receivers):
    given = {"mode": "ablate", "together": True, "layers": [1], "receivers": receivers} | options
    prompts = [{"prompt_token_ids": [1] * n} for n in (2, length)]
    with nullcontext() if said is None else pytest.raises(SpecError, match=said):
        plan(Sweep(metric=METRIC, **given), prompts)


def test_edits_of_heads_are_counted_by_the_rows_of_these_heads():
    rows = np.ones((1, 257, 6))
    rows[..., 3:] += np.arange(257)[:, None]
    asked = {"metric": METRIC, "mode": "add", "site": "z", "layers": [1], "together": True}
    plan(Sweep(rows, heads=[0], **asked), [{"prompt_token_ids": [1] * 257}])
    with pytest.raises(SpecError, match="has 257 edits"):
        plan(Sweep(rows, heads="all", **asked), [{"prompt_token_ids": [1] * 257}])


def test_positions_are_as_many_as_a_request_may_name():
    prompt, most = {"prompt_token_ids": [1] * (MAX_ITEMS + 2)}, MAX_ITEMS
    asked = {"metric": METRIC, "mode": "add", "layers": [1], "together": True}
    plan(Sweep(np.ones(8), positions=list(range(most)), **asked), [prompt])
    for positions in ("all", list(range(most + 1))):
        with pytest.raises(SpecError, match=r"positions of prompts\[0\]; at most 65,536 are"):
            plan(Sweep(np.ones(8), positions=positions, **asked), [prompt])


def test_the_rows_that_a_cell_sets_fit_into_a_request():
    sites = replace(SITES, hidden_size=4096)
    asked = Sweep(np.ones(4096), metric=METRIC, together=True, layers=[1])
    for length in (383, 384):
        prompts = ["a", {"prompt_token_ids": [1] * length}]
        said = r"has 1,572,864 numbers in its edits of prompts\[1\]; fewer than 1,572,864 are"
        with nullcontext() if length == 383 else pytest.raises(SpecError, match=said):
            Plan(asked, prompts, sites, Letters())


def test_a_failed_cell_has_no_value_and_says_why():
    p = plan(Sweep(np.ones(8), metric=METRIC), ["ab"])
    for job in p.jobs():
        if job.place is None or job.place[1]:
            answer(p, job)
        else:
            assert np.isnan(p.take(job, None, None, "too large").value)
    assert p.table.errors == {(0, layer, 0): "too large" for layer in range(3)}
    assert np.isnan(p.table.values[0, :, 0]).all()
    assert (p.table.values[0, :, 1:] == 2).all()


@pytest.mark.parametrize(
    ("mode", "number", "said"),
    [
        pytest.param("ablate", 0, r"Ablate\.direction is zero", id="no-direction"),
        pytest.param("ablate", np.inf, r"Ablate\.direction", id="infinite-direction"),
        pytest.param("patch", np.inf, r"Replace\.values", id="infinite-row"),
        pytest.param("add", np.nan, r"Add\.vector", id="nan"),
    ],
)
def test_a_cell_that_cannot_be_does_not_end_the_others(mode, number, said, monkeypatch):
    """Its row was read: that of token 1 at layer 2."""
    p = plan(Sweep(["xy"], metric=METRIC, mode=mode), ["ab"])
    jobs, plain = [], Result.__getitem__

    def rows(self, place):
        found = plain(self, place).clone() + 1
        found[1] = number if place[1] == 2 else 1
        return found

    monkeypatch.setattr(Result, "__getitem__", rows)
    for job in p.jobs():
        jobs.append(job)
        if job.error is None:
            answer(p, job)
        else:
            assert (job.place, job.actions) == ((2, 1), ())
            cell = p.take(job, None, None, job.error)
            assert np.isnan(cell.value)
            assert cell[:3] == (0, 2, 1)
    assert sum(job.place is not None for job in jobs) == p.num_cells == 9
    ((place, error),) = p.table.errors.items()
    assert place == (0, 2, 1)
    assert re.match(said, error)
    assert np.argwhere(np.isnan(p.table.values)).tolist() == [[0, 2, 1]]


def test_metrics_of_known_distributions():
    p, q = np.array([0.5, 0.25, 0.25, 0]), np.array([0.25, 0.25, 0.25, 0.25])
    with np.errstate(divide="ignore"):
        clean, found = np.log(p), np.log(q)
    assert KL().value(found, clean) == pytest.approx(0.5 * np.log(2))
    # float32 and float64 have no number as small as exp(-800).
    unlikely, never = np.array([0.0, -800.0]), np.array([0.0, -np.inf])
    assert KL().value(never, unlikely) == 0
    assert LogitDifference(0, 1).value(clean, clean) == pytest.approx(np.log(2))
    assert Logprob(1).value(clean[1:], clean[1:]) == pytest.approx(np.log(0.25))


@pytest.mark.parametrize(
    ("most", "num_logprobs", "wanted"),
    [(256, 2, 256), (256, 128_256, 32), (16, 128_256, 16), (256, MAX_LOGPROBS + 1, 1)],
)
def test_cells_with_many_logprobs_are_few_at_once(most, num_logprobs, wanted):
    assert cells_at_once(most, num_logprobs) == wanted


def test_tokens_are_ids_or_texts_one_for_all_or_one_for_each_prompt():
    sweep = Sweep(np.ones(8), metric=LogitDifference(["ba", 5], "c"))
    assert plan(sweep).token_ids == [(2, 3), (5, 3)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"mode": "swap"}, "patch, ablate, add", id="mode"),
        pytest.param({"metric": "logit"}, "it must be a LogitDifference", id="metric"),
        pytest.param(
            {"metric": LogitDifference("ba", ["bc", 2])},
            r"has the token 2 as a and as b of prompts\[0\], the first of 'ba' and of 'bc'; the "
            "difference would be 0, so give two different tokens",
            id="same-token",
        ),
        pytest.param({"metric": Logprob([1, 2, 3])}, "3 tokens for 2 prompts", id="tokens"),
        pytest.param({"metric": Logprob(-1)}, "a token's id or a text", id="negative-token"),
        pytest.param({"site": "nowhere"}, "sites are", id="site"),
        pytest.param({"site": "ln_final"}, "'ln_final', which cannot be edited", id="final-site"),
        pytest.param({"mode": "ablate", "source": np.zeros(8)}, "source is zero", id="zero"),
        pytest.param({"site": "resid_mid"}, "does not tap", id="untapped"),
        pytest.param({"heads": "all"}, "have no heads", id="heads-of-the-stream"),
        pytest.param({"scale": 2.0}, "mode 'patch' has no scale", id="scale-of-a-patch"),
        pytest.param({"site": "z", "heads": 2}, "heads 0 to 1 here", id="head"),
        pytest.param({"layers": [3]}, "layers 0 to 2", id="layer"),
        pytest.param({"positions": [3]}, "positions are -3 to 2", id="position"),
        pytest.param({"positions": [0, -3]}, "twice", id="position-twice"),
        pytest.param({"positions": "some"}, "'all', a position or a list", id="positions"),
        pytest.param({"source": ["abc"] * 3}, "3 prompts for 2", id="sources"),
        pytest.param({"source": ["abcd", "ab"]}, "5 tokens", id="source-length"),
        pytest.param({"source": np.ones(9)}, r"\[8\], \[3, 8\], \[3, 4, 8\]", id="width"),
        pytest.param({"source": np.ones((2, 8))}, "has the shape", id="layers-of-rows"),
        pytest.param({"source": [1.0, float("nan")] * 4}, "NaN", id="nan"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(SpecError, match=said):
        plan(Sweep(**{"source": np.ones(8), "metric": METRIC} | options))


@pytest.mark.parametrize("heads", [(2, 4), (1, 8)], ids=["two-heads", "one-head"])
@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ((8,), (1, 1, 1, 8)), ((3, 8), (1, 3, 1, 8)), ((3, 1, 8), (1, 3, 1, 8)),
        ((3, 4, 8), (1, 3, 4, 8)), ((2, 3, 1, 8), (2, 3, 1, 8)), ((2, 3, 4, 8), (2, 3, 4, 8)),
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_every_shape_are_taken_with_and_without_heads(rows, wanted, heads):
    shape = (2, 3, 4 if 4 in rows else 1)
    given = np.arange(np.prod(rows), dtype=np.float32)
    found = given_rows(given.reshape(rows), shape, heads)
    assert found.shape == wanted
    assert found.ravel().tolist() == given.tolist()
    with_heads = given_rows(given.reshape(*rows[:-1], *heads), shape, heads)
    assert np.array_equal(with_heads, found)


def test_prompts_are_refused_that_have_no_token():
    with pytest.raises(SpecError, match="at least one prompt"):
        plan(Sweep(np.ones(8), metric=METRIC), [])
    with pytest.raises(SpecError, match=r"prompts\[0\] has no token"):
        plan(Sweep(np.ones(8), metric=METRIC), [{"prompt_token_ids": []}])


def test_a_table_that_is_too_large_is_not_made():
    asked = Sweep("xyzxyz", metric=METRIC, layers=[0, 1])
    assert Plan(asked, ["abcabc"], SITES, Letters(), most_cells=14).num_cells == 14
    with pytest.raises(
        SpecError, match=r"14 cells \(1 prompts x 2 layers x 7 positions x 1 heads\)"
    ):
        Plan(asked, ["abcabc"], SITES, Letters(), most_cells=13)
    with pytest.raises(SpecError, match="at most 1,000,000"):  # 2**60 values
        Plan(Sweep(torch.ones(8), metric=METRIC), [{"prompt_token_ids": [1]}] * 2000 + ["a" * 2000],
             SITES, Letters(), most_cells=10**6)  # fmt: skip


class Slow(Letters):
    """Encodes four texts, and no more."""

    num_texts = 0

    def encode(self, text, add_special_tokens=True):
        self.num_texts += 1
        assert self.num_texts <= 4, "more texts are encoded than the sweep can use"
        return super().encode(text, add_special_tokens)


MANY = ["a"] * 2000


@pytest.mark.parametrize(
    ("sweep", "prompts", "words"),
    [
        pytest.param(Sweep("b", metric=METRIC), MANY, r"at least [0-9,]+ cells", id="prompts"),
        pytest.param(
            Sweep(MANY, metric=METRIC), ["a"], "has 2000 prompts for 1 prompts", id="sources"
        ),
        pytest.param(
            Sweep("b", metric=LogitDifference(MANY, MANY)), ["a"], "has 2000 tokens for 1 prompts",
            id="tokens-of-the-metric",
        ),
    ],
)  # fmt: skip
def test_texts_that_are_too_many_are_refused_before_they_are_encoded(sweep, prompts, words):
    with pytest.raises(SpecError, match=words):
        Plan(sweep, prompts, SITES, Slow(), most_cells=1000)


def test_a_module_is_named_by_each_cell():
    p = plan(Sweep({"module": "m"}, metric=METRIC, mode="ablate", layers=[1], positions=[0, -1]))
    cells = [job for job in all_jobs(p) if job.place is not None]
    assert [job.actions[0].to_json() for job in cells[:2]] == [
        {"site": "resid_pre", "layers": (1,), "tokens": [at], "direction": {"module": "m"}}
        for at in (0, 3)
    ]  # fmt: skip
    together = plan(Sweep({"module": "m"}, metric=METRIC, mode="add", together=True))
    cells = [job for job in all_jobs(together) if job.place is not None]
    assert [len(job.actions) for job in cells] == [1] * 6
    for wrong in ({"mode": "patch"}, {"mode": "add", "site": "z", "heads": [0]}):
        with pytest.raises(
            SpecError, match="module 'm', whose vectors are whole rows to add or ablate"
        ):
            Sweep({"module": "m"}, metric=METRIC, **wrong)


def test_progress_is_a_bar_a_map_or_nothing(capsys):
    p = plan(Sweep(["xyz", "xy"], metric=METRIC))
    with showing(p, progress=False) as count:
        count()
    assert capsys.readouterr().err == ""
    with showing(p, progress=True) as count:
        count()
    assert "1/21" in capsys.readouterr().err
    with pytest.raises(SpecError, match="progress is 'maps'; it must be True, False or \"map\""):
        showing(p, "maps").__enter__()


@pytest.mark.skipif(importlib.util.find_spec("anywidget") is not None, reason="anywidget is there")
def test_a_map_without_anywidget_says_what_to_install():
    with pytest.raises(ConfigError, match="pip install 'vllm-scope"):
        showing(plan(Sweep(["xyz", "xy"], metric=METRIC)), "map").__enter__()


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("\ud800", r"prompts\[1\] is .*half of a surrogate pair"),
        ({"prompt_token_ids": "abc"}, r"prompts\[1\]\['prompt_token_ids'\] is 'abc'; it must be a"),
        ({"prompt_token_ids": [1, True]}, r"\[1, True\]; it must be a list of whole numbers"),
        (5, r"prompts\[1\] is 5; it must be a text or"),
    ],
)
def test_a_prompt_that_is_none_is_named(prompt, sentence):
    with pytest.raises(SpecError, match=sentence):
        as_prompts(["aa", prompt], Letters().encode, "prompts")


def test_texts_of_several_tokens_are_named_in_the_log_once(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(metrics.logger, "warning", lambda text, *args: said.append(text % args))
    metrics._warn.cache_clear()
    for _ in range(2):
        plan(Sweep(np.ones(8), metric=LogitDifference("ab", "c")))
        plan(Sweep(np.ones(8), metric=Logprob(["d", 3])))
    assert said == [
        "vllm-scope: LogitDifference.a has texts of several tokens, of which the metric takes the "
        "first: 'ab' (1, 2)."
    ]
    prompts = [chr(ord("a") + i) for i in range(5)]
    plan(Sweep(np.ones(8), metric=Logprob([one * 2 for one in prompts])), prompts)
    assert said[1].endswith("'aa' (1, 1), 'bb' (2, 2), 'cc' (3, 3), 2 more.")


def test_the_log_and_the_memory_of_warnings_have_the_first_tokens_of_a_long_text(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(metrics.logger, "warning", lambda text, *args: said.append(text % args))
    metrics._warn.cache_clear()
    texts = [chr(ord("a") + i) * (1 << 16) for i in range(5)]
    tracemalloc.start()
    try:
        LogitDifference(texts, 30).token_ids(partial(Letters().encode, add_special_tokens=False), 5)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 16
    assert "(1, 1, 1, 1, 1, 1, 1, 1, 65528 more), " in said[0]
    assert said[0].endswith(", 2 more.")
    assert len(said[0]) < 1000


def test_numbers_of_any_integer_type_are_token_ids():
    ids = [np.int64(3), 4, 4]
    assert as_prompts([{"prompt_token_ids": ids}], Letters().encode, "prompts") == [[3, 4, 4]]


@pytest.mark.parametrize(
    ("most", "num_bytes", "wanted"),
    [
        (64, [1 << 14] * 20, 16), (3, [1 << 14] * 20, 3), (0, [1 << 14] * 20, 1),
        (64, [1 << 19] * 3, 2), (64, [1 << 23] * 2, 1), (64, [1 << 14, 1 << 20], 1),
    ],
)  # fmt: skip
def test_one_request_stands_for_some_cells_of_a_part_of_the_batch(most, num_bytes, wanted):
    found = object.__new__(Sweeping)
    found._alike = object()
    found._connection = SimpleNamespace(always_answers=False)
    cells = [
        SimpleNamespace(place=(0, i), num_bytes=num, error=None, prompt=0)
        for i, num in enumerate(num_bytes)
    ]
    found._jobs = _Peekable(iter(cells))
    assert found._num_together(found._jobs.peek(), most) >= wanted
    assert list(found._first(found._num_together(cells[0], most))) == cells[:wanted]
    found._connection.always_answers = True
    assert found._num_together(cells[0], most) == 1


@pytest.mark.parametrize("place", [None, (0, 1)], ids=["prompt", "cell"])
def test_rows_for_which_there_is_no_room_end_a_cell_or_else_the_sweep(place):
    def rows(*_):
        raise CapacityError("no room.")

    found = object.__new__(Sweeping)
    found.plan = SimpleNamespace(
        token_ids=[(3,)], take=lambda job, found, rows, error: (job.place, error)
    )
    found._rows = rows
    job = SimpleNamespace(place=place, prompt=0, reads=True, name="prompts[0]")
    completion = SimpleNamespace(
        finish_reason="length", logprobs=[{3: SimpleNamespace(logprob=-1.0)}], scope=None
    )
    answer = SimpleNamespace(outputs=[completion])
    taken = found.take(SimpleNamespace(jobs=(job,), has_variants=False), answer)
    if place is None:
        with pytest.raises(CapacityError, match=r"^prompts\[0\]: no room"):
            list(taken)
    else:
        assert list(taken) == [(place, "no room.")]


def serving(together=True, most=64, beside=20, errors=()):
    """A Sweeping of 200 cells on an engine without requests.

    Args:
        together: one request may stand for several cells.
        errors: numbers of cells that cannot be.
    """
    found = object.__new__(Sweeping)
    found._alike, found._most, found._most_beside = object() if together else None, most, beside
    found._connection = SimpleNamespace(always_answers=False)
    found._processor = SimpleNamespace(request_states={})
    found._alone, found._yielding = False, Yielding(0.5)
    found._request = lambda jobs: SimpleNamespace(jobs=jobs)
    found.plan = SimpleNamespace(take=lambda job, found, rows, error: (job.place, error))
    cells = [
        SimpleNamespace(
            place=(0, i), num_bytes=1, error="bad" if i in errors else None, prompt=0, name="p"
        )
        for i in range(200)
    ]
    found._jobs = _Peekable(iter(cells))
    return found, found._processor.request_states


def sizes(due):
    return [len(one.jobs) for one in due]


@pytest.mark.parametrize(
    ("together", "alone", "beside"),
    [(True, [16] * 4, [16, 4]), (False, [1] * 64, [1] * 20)], ids=["together", "one-by-one"],
)  # fmt: skip
def test_a_sweep_has_fewer_cells_in_the_engine_while_others_have_requests(
    together, alone, beside, clock
):
    names = _names()
    found, states = serving(together)
    states |= {next(names): None, next(_names()): None}
    assert sizes(found.due(0, None)) == alone, "these are of sweeps"
    states["cmpl-1"] = None
    assert sizes(found.due(33, None)) == [], "they end first"
    assert sizes(found.due(0, None)) == beside
    found, states = serving(together)
    states["cmpl-2"], found._alone = None, True
    assert sizes(found.due(0, None)) == alone, "an LLM has no other requests"


def test_beside_others_a_sweep_pauses_when_its_cells_have_ended(clock):
    found, states = serving()
    states["cmpl-1"] = None
    assert found.pause == 0
    assert sizes(found.due(0, None)) == [16, 4]
    clock.now = 100.1
    assert sizes(found.due(0, None)) == []
    assert found.pause == pytest.approx(0.9)
    clock.now = 101.01
    assert sizes(found.due(0, None)) == [16, 4]


@pytest.mark.parametrize(
    ("together", "beside"), [(True, [4]), (False, [1] * 19)], ids=["together", "one-by-one"]
)
def test_a_request_that_comes_while_cells_are_sent_keeps_the_others_back(together, beside, clock):
    found, states = serving(together)
    due = found.due(0, None)
    next(due)
    states["cmpl-1"] = None
    assert sizes(due) == beside


def test_cells_that_cannot_be_are_told_at_once_and_no_pause_follows_the_last_one(clock):
    found, states = serving(errors={20, *range(48, 200)})
    states["cmpl-1"], told = None, []
    assert sizes(found.due(0, told.append)) == [16, 4]
    assert told == [((0, 20), "bad")], "the next one"
    clock.now = 100.1
    assert sizes(found.due(0, told.append)) == []
    clock.now = 101.1
    assert sizes(found.due(0, told.append)) == [16, 4]
    clock.now = 101.2
    assert sizes(found.due(0, told.append)) == []
    clock.now = 102.2
    assert sizes(found.due(0, told.append)) == [7]
    assert len(told) == 153
    assert found.over


@pytest.mark.parametrize(
    ("scheduler", "longest", "share", "most", "beside"),
    [
        ((1024, 16384), 24, 0.5, 341, 10), ((1024, 2048), 24, 0.5, 42, 10),
        ((1024, 2048), 24, 0.1, 8, 8), ((16, 2048), 24, 0.25, 4, 4),
        ((2048, 1 << 16), 10, 1.0, 2048, 16), ((1024, 16384), 300, 0.5, 27, 1),
    ],
)  # fmt: skip
def test_the_share_is_of_a_steps_sequences_and_tokens(scheduler, longest, share, most, beside):
    found, _ = serving()
    found.plan = SimpleNamespace(ids=[[1] * longest, [1] * 9], token_ids=[(1, 2)] * 2)
    names = "max_num_seqs", "max_num_batched_tokens"
    config = SimpleNamespace(**dict(zip(names, scheduler, strict=True)))
    found._config = SimpleNamespace(scheduler_config=config)
    found.take_share(share)
    assert (found._most, found._most_beside, found._yielding.share) == (most, beside, share)
    found._alone = True
    found.take_share(share)
    assert found._most == 2 * most


def test_a_sweep_hears_of_requests_of_other_front_ends_with_its_answers(clock):
    found, _ = serving()
    jobs = [SimpleNamespace(place=(0, i)) for i in range(2)]
    for others in (True, False):
        answers = Answers(np.zeros((2, 1), np.float32), {}, others)
        assert len(list(found._of_cells(jobs, Answers.decode(answers.encode())))) == 2
        assert sizes(found.due(0, None)) == ([16, 4] if others else [16] * 4)
        clock.now += 100


class Answering:
    """An engine whose requests end at once, or never."""

    def __init__(self, ends=True):
        self.ends = ends

    async def generate(self, prompt, params, name):
        await asyncio.sleep(0 if self.ends else 1000)
        yield name


def followed(found, engine, monkeypatch, seconds=5.0):
    """What `follow` told, and how long it slept each time while nothing ran."""
    told, slept, sleep = [], [], asyncio.sleep

    async def asleep(seconds):
        if seconds and seconds < 1000:
            slept.append(seconds)
            yielding.time.now += seconds
        await sleep(seconds if seconds >= 1000 else 0)

    def taken(request, output):
        return [job.place for job in request.jobs]

    found._request = lambda jobs: SimpleNamespace(
        jobs=jobs, prompt=None, params=None, prepared=None
    )
    found.take = taken
    monkeypatch.setattr(asyncio, "sleep", asleep)

    async def run():
        async with asyncio.timeout(seconds):
            await follow(engine, found, told.append)

    asyncio.run(run())
    return told, slept


def test_following_sleeps_in_a_pause_and_ends_without_one(clock, monkeypatch):
    found, states = serving(errors=range(40, 200))
    states["cmpl-1"] = None

    class Slow(Answering):
        async def generate(self, *args):
            clock.now += 0.05
            async for one in super().generate(*args):
                yield one

    told, slept = followed(found, Slow(), monkeypatch)
    assert len(told) == 200
    assert slept == [pytest.approx(9 * 0.1)], "two requests of 0.05 s, then 20 cells more"


def test_following_ends_its_requests_when_it_is_cancelled(clock, monkeypatch):
    found, _ = serving()
    before = heap.seldom._num
    with pytest.raises(TimeoutError):
        followed(found, Answering(ends=False), monkeypatch, seconds=0.05)
    assert heap.seldom._num == before


def test_a_cell_has_the_bytes_of_its_rows():
    p = plan(Sweep(["xyz", "xy"], metric=METRIC))
    sizes = {job.num_bytes for job in all_jobs(p) if job.place is not None}
    assert sizes == {4 * 8}


class Own(metrics.Metric):
    """A metric of a caller's own.

    Args:
        ids: what `token_ids` returns.
        made: what `value` returns, or raises.
    """

    def __init__(self, ids, made=1.0):
        self.ids, self.made = ids, made

    def token_ids(self, encode, num_prompts):
        return self.ids

    def value(self, found, clean):
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([(1, 2)], "a tuple for each of the 2 prompts"),
        (7, "a tuple for each of the 2 prompts"),
        ([1, 2], "has 1; each prompt must have a tuple"),
        ([("a",), (1,)], "each prompt must have a tuple"),
        ([(-1,), (1,)], "each prompt must have a tuple"),
        ([(True,), (1,)], "each prompt must have a tuple"),
        ([(1, 1), (1, 2)], "2 tokens for a prompt, 1 of them different"),
        ([tuple(range(129)), (1,)], "129 tokens for a prompt"),
    ],
    ids=["too-few", "no-list", "no-tuples", "texts", "negative", "bool", "twice", "too-many"],
)
def test_what_a_metric_of_ones_own_returns_for_tokens_is_checked(ids, said):
    with pytest.raises(SpecError, match=rf"^Own\.token_ids .*{said}"):
        plan(Sweep(np.ones(8), metric=Own(ids)))


@pytest.mark.parametrize("made", [RuntimeError("my bug"), "text", None])
def test_a_metric_of_ones_own_that_fails_is_named_with_the_prompt(made):
    p = plan(Sweep(np.ones(8), metric=Own([(1, 2), (1, 2)], made)))
    with pytest.raises(ScopeError, match=r"^Own\.value failed for a cell of prompts\[0\] \("):
        all_jobs(p)
    assert p.table.metric == "metric"


def test_one_source_for_all_prompts_is_named_as_one():
    with pytest.raises(SpecError, match=r"^Sweep\.source has 4 tokens and prompts\[1\] has 3"):
        plan(Sweep("xyz", metric=METRIC))


def test_tokens_of_ones_own_metric_are_numbers_of_any_integer_type():
    p = plan(Sweep(np.ones(8), metric=Own([(np.int64(3), 1), ()])))
    assert p.token_ids == [(3, 1), ()]
