"""Every asked row and score of every request, once, whatever the batches look like.

The worker's own steps run here (engine.worker.ScopeWorker and its steps with plan, tables, arena
and drain), with a stream whose values say whose they are in place of a model.
"""

from __future__ import annotations

import dataclasses
import random
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.oracle import named_point
from tests.unit.planned import held
from tests.unit.stepping import (
    EVERYWHERE,
    MAX_ROWS,
    NUM_LAYERS,
    SITES,
    Due,
    Label,
    Request,
    Sent,
    Step,
    add,
    draw_step,
    news_of,
    run_taps,
    running_worker,
    worker_tables,
)
from tests.unit.strategies import VOCAB, is_selected, specs
from vllm_scope import Add, CapacityError, Probe, Read, Spec
from vllm_scope.batch.labels import StepBatch
from vllm_scope.engine.worker.delivery import NOBODY
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.graph.tap.definition import SINCE, STEPS, STRIDE, TO_HOST
from vllm_scope.request.sites import LEVELS, boundary_of_point
from vllm_scope.request.ticket import Recipient
from vllm_scope.sinks import RequestInfo
from vllm_scope.worker.plan import Planner

#: Selectors of phases alone, whose decode rows are planned as columns.
_PHASES = st.sampled_from(["all", "generated", "prompt"])
_LAYERS = st.lists(st.integers(0, NUM_LAYERS - 1), min_size=1)
_UNIFORM = st.lists(
    st.builds(Read, st.sampled_from(["resid_post", "resid_pre"]), layers=_LAYERS, tokens=_PHASES),
    min_size=1,
    max_size=2,
).map(lambda found: Spec(tuple(found)))
#: Edits alone, which need no slots.
_EDITING = st.builds(
    lambda layers, tokens: Spec(edits=(Add([1.0, 2.0, 0.0, -1.0], layer=layers, tokens=tokens),)),
    _LAYERS,
    _PHASES,
)


@st.composite
def schedules(draw):
    """Requests, whether they are decoded speculatively, and a seed.

    With speculation they only read; edits have a test of their own.
    """
    requests = []
    speculates = draw(st.booleans())
    some = _UNIFORM | specs(NUM_LAYERS, only_reads=True)
    if not speculates:
        some = st.one_of(some, _EDITING, specs(NUM_LAYERS))
    for i in range(draw(st.integers(1, 5))):
        num_prompt, num_generated = draw(st.integers(1, 14)), draw(st.integers(1, 9))
        ids = st.lists(st.integers(0, VOCAB - 1), min_size=23, max_size=23)
        requests.append(
            Request(
                f"request-{i}",
                None if draw(st.integers(0, 3)) == 0 else 100 + i,
                draw(some),
                num_prompt,
                draw(ids)[: num_prompt + num_generated],
            )
        )
    return requests, speculates, draw(st.integers(0, 1 << 30))


