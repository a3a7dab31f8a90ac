"""A step's rows, programs, slots and labels, from requests and a batch."""

from __future__ import annotations

import statistics
import time
import tracemalloc
import zlib

import numpy as np
import pytest

from tests.unit.planned import Engine, asked_rows, compile_actions, held
from vllm_scope import (
    Add,
    CapacityError,
    Except,
    Probe,
    Read,
    TokenIds,
    Union,
)
from vllm_scope.batch.labels import StepBatch


@pytest.mark.parametrize(
    ("tokens", "num_computed", "num_scheduled", "rows"),
    [
        pytest.param("all", 0, 10, list(range(10)), id="whole-prompt"),
        pytest.param([0, 9], 0, 10, [0, 9], id="two-of-the-prompt"),
        pytest.param([0, 9], 5, 5, [4], id="second-chunk"),
        pytest.param([0, 9], 9, 1, [0], id="last-chunk-of-one"),
        pytest.param([0, 9], 10, 1, [], id="decode-past-every-position"),
        pytest.param("last_prompt", 0, 9, [], id="chunk-before-the-last"),
        pytest.param("generated", 5, 5, [], id="prompt-when-generated-is-asked"),
        pytest.param("generated", 10, 1, [0], id="decode"),
        pytest.param("generated", 8, 6, [2, 3, 4, 5], id="recompute-across-the-prompt's-end"),
        pytest.param("last", 5, 5, [4], id="the-prompt's-end-may-be-the-last"),
        pytest.param("last", 12, 1, [0], id="any-generated-token-may-be-the-last"),
        pytest.param(TokenIds(7), 8, 4, [2, 3], id="ids-of-generated-tokens-are-not-known"),
        pytest.param(Except("all", slice(0, 10, 2)), 0, 10, [1, 3, 5, 7, 9], id="every-other"),
    ],
)
def test_asked_positions_become_rows(tokens, num_computed, num_scheduled, rows):
    engine = Engine()
    engine.add("a", Read("embed", tokens=tokens), num_prompt=10)
    plan, failures = engine.step(a=(num_computed, num_scheduled))
    assert failures == []
    assert (asked_rows(plan) if plan else {}) == dict.fromkeys(rows, (0,))
    if plan:
        assert plan.labels.positions.tolist() == [num_computed + row for row in rows]
        assert plan.offsets.tolist() == list(range(len(rows)))


@pytest.mark.parametrize(
    ("tokens", "read"),
    [
        pytest.param([12], True, id="one-position"),
        pytest.param("last", True, id="last"),
        pytest.param(Except("all", [12]), True, id="all-but-one-position"),
        pytest.param("generated", True, id="generated"),
        pytest.param("prompt", False, id="prompt"),
    ],
)
def test_where_positions_are_guessed_a_generated_token_is_read_if_it_may_beasked_rows(tokens, read):
    engine = Engine()
    engine.add("a", Read("embed", tokens=tokens), num_prompt=10)
    plan, failures = engine.step(optimistic=True, a=(14, 3))
    assert failures == []
    assert (asked_rows(plan) if plan else {}) == dict.fromkeys(range(3) if read else (), (0,))


def test_decode_and_prefill_rows_are_planned_in_the_order_of_the_batch():
    engine = Engine()
    for name, tokens in (("column", "all"), ("run", [0, 2]), ("late", "generated")):
        engine.add(name, Read("embed", tokens=tokens))
    for names in (["column", "run", "late"], ["run", "late", "column"], ["late", "column", "run"]):
        at = {"column": (6, 1), "run": (0, 4), "late": (5, 2)}
        plan, _ = engine.step(**{name: at[name] for name in names})
        first = dict(zip(names, np.cumsum([0, *(at[n][1] for n in names)]).tolist(), strict=False))
        assert plan.labels.rows.tolist() == sorted(
            [first["column"], first["run"], first["run"] + 2, first["late"], first["late"] + 1]
        )
        keys = dict(zip(plan.labels.rows.tolist(), plan.labels.keys.tolist(), strict=True))
        assert all(keys[first[name]] == zlib.crc32(name.encode()) for name in names)