@given(
    schedules(),
    # Room for one tap of the largest step: three points and a bank; or for more.
    st.sampled_from([4 * MAX_ROWS, 60, 600]),
    st.sampled_from([EVERYWHERE, (0, 1, 2), (3, 4), (4,), ()]),
)
def test_every_asked_row_comes_once_for_each_time_it_is_computed(schedule, num_slots, here):
    requests, speculates, seed = schedule
    rng = random.Random(seed)
    #: What must come: label -> what each step that computed it gives; and what may come.
    due: dict[Label, list[Due]] = {}
    may: set[tuple[int, int]] = set()
    twin = Planner(worker_tables())
    with running_worker(here, num_slots) as (worker, sink):
        step = None
        for number in range(1_000):
            step = draw_step(rng, requests, speculates, step)
            if step is None:
                break
            new = [r for r, *_ in step.parts if r.req_id not in worker._planner]
            add(worker, *(r.sent() for r in new))
            for request in new:
                if request.key is not None:
                    most = len(request.ids)
                    program = request.program(here)
                    twin.add_request(request.req_id, request.key, program, held(program, most))
            positions = torch.tensor([p for _, p in step.rows()])
            planned = worker.steps.num_planned
            if worker.has_requests():
                worker.steps.begin(step.batch(), positions)
            else:
                worker.steps.clear()
            _assert_same_plan(worker.steps._step, twin.begin_step(step.batch()))
            asking = [r for r, *_ in step.parts if r.key is not None]
            assert worker.steps.num_planned <= planned + bool(asking)
            run_taps(worker, step, number, rng)
            worker.steps.end()
            for request, first, count in step.parts:
                request.num_computed = first + count
                if request.num_computed >= request.num_prompt:
                    sampled = request.num_computed + 1 - request.num_prompt
                    request.num_sampled = max(request.num_sampled, sampled)
                if request.key is None:
                    continue
                for position in range(first, first + count):
                    for label, values in request.due(position, number, here).items():
                        due.setdefault(label, []).append(values)
                    if speculates:
                        may.add((request.key, position))
            ended = [r.req_id for r, *_ in step.parts if not r.running]
            worker.finish_requests(ended)
            for req_id in ended:
                twin.finish_request(req_id)
        assert not any(r.running for r in requests)
        assert len(worker._planner) == 0

    for label, expected in due.items():
        for found, (values, slack) in zip(sink.found[label], expected, strict=True):
            assert (np.abs(np.array(found) - values) <= slack).all(), (label, found, values)
    for label, rows in sink.found.items():
        if label in due:
            continue
        key, kind, point, position = label
        same_token = [(k, p) for owner, k, p, at in due if (owner, at) == (key, position)]
        if any(p == point for _, p in same_token):
            # Two actions read the same row under different names. The row then has both names for
            # both actions, and a receiver ignores the names that it did not ask for.
            row = boundary_of_point(point)
            assert any(k == kind and boundary_of_point(p) == row for k, p in same_token)
            continue
        assert kind == "row"
        assert (key, position) in may, f"nobody asked for {label}"
        for row in rows:
            assert row[:3] == [key, position, boundary_of_point(point)]
        assert len({row[3] for row in rows}) == len(rows), "a row came twice for one step"
    keys = [r.key for r in requests if r.key is not None]
    assert sorted(sink.finished) == [(key, None) for key in keys]
    for request in requests:
        if request.key is not None:
            _assert_covers(request, here, due)


def _assert_covers(request: Request, here: tuple[int, ...], due: dict[Label, list]) -> None:
    """What turns out to be asked for, once everything is known, is among what was due."""
    asked, key = request.asked, request.key
    reads = [(r.tokens, "row", s, r.when) for r in asked.reads for s in r.streams]
    cells = [(p.tokens, c.bank.text, c.place, "after") for p in asked.probes for c in p.cells]
    for tokens, kind, stream, when in (*reads, *cells):
        if stream.boundary not in here:
            continue
        point = named_point(SITES, stream, when)
        assert point // LEVELS == stream.boundary
        for position in range(request.num_processed):
            if is_selected(
                tokens.to_json(), position, request.num_prompt, request.ids[position],
                request.num_processed,
            ):  # fmt: skip
                assert (key, kind, point, position) in due


def _assert_same_plan(one, found) -> None:
    """Tensor-parallel ranks plan alike without a message."""
    other, failures = found
    assert failures == []
    assert (one is None) == (other is None)
    if one is not None:
        for a, b in (
            (one.rows, other.rows),
            (one.program_ids, other.program_ids),
            (one.offsets, other.offsets),
            (one.delivers, other.delivers),
            (one.labels.rows, other.labels.rows),
            (one.labels.positions, other.labels.positions),
            (one.labels.layout_of, other.labels.layout_of),
        ):
            assert a.tolist() == b.tolist()
        assert one.num_slots == other.num_slots
        assert one.labels.layouts == other.labels.layouts


# What goes wrong


def test_a_request_that_cannot_be_planned_is_answered_and_the_others_are_served():
    with running_worker(EVERYWHERE, 100, num_programs=1) as (worker, sink):
        requests = [
            Request(
                f"r{i}", 10 + i, Spec((Read("resid_post", layers=[i], tokens=[0]),)), 2, [1] * 3
            )
            for i in range(2)
        ]
        add(worker, *(r.sent() for r in requests))
        step = Step([(r, 0, 2) for r in requests], [0, 0])
        positions = torch.tensor([0, 1, 0, 1])  # read during the forward
        worker.steps.begin(step.batch(), positions)
        run_taps(worker, step, 5, random.Random(0))
        worker.steps.end()
        worker.finish_requests(["r0", "r1"])
    assert sink.found == {(10, "row", 2 * LEVELS + 1, 0): [[10, 0, 2, 5]]}
    assert [key for key, _ in sink.finished] == [11, 10]
    assert "tap programs are in use" in sink.finished[0][1]
    assert sink.finished[1][1] is None


def test_server_edits_reach_plain_requests_and_deliver_nothing():
    with running_worker(EVERYWHERE, 100) as (worker, sink):
        edits = Spec(edits=(Add([1.0, 0, 0, 0], layer=0),))
        request = Request("a", 0, edits, 2, [1] * 3)
        sent = request.sent()
        sent.recipient = None
        add(worker, sent)
        step = Step([(request, 0, 2)], [0])
        positions = torch.tensor([0, 1])  # read during the forward
        worker.steps.begin(step.batch(), positions)
        run_taps(worker, step, 5, random.Random(0))
        worker.steps.end()
        worker.finish_requests(["a"])
    assert sink.found == {}
    assert sink.finished == []


def test_a_request_that_awaits_nothing_is_edited_and_tells_nothing():
    with running_worker(EVERYWHERE, 100) as (worker, sink):
        edits = Spec(edits=(Add([1.0, 0, 0, 0], layer=0),))
        request, other = (Request(name, i, edits, 2, [1] * 3) for i, name in enumerate("ab"))
        sent = request.sent()
        sent.recipient = Recipient(0, "f", awaits=False)
        add(worker, sent, other.sent())
        step = Step([(request, 0, 2), (other, 0, 2)], [0, 0])
        positions = torch.tensor([0, 1, 0, 1])  # read during the forward
        worker.steps.begin(step.batch(), positions)
        assert worker.steps._step.rows.tolist() == [0, 1, 2, 3]
        assert (worker.steps._step.owners > 0).all()  # its faults are told
        worker.steps.end()
        worker.finish_requests(["a", "b"])
    assert sink.finished == [(1, None)]


@pytest.mark.parametrize("awaits", [True, False])
def test_a_global_sink_gets_a_requests_names_whether_its_caller_awaits_rows_or_not(awaits):
    reads = Spec((Read("resid_post", layer=0),)).resolve(SITES).reads
    everywhere = tuple(dataclasses.replace(read, to="global:log") for read in reads)
    with running_worker(EVERYWHERE, 100) as (worker, sink):
        infos: list[RequestInfo] = []
        worker._delivery.router = SimpleNamespace(add_request=lambda info, _: infos.append(info))
        for child in (0, 1):
            edits = Spec(edits=(Add([1.0, 0, 0, 0], layer=0),))
            sent = Request(f"{child}_a", 10 + child, edits, 2, [1] * 3).sent()
            sent.asked = sent.asked.joined(reads=everywhere)
            sent.recipient = Recipient(10 + child, "f", "a", "uid", child, awaits=awaits)
            add(worker, sent)
        worker.finish_requests(["0_a", "1_a"])
    named = [(info.request_id, info.uid, info.child) for info in infos]
    assert named == [("a", "uid", 0), ("a", "uid", 1)]
    assert [info.key for info in infos] == ([10, 11] if awaits else [NOBODY - 1, NOBODY - 2])
    assert [key for key, _ in sink.finished] == [info.key for info in infos]