#: One decode step after another: (positions and counts by request, finished before it).
_STEPS = {
    "one-on": [({"a": (6, 1), "b": (9, 1)}, ""), ({"a": (7, 1), "b": (10, 1)}, "")],
    "three-on": [({"a": (p, 1), "plain": (p + 2, 1), "b": (p, 1)}, "") for p in (6, 7, 8, 9)],
    "beside-a-chunked-prompt": [({"a": (p, 1), "plain": (4 * p, 4)}, "") for p in (6, 7, 8)],
    "several-tokens-a-step": [({"a": (6, 2), "b": (9, 2)}, ""), ({"a": (8, 2), "b": (11, 2)}, "")],
    "computed-again": [({"a": (6, 1), "b": (9, 1)}, ""), ({"a": (6, 1), "b": (9, 1)}, "")],
    "one-waits": [({"a": (6, 1), "b": (9, 1)}, ""), ({"b": (10, 1)}, "")],
    "the-other-way-round": [({"a": (6, 1), "b": (6, 1)}, ""), ({"b": (7, 1), "a": (7, 1)}, "")],
    "another-joins": [({"a": (6, 1)}, ""), ({"a": (7, 1), "b": (6, 1)}, "")],
    "one-of-them-no-longer-reads": [
        ({"a": (6, 1), "b": (9, 1)}, ""), ({"a": (7, 1), "b": (10, 1)}, "a"),
        ({"a": (8, 1), "b": (11, 1)}, ""),
    ],
    "the-same-names-now-in-the-prompt": [({"a": (6, 1)}, ""), ({"a": (0, 1)}, "")],
}  # fmt: skip


@pytest.mark.parametrize("steps", _STEPS.values(), ids=list(_STEPS))
def test_the_plan_of_a_step_does_not_depend_on_the_step_before(steps):
    engine, finished = Engine(), set()
    reads = {
        "a": Read("resid_pre", layers=[1]),
        "b": Read("resid_pre", layers=[2, 3], tokens="generated"),
    }
    for name, read in reads.items():
        engine.add(name, read)
    for at, done in steps:
        anew = Engine()
        finished.update(done)
        for name in reads:
            if name in finished:
                engine.planner.finish_request(name)
            else:
                anew.add(name, reads[name])
        plan, fresh = engine.step(**at)[0], anew.step(**at)[0]
        assert asked_rows(plan) == asked_rows(fresh)
        assert plan.labels.positions.tolist() == fresh.labels.positions.tolist()
        assert plan.labels.keys.tolist() == fresh.labels.keys.tolist()
        assert plan.offsets.tolist() == fresh.offsets.tolist()
        assert plan.num_slots == fresh.num_slots


def test_a_token_of_two_reads_gets_both_and_each_row_once():
    engine = Engine()
    engine.add(
        "a",
        Read("resid_post", layers=[0, 1], tokens="last_prompt"),
        Read("resid_pre", layers=[1, 2], tokens=Union("last_prompt", [0])),
    )
    plan, _ = engine.step(a=(0, 4))
    assert asked_rows(plan) == {0: (2, 4), 3: (2, 4)}
    assert plan.num_slots == 4


def test_a_request_whose_layers_are_all_on_another_stage_takes_no_row():
    engine = Engine()
    program = compile_actions(Read("resid_post", layers=[9]), here=(0, 2, 4))
    engine.planner.add_request("a", 1, program, held(program, 64))
    assert engine.step(a=(0, 4)) == (None, [])
    assert engine.step(a=(4, 1)) == (None, [])
    assert engine.planner.finish_request("a") == 1


class _Untouchable(list):
    def __iter__(self):
        raise AssertionError("a request was looked at")

    __len__ = __getitem__ = __iter__