def test_edits_alone_upload_once_while_the_batch_stays_the_same():
    with running_worker(EVERYWHERE, 100) as (worker, _):
        request = Request("a", 10, Spec(edits=(Add([1.0, 0, 0, 0], layer=0),)), 2, [1] * 20)
        add(worker, request.sent())
        uploads = []
        for position in range(2, 8):
            step = Step([(request, position, 1)], [0])
            positions = torch.tensor([position])  # read during the forward
            worker.steps.begin(step.batch(), positions)
            run_taps(worker, step, position, random.Random(0))
            worker.steps.end()
            uploads.append(worker._tables.num_uploads)
        assert len(set(uploads[1:])) == 1
        worker.steps.clear()  # a dummy forward comes between
        positions = torch.tensor([8])  # read during the forward
        worker.steps.begin(Step([(request, 8, 1)], [0]).batch(), positions)
        assert worker._tables.num_uploads == uploads[-1] + 1


@pytest.mark.parametrize("num_slots", [50, 21])
def test_reads_upload_once_while_the_batch_stays_the_same_and_the_ring_does_not_begin_anew(
    num_slots,
):
    count = 30
    requests = [Request(f"r{i}", 10 + i, Spec((Read("embed"),)), 2, [1] * 40) for i in range(3)]
    with running_worker(EVERYWHERE, num_slots) as (worker, sink):
        add(worker, *(request.sent() for request in requests))
        firsts, uploads = [], []
        for number in range(count):
            step = Step([(r, 2 + 5 * i + number, 1) for i, r in enumerate(requests)], [0] * 3)
            positions = torch.tensor([p for _, p in step.rows()])
            worker.steps.begin(step.batch(), positions)
            firsts.append(worker.steps._region.start)
            run_taps(worker, step, number, random.Random(0))
            worker.steps.end()
            uploads.append(worker._tables.num_uploads)
        worker.finish_requests([request.req_id for request in requests])
    began_anew = [later < earlier for earlier, later in pairwise(firsts)]
    assert any(began_anew)
    assert [later - earlier for earlier, later in pairwise(uploads)] == began_anew
    found = [row for rows in sink.found.values() for row in rows]
    expected = [
        [request.key, 2 + 5 * i + number, 0, number]
        for i, request in enumerate(requests)
        for number in range(count)
    ]
    assert sorted(found) == sorted(expected)


def test_steps_whose_positions_taps_cannot_read_are_uploaded_each_time():
    request = Request("r", 10, Spec((Read("embed"),)), 2, [1] * 40)
    with running_worker(EVERYWHERE, 100) as (worker, sink):
        add(worker, request.sent())
        uploads = []
        for number in range(5):
            step = Step([(request, 2 + number, 1)], [0])
            worker.steps.begin(step.batch(), torch.tensor([99], dtype=torch.int32))
            run_taps(worker, step, number, random.Random(0))
            worker.steps.end()
            uploads.append(worker._tables.num_uploads)
        worker.finish_requests(["r"])
    assert [later - earlier for earlier, later in pairwise(uploads)] == [1] * 4
    rows = sorted(row for rows in sink.found.values() for row in rows)
    assert rows == [[10, 2 + number, 0, number] for number in range(5)]


def test_prompts_are_not_said_to_repeat_and_steps_into_the_ring_are(monkeypatch):
    request = Request("r", 10, Spec((Read("embed"),)), 4, [1] * 40)
    positions = torch.arange(4)
    with running_worker(EVERYWHERE, 100) as (worker, _):
        add(worker, request.sent())
        steps, tables = worker.steps, worker._tables
        steps.begin(Step([(request, 0, 4)], [0]).batch(), positions)
        assert tables.tokens[:4, STRIDE].tolist() == [0] * 4
        steps.fail()

        def take(plan) -> int:  # as on a GPU
            steps._lease = steps._delivery.ring.acquire(plan.num_slots)
            return steps._lease.start

        monkeypatch.setattr(steps, "_take_room", take)
        uploads = []
        for position in (4, 5, 6):
            positions[0] = position
            steps.begin(Step([(request, position, 1)], [0]).batch(), positions)
            uploads.append(tables.num_uploads)
            steps.fail()
        assert uploads[0] == uploads[2]
        ring = steps._delivery.ring.num_slots
        assert tables.tokens[0, [TO_HOST, SINCE, STRIDE, STEPS]].tolist() == [1, 4, 1, ring - 1]
        worker.finish_requests(["r"])


def _edited() -> Sent:
    """A request that reads and edits."""
    spec = Spec((Read("embed"),), edits=(Add([1.0, 2.0, 0.0, -1.0], layer=0),))
    return Request("r", 7, spec, 2, [1, 2, 3]).sent()


def test_a_request_whose_front_end_is_gone_keeps_its_edits(monkeypatch):
    with running_worker(EVERYWHERE, 64) as (worker, sink):

        def expect(recipient):
            raise CapacityError("the front-end is not connected")

        monkeypatch.setattr(worker._delivery, "expect", expect)
        add(worker, _edited())
        assert "r" in worker._planner
        worker.steps.begin(StepBatch(["r"], np.array([0, 2]), np.array([0])), torch.zeros(2))
        # As on a rank that delivers nothing: edited, and not read.
        assert worker.steps._step.num_slots == 0
        assert worker.steps._step.rows.tolist() == [0, 1]
        worker.steps.end()
        worker.finish_requests(["r"])
    assert sink.finished == []


@pytest.mark.parametrize("refused_by", ["expect", "add_request"])
def test_a_request_that_cannot_be_watched_is_ended_if_a_probe_can_stop_it(refused_by, monkeypatch):
    guard = Probe(np.ones(4), name="guard", layer=0, threshold=1.0, action="stop")

    def refuse(*args):
        raise CapacityError("no front-end")

    with running_worker(EVERYWHERE, 64) as (worker, _):
        monkeypatch.setattr(worker._delivery, refused_by, refuse)
        for name, probe in ("stops", guard), ("flags", dataclasses.replace(guard, action="flag")):
            sent = Request(name, 7, Spec(probes=(probe,)), 2, [1, 2, 3]).sent()
            sent.req_id = name
            add(worker, sent)
        told = worker.with_endings(SimpleNamespace(sampled_token_ids=[[1]]))
        assert told.scope_faults == {"stops": "no front-end"}


@pytest.mark.parametrize("here", [(0, 1, 2), (3, 4)], ids=["the probe's", "the edit's"])
@pytest.mark.parametrize("cached", [(), (b"a",)], ids=["computed", "cached"])
def test_a_stage_without_the_probe_of_an_edited_request_keeps_no_scores(here, cached):
    probe = Probe(np.ones(4), name="p", layer=0)
    asked = Spec(probes=(probe,), edits=(Add([1.0, 2, 0, -1], layer=1),)).resolve(SITES)
    with running_worker(here, 64) as (worker, sink):
        worker.stage, worker.num_stages = int(here[-1] == 4), 2
        worker._begin_steps()
        sent = Sent("r", [1] * 20, 4, Recipient(7, "f"), asked)
        news = news_of(worker, sent)
        of_scores = {"scores": asked.scores_alone, "cached": cached, "block_size": 16}
        news.entrants["r"] = replace(news.entrants["r"], **of_scores)
        worker.add_requests([sent], news)
        assert "r" in worker._planner
        told = worker.with_endings(SimpleNamespace(sampled_token_ids=[[1]]))
        assert not hasattr(told, "scope_faults")
        worker.finish_requests(["r"])
    assert sink.finished == [(7, None)]


def test_a_small_step_that_does_not_fit_the_arena_is_drained_tap_by_tap(monkeypatch):
    """Its rows would fit the size of those that taps write to the host by themselves."""
    with running_worker(EVERYWHERE, 8) as (worker, _):
        steps = worker.steps
        monkeypatch.setattr(steps, "_arena", SimpleNamespace(
            slots=SimpleNamespace(is_cuda=True), num_slots=8
        ))  # fmt: skip
        labels = SimpleNamespace(encodes=False)
        for num_slots, direct in (8, True), (9, False):
            plan = SimpleNamespace(num_slots=num_slots, num_delivered=num_slots, labels=labels)
            assert (steps._take_room(plan) is not None) == direct
            if direct:
                steps._lease.release()
                steps._lease = None