def test_without_reading_requests_a_step_looks_at_no_request():
    engine = Engine()
    engine.add("a", Read("embed"))
    engine.planner.finish_request("a")
    uploads = engine.tables.num_uploads
    batch = StepBatch(_Untouchable(), np.array([0, 1]), np.array([0]))
    assert engine.planner.begin_step(batch) == (None, [])
    assert engine.planner.num_requests_planned == 0
    assert engine.tables.num_uploads == uploads


def test_plain_requests_in_the_batch_are_not_planned():
    engine = Engine()
    engine.add("a", Read("embed", tokens="generated"))
    uploads = engine.tables.num_uploads
    assert engine.step(b=(0, 5), c=(9, 1)) == (None, [])
    assert engine.planner.num_requests_planned == 0
    plan, _ = engine.step(b=(0, 5), a=(7, 1), c=(9, 1))
    assert plan.labels.rows.tolist() == [5]
    assert engine.planner.num_requests_planned == 1
    assert engine.tables.num_uploads == uploads


@pytest.mark.parametrize("b_does", [(2, 2), (5, 1)], ids=["prefill", "decode"])
@pytest.mark.parametrize("tokens", ["all", [0]], ids=["all", "one-position"])
def test_a_request_without_a_row_in_the_batch_leaves_its_neighbour_alone(tokens, b_does):
    engine = Engine()
    engine.add("a", Read("embed", tokens=tokens))
    engine.add("b", Read("embed"))
    plan, failures = engine.step(a=(5, 0), b=b_does)
    assert failures == []
    assert plan.labels.rows.tolist() == list(range(b_does[1]))
    assert set(plan.labels.keys.tolist()) == {zlib.crc32(b"b")}
    assert engine.step(a=(5, 0)) == (None, [])


def _nth(n: int) -> Read:
    """One of 4095 reads at different layers."""
    return Read("resid_pre", layers=[layer for layer in range(12) if n >> layer & 1])


def test_more_programs_than_ids_work_one_after_another():
    engine = Engine(num_programs=100)
    for n in range(1, 400):  # 798 programs: each request has one for its prompt too
        name = f"r{n}"
        engine.add(name, _nth(n), Read("resid_post", layers=[11], tokens=[0]))
        plan, failures = engine.step(**{name: (0, 2)})
        assert failures == []
        boundaries = tuple(2 * layer for layer in _nth(n).layers)
        assert asked_rows(plan) == {0: (*boundaries, 24), 1: boundaries}
        engine.tables.load_step(plan.rows, plan.program_ids, plan.owners, plan.offsets)
        for found, asked in zip(plan.program_ids, asked_rows(plan).values(), strict=True):
            on_device = (engine.tables.programs[int(found)] >= 0).nonzero().flatten()
            assert tuple(2 * on_device) == asked
        engine.planner.finish_request(name)


def test_a_finished_request_gives_its_program_back():
    engine = Engine(num_programs=2)
    for n in range(1, 50):
        engine.add("a", _nth(n))
        engine.add("b", _nth(n + 50))
        with pytest.raises(CapacityError, match="all tap programs are in use"):
            engine.add("c", _nth(n + 100))
        assert "c" not in engine.planner
        assert len(engine.planner) == 2
        plan, failures = engine.step(a=(4, 1), b=(6, 1), c=(5, 1))
        assert failures == []
        assert asked_rows(plan) == {
            row: tuple(2 * layer for layer in _nth(m).layers) for row, m in ((0, n), (1, n + 50))
        }
        assert engine.planner.finish_request("a") == zlib.crc32(b"a")
        assert engine.planner.finish_request("b") == zlib.crc32(b"b")
        assert engine.planner.finish_request("c") is None