def test_the_drain_thread_does_not_rest_once_no_request_runs(monkeypatch):
    for name, value in {"REST": 1e12, "MOST_REST_S": 1e3, "MOST_OWED_S": 0.0}.items():
        monkeypatch.setattr(f"vllm_scope.worker.pace.{name}", value)
    with running_worker(EVERYWHERE, 64) as (worker, sink):
        for key in (7, 8, 9):
            add(worker, Request("r", key, Spec((Read("embed"),)), 2, [1, 2, 3]).sent())
            worker.finish_requests(["r"])
            limit = time.monotonic() + 20
            while (key, None) not in sink.finished and time.monotonic() < limit:
                time.sleep(0.001)
            assert (key, None) in sink.finished


def test_a_fault_in_one_request_fails_that_one_alone():
    with running_worker(EVERYWHERE, 64) as (worker, sink):
        bad, good = _edited(), _edited()
        bad.prompt_token_ids, bad.req_id = None, "bad"
        add(worker, bad, good)
        assert "bad" not in worker._planner
        assert "r" in worker._planner
        worker.close()
    ((key, error),) = sink.finished
    assert key == 7
    assert error == "vllm-scope failed on this request (TypeError); the log says why."


def test_a_request_that_may_deliver_more_than_was_checked_is_checked_again():
    reads = Spec((Read("resid_post", layer=0), Read("resid_post", layer=0, when="before")))
    request = Request("r", 7, reads, 2, [1, 2, 3]).sent()
    server = Spec(edits=(Add([1.0, 2.0, 0.0, -1.0], layer=0),)).resolve(SITES)
    with running_worker(EVERYWHERE, 64) as (worker, sink):
        worker.limits = replace(worker.limits, tap_slots=1)
        add(worker, request)
        worker.finish_requests(["r"])
        request.asked, request.unchecked = request.asked.joined(edits=server.edits), True
        add(worker, request)
        assert "r" in worker._planner
        worker.close()
    assert [error is None for _, error in sink.finished] == [True, False]
    assert "with the server's edits" in sink.finished[1][1]


def test_requests_of_one_spec_are_checked_again_once(monkeypatch):
    checked = []
    monkeypatch.setattr(Limits, "check", lambda self, layouts: checked.append(layouts))
    reads = Spec((Read("resid_post", layer=0),))
    first = Request("a", 7, reads, 2, [1, 2, 3]).sent()
    second, other = (Request(r, key, reads, 2, [1, 2]).sent() for r, key in (("b", 8), ("c", 9)))
    second.asked = first.asked
    with running_worker(EVERYWHERE, 64) as (worker, _):
        for request in (first, second, other):
            request.unchecked = True
            add(worker, request)
        assert len(checked) == 2
        worker.limits = replace(worker.limits, tap_slots=64)
        again = Request("d", 10, reads, 2, [1]).sent()
        again.asked, again.unchecked = first.asked, True
        add(worker, again)
        assert len(checked) == 3
        worker.close()


def test_a_fault_in_planning_fails_only_the_requests_of_that_step(monkeypatch, caplog):
    with running_worker(EVERYWHERE, 64) as (worker, sink):
        waiting = Request("later", 8, Spec((Read("embed"),)), 2, [1, 2, 3])
        add(worker, _edited(), waiting.sent())

        def broken(batch):
            raise ZeroDivisionError("planning")

        batch = StepBatch(["plain", "r"], np.array([0, 1, 3]), np.array([4, 0]))
        with monkeypatch.context() as patch:
            patch.setattr(worker._planner, "begin_step", broken)
            worker.steps.begin(batch, torch.zeros(3))
        assert not worker.steps.active
        assert (worker._tables.tokens[:, 0] == -1).all()
        worker.steps.end()
        assert "r" not in worker._planner
        # Its edits are not done, so EngineCore ends it: its KV would pass for edited KV.
        told = worker.with_endings(SimpleNamespace(sampled_token_ids=[[1]]))
        assert list(told.scope_faults) == ["r"]
        told_why = "vllm-scope failed in a step (ZeroDivisionError); the log says why."
        assert told.scope_faults["r"] == told_why
        assert "planning" in caplog.text
        step = Step([(waiting, 0, 2)], [0])
        positions = torch.tensor([0, 1])  # read during the forward
        worker.steps.begin(step.batch(), positions)
        run_taps(worker, step, 5, random.Random(0))
        worker.steps.end()
        worker.finish_requests(["later"])
        worker.close()
    assert [(key, error is None) for key, error in sink.finished] == [(7, False), (8, True)]
    assert len(sink.found) == 2