def test_finished_requests_leave_nothing_behind():
    engine = Engine()
    program = compile_actions(Read("embed"), Add([1.0, 2.0, 0.0, -1.0], layer=0), num_prompt=1)
    for i in range(8_000):
        if i == 3_000:  # Python's own lists of freed objects are full by now
            tracemalloc.start()
        engine.planner.add_request(f"r{i}", i, program, held(program, 9))
        engine.planner.finish_request(f"r{i}")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 50_000


def test_a_request_without_room_for_its_programs_fails_alone():
    engine = Engine(num_programs=2)
    for n, name in enumerate("abc", start=1):
        engine.add(name, Read("resid_pre", layers=[n], tokens=[0, 1, 2, 3]))
    plan, failures = engine.step(a=(0, 4), b=(2, 2), c=(0, 4))
    ((name, error),) = failures
    assert name == "c"
    assert isinstance(error, CapacityError)
    assert asked_rows(plan) == dict.fromkeys(range(4), (2,)) | dict.fromkeys((4, 5), (4,))
    plan, failures = engine.step(c=(0, 4))
    assert failures == []
    assert asked_rows(plan) == dict.fromkeys(range(4), (6,))
    # Also if requests before it have no taps, or no token in this step.
    engine.add("d", Read("resid_pre", layers=[4], tokens=[0, 1, 2, 3]))
    _, failures = engine.step(plain=(0, 3), d=(0, 0), a=(0, 4), b=(2, 2), c=(0, 4))
    assert [name for name, _ in failures] == ["c"]


# Speed


@pytest.mark.parametrize(
    ("tokens", "most_ms"),
    [
        pytest.param("all", 5, id="every-token"),
        pytest.param(Union("prompt", "last"), 50, id="single-tokens"),
    ],
)
def test_256_decoding_requests_are_planned_in_little_time(tokens, most_ms, capsys):
    engine = Engine()
    names = [f"r{i}" for i in range(256)]
    for i, name in enumerate(names):
        engine.add(name, Read("resid_post", layers=[i % 12], tokens=tokens))
    took = []
    for step in range(30):
        start = time.perf_counter()
        plan, failures = engine.step(**dict.fromkeys(names, (4 + step, 1)))
        took.append((time.perf_counter() - start) * 1e3)
        assert failures == []
        assert plan.num_slots == 256
    with capsys.disabled():
        print(f"\n  plan of 256 decoding requests, {tokens}: {statistics.median(took):.2f} ms")
    assert statistics.median(took) < most_ms


def probes(count: int, **fields: str) -> list[Probe]:
    weight = [1.0, 2.0, 0.0, 1.0]
    return [Probe(weight, layer=1, name=f"{i}", **fields) for i in range(count)]


@pytest.mark.parametrize("count", [1, 5], ids=["scored", "on-rows"])
def test_prompts_whose_tokens_are_all_probed_cost_no_python_per_request(count, monkeypatch):
    engine = Engine()
    for name in "abc":
        engine.add(name, *probes(count), num_prompt=10)
    by_request = [engine.step(**{name: (0, 10)})[0] for name in "abc"]
    monkeypatch.setattr(engine.planner, "_ids", lambda *_: pytest.fail("it looked at a request"))
    plan, failures = engine.step(a=(0, 10), b=(4, 6), c=(9, 2))
    assert not failures
    assert plan.rows.tolist() == list(range(18))
    assert plan.labels.positions.tolist() == [*range(10), *range(4, 10), 9, 10]
    assert set(plan.program_ids) == set(by_request[0].program_ids)
    assert plan.labels.layouts == by_request[0].labels.layouts


@pytest.mark.parametrize("count", [1, 5], ids=["scored", "on-rows"])
def test_prompts_of_which_no_token_is_probed_have_no_rows_before_they_generate(count):
    engine = Engine()
    engine.add("a", *probes(count, tokens="generated"), num_prompt=10)
    assert engine.step(a=(0, 10))[0] is None
    assert engine.step(a=(9, 3))[0].rows.tolist() == [1, 2]