def test_a_request_whose_edits_cannot_be_done_is_ended(monkeypatch):
    with running_worker(EVERYWHERE, 64) as (worker, _):
        monkeypatch.setattr(worker._planner, "add_request", lambda *_: 1 / 0)
        add(worker, _edited())
        told = worker.with_endings(SimpleNamespace(sampled_token_ids=[[1]]))
        assert "failed on this request (ZeroDivisionError" in told.scope_faults["r"]
        # Once; and a step without such requests is handed on as it is.
        output = SimpleNamespace(sampled_token_ids=[[1]])
        assert worker.with_endings(output) is output
        assert not hasattr(output, "scope_faults")


def test_an_asynchronous_output_reports_faults_when_it_is_made():
    with running_worker(EVERYWHERE, 64) as (worker, _):
        add(worker, _edited())
        (owner,) = worker._planner.owners
        made = SimpleNamespace(sampled_token_ids=[[1]])
        later = worker.with_endings(SimpleNamespace(get_output=lambda: made))
        worker._tables.faults[owner] = 1 + 2
        told = later.get_output()
        assert told.scope_faults == {
            "r": "an edit at 'resid_post' of layer 0 ('resid_pre' of layer 1) makes a row "
            "that is not finite in float32, so the request was ended. "
            "Use a smaller scale or vector."
        }
        assert not hasattr(made, "scope_faults")  # vLLM may have one for many steps
        assert worker.with_endings(made) is made


def test_a_forward_that_raises_delivers_nothing():
    from vllm_scope.engine.worker.attach import _attach_steps

    with running_worker(EVERYWHERE, 64) as (worker, sink):
        request = Request("r", 7, Spec((Read("embed"),)), 2, [1, 2, 3])
        step = Step([(request, 0, 2)], [0])

        class Runner:
            def execute_model(self, scheduler_output):
                positions = torch.tensor([0, 1])  # read during the forward
                worker.steps.begin(step.batch(), positions)
                raise MemoryError("in the middle of the forward")

            def sample_tokens(self, output):
                return output

        runner = Runner()
        _attach_steps(runner, worker)
        output = SimpleNamespace(
            finished_req_ids=set(), scheduled_new_reqs=[request.sent()],
            scope_news=news_of(worker, request.sent()),
        )  # fmt: skip
        with pytest.raises(MemoryError, match="in the middle"):
            runner.execute_model(output)
        assert not worker.steps.active
        worker.finish_requests(["r"])
        worker.close()
    assert sink.found == {}
    assert sink.finished == [(7, None)]


@pytest.mark.parametrize("written", [False, True], ids=["the-tap-raised", "a-later-one-raised"])
def test_slots_of_a_tap_that_raises_are_free_and_rows_that_wait_for_their_copy_are_kept(
    written, monkeypatch
):
    request = Request("r", 7, Spec((Read("embed"), Read("resid_post", layers=[0]))), 4, [1] * 5)
    with running_worker(EVERYWHERE, 4) as (worker, _):  # room for the rows of one tap
        monkeypatch.setattr(worker._delivery.drain, "submit", lambda *args: None)
        add(worker, request.sent())
        worker.steps.begin(Step([(request, 0, 4)], [0]).batch(), torch.arange(4))
        assert worker.steps.begin_tap(0) == (0, 1)
        region = worker.steps._tap_region
        if written:
            worker.steps.end_tap(0)
        worker.steps.fail()
        assert region.fence.is_set() is not written
        region.fence.set()  # by the drain thread, where it has the region
        worker.finish_requests(["r"])
