"""A controller's rate, bounds and steps, and callbacks that raise or hang."""

from __future__ import annotations

import asyncio
import copy
import logging
import queue
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_scope import Ablate, Add, Spec, SpecError
from vllm_scope.control import controller as module
from vllm_scope.control.controller import MOST_WAITING, Change, Controller, Observation
from vllm_scope.engine import control

V = [1.0, 2.0]
CALM = Add(V, layer=0, scale=0.0, tokens="generated")


class Thing:
    """An object of vLLM."""


class Engine:
    """Server-wide edits as text."""

    def __init__(self, text=None):
        self.texts, self.tell, self.refuses = [text], None, False

    def get(self):
        return self.texts[-1]

    def set(self, text):
        if self.refuses:
            raise SpecError("no room.")
        self.texts.append(text)

    def listen(self, tell):
        self.tell = tell

    def edits(self):
        return Spec.from_json(self.texts[-1]).edits


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def seen(value=1.0):
    return Observation("r", "mood", value, 7)


def made(callback, clock=None, **options):
    given = {"bounds": {"calm": (-1.0, 2.0)}, "rate": 2.0, "clock": clock or Clock()} | options
    engine = Engine()
    return Controller(callback, {"calm": CALM}, **given).on(engine), engine


def to(scale, reason="because"):
    return lambda observations, scales: Change({"calm": scale}, reason)


def test_the_callback_gets_what_is_new_and_the_scales_at_most_rate_times_a_second():
    calls, clock = [], Clock()

    def callback(observations, scales):
        calls.append(([one.value for one in observations], scales))
        return Change({"calm": 0.5})

    controller, _ = made(callback, clock)
    assert controller.turn() is None, "nothing was observed"
    controller.tell(seen(1.0))
    controller.tell(seen(2.0))
    assert controller.turn() == 0.5
    controller.tell(seen(3.0))
    clock.now += 0.375
    assert controller.turn() == 0.125
    assert len(calls) == 1
    clock.now += 0.125
    controller.turn()
    assert calls == [([1.0, 2.0], {"calm": 0.0}), ([3.0], {"calm": 0.5})]
    assert controller.counts == {"calls": 2, "changes": 1}


@pytest.mark.parametrize(
    ("wanted", "options", "found"),
    [
        pytest.param(1.5, {}, 1.5, id="within"),
        pytest.param(np.float32(1.5), {}, 1.5, id="a-number-of-numpy"),
        pytest.param(torch.tensor(1), {}, 1.0, id="a-number-of-torch"),
        pytest.param(9.0, {}, 2.0, id="above"),
        pytest.param(-9.0, {}, -1.0, id="below"),
        pytest.param(9.0, {"max_step": {"calm": 0.25}}, 0.25, id="a-step-up"),
        pytest.param(-9.0, {"max_step": {"calm": 0.25}}, -0.25, id="a-step-down"),
        pytest.param(9.0, {"max_step": {"calm": 5}}, 2.0, id="a-step-over-the-bound"),
    ],
)
def test_a_scale_stays_within_its_bounds_and_step(wanted, options, found, caplog):
    controller, engine = made(to(wanted), **options)
    controller.tell(seen())
    with caplog.at_level(logging.INFO, "vllm.vllm_scope"):
        controller.turn()
    assert controller.scales == {"calm": found}
    (edit,) = engine.edits()
    assert (edit.scale, edit.vector, edit.tokens) == (found, CALM.vector, CALM.tokens)
    assert f"the edit 'calm' went from 0.0 to {found}: because" in caplog.text


def raises(observations, scales):
    raise RuntimeError("callback's own")


def exits(observations, scales):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        pytest.param(raises, "failed: RuntimeError: callback's own", id="raises"),
        pytest.param(exits, "failed: SystemExit: 3", id="exits"),
        pytest.param(to(float("nan")), "takes a scale, not nan", id="not-a-number"),
        pytest.param(to(np.ones(1)), "takes a scale, not", id="an-array"),
        pytest.param(to(Ablate(V, layer=0)), "takes a scale, not Ablate", id="an-edit"),
        pytest.param(lambda *_: Change({"loud": 1.0}), "'loud' does not exist; calm", id="unknown"),
        pytest.param(lambda *_: 0.5, "AttributeError", id="no-change"),
    ],
)
def test_a_callback_that_fails_leaves_the_edits_and_is_logged_once(callback, words, caplog):
    controller, engine = made(callback, clock := Clock())
    for _ in range(3):
        controller.tell(seen())
        controller.turn()
        clock.now += 1
    assert controller.counts == {"calls": 3, "failures": 3}
    assert engine.texts == [None]
    assert len(caplog.records) == 1
    assert words in caplog.text


def test_edits_that_the_engine_refuses_are_a_failure():
    controller, engine = made(to(1.0))
    engine.refuses = True
    controller.tell(seen())
    controller.turn()
    assert controller.counts == {"calls": 1, "failures": 1}
    assert controller.scales == {"calm": 0.0}


def test_a_callback_that_hangs_is_counted_and_what_it_returns_late_is_dropped(caplog):
    clock = Clock()

    def callback(observations, scales):
        clock.now += 11
        controller.tell(seen())  # another thread's, while the callback runs
        controller.tell(seen())
        return Change({"calm": 1.0})

    controller, engine = made(callback, clock)
    controller.tell(seen())
    controller.turn()
    assert controller.counts == {"calls": 1, "hangs": 1}
    assert engine.texts == [None]
    assert len(caplog.records) == 1
    assert "has run for more than 10 s" in caplog.text


def test_old_observations_are_dropped_and_counted():
    sizes = []
    controller, _ = made(lambda observations, scales: sizes.append(len(observations)))
    for _ in range(MOST_WAITING + 3):
        controller.tell(seen())
    controller.turn()
    assert sizes == [MOST_WAITING]
    assert controller.counts == {"dropped": 3, "calls": 1}


def test_a_name_without_bounds_takes_an_edit():
    other = Ablate(V, layer=1)
    engine = Engine()
    controller = Controller(
        lambda *_: Change({"b": other, "a": 1.0}), {"b": Ablate(V, layer=0), "a": CALM},
        bounds={"a": (0, 1)}, clock=Clock(),
    ).on(engine)  # fmt: skip
    controller.tell(seen())
    controller.turn()
    assert engine.edits()[0] == other
    assert controller.scales == {"a": 1.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bounds": {"loud": (0, 1)}}, "'loud', which is not the name of an Add"),
        ({"bounds": {"calm": (0.5, 1)}}, r"is \(0.5, 1\), and the scale is 0;"),
        ({"bounds": {"calm": (0, float("inf"))}}, "the bounds must be finite"),
        ({"max_step": {"calm": 0}}, r"max_step\['calm'\] is 0"),
        ({"max_step": {"loud": 1}}, "it needs bounds"),
        ({"rate": 0}, "rate is 0"),
    ],
)
def test_what_a_controller_cannot_be_is_refused(options, words):
    with pytest.raises(SpecError, match=words):
        made(to(1.0), **options)


def test_while_it_runs_its_edits_are_the_servers_and_then_those_from_before():
    before = '{"edits": []}'
    called = threading.Event()

    def callback(observations, scales):
        called.set()
        return Change({"calm": 1.0})

    for keep in (False, True):
        called.clear()
        engine = Engine(before)
        controller = Controller(callback, {"calm": CALM}, bounds={"calm": (0, 1)}, rate=1000).on(
            engine
        )
        with controller:
            assert engine.edits() == (CALM,)
            engine.tell(seen())
            assert called.wait(5)
            deadline = time.monotonic() + 5
            while not controller.counts["changes"] and time.monotonic() < deadline:
                time.sleep(0.001)
            assert engine.edits()[0].scale == 1.0
            controller.close(keep=keep)
        assert engine.tell is None
        assert (engine.texts[-1] == before) is not keep
        controller.tell(seen())
        assert not controller._thread.is_alive()


def test_the_first_observation_is_handled_at_once_and_a_later_one_after_a_period():
    times: queue.Queue[float] = queue.Queue()

    def callback(observations, scales):
        times.put(time.monotonic())

    for rate in (0.0001, 4.0):
        engine = Engine()
        controller = Controller(callback, {"calm": CALM}, bounds={"calm": (0, 1)}, rate=rate)
        with controller.on(engine):
            time.sleep(0.05)  # the thread finds no observation, and waits
            engine.tell(seen())
            first = times.get(timeout=5)
            engine.tell(seen())
            if rate == 4.0:
                assert times.get(timeout=5) - first > 0.2
            else:
                with pytest.raises(queue.Empty):
                    times.get(timeout=0.3)
        assert not controller._thread.is_alive()


def test_a_callback_that_hangs_does_not_keep_it_open_and_changes_nothing_afterwards():
    inside, go = threading.Event(), threading.Event()

    def callback(observations, scales):
        inside.set()
        go.wait(30)
        return Change({"calm": 1.0})

    engine = Engine()
    controller = Controller(callback, {"calm": CALM}, bounds={"calm": (0, 1)}, patience_s=0.05).on(
        engine
    )
    with controller:
        engine.tell(seen())
        assert inside.wait(5)
    go.set()
    controller._thread.join(5)
    assert controller.scales == {"calm": 0.0}
    assert engine.texts[-1] is None


def test_a_callback_can_close_its_own_controller():
    engine, over = Engine("before"), threading.Event()

    def callback(observations, scales):
        try:
            controller.close()
        finally:
            over.set()
        return Change({"calm": 1.0})

    controller = Controller(callback, {"calm": CALM}, bounds={"calm": (0, 1)})
    with controller.on(engine):
        engine.tell(seen())
        assert over.wait(5)
        controller._thread.join(5)
        assert engine.texts[-1] == "before"
    assert engine.tell is None
    assert controller.counts == {"calls": 1}
    assert not controller._thread.is_alive()


def test_a_change_that_is_being_set_when_it_closes_does_not_outlast_it():
    inside, go = threading.Event(), threading.Event()

    class Slow(Engine):
        def set(self, text):
            if text is not None and Spec.from_json(text).edits[0].scale == 1.0:
                inside.set()
                go.wait(30)
            super().set(text)

    engine = Slow()
    controller = Controller(to(1.0), {"calm": CALM}, bounds={"calm": (0, 1)}, patience_s=0.05)
    with controller.on(engine):
        engine.tell(seen())
        assert inside.wait(5)
        threading.Timer(0.3, go.set).start()
    controller._thread.join(5)
    assert engine.texts[-1] is None


def test_an_async_with_that_is_cancelled_while_it_begins_leaves_no_running_controller():
    inside, go = threading.Event(), threading.Event()

    class Slow(Engine):
        def get(self):
            inside.set()
            go.wait(30)
            return super().get()

    engine = Slow()
    controller = Controller(to(1.0), {"calm": CALM}, bounds={"calm": (0, 1)}).on(engine)

    async def serve():
        async with controller:
            await asyncio.Event().wait()

    async def main():
        task = asyncio.create_task(serve())
        await asyncio.to_thread(inside.wait, 5)
        task.cancel()
        threading.Timer(0.1, go.set).start()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.tell is None
    assert engine.texts[-1] is None
    assert not controller._thread.is_alive()


def test_copies_of_what_a_request_holds_are_the_controller_itself():
    controller, _ = made(to(1.0))
    copy.deepcopy(controller.tell)(seen())
    controller.turn()
    assert controller.counts["calls"] == 1


def test_a_controller_is_used_once():
    controller, engine = made(to(1.0))
    with controller:
        pass
    with pytest.raises(SpecError, match="used only one time"):
        controller.__enter__()
    assert engine.tell is None
    assert engine.get() is None


def test_closing_a_controller_that_never_started_leaves_the_running_one():
    controller, engine = made(to(1.0))
    other = Controller(to(1.0), {"calm": CALM}, bounds={"calm": (0, 1)}).on(engine)
    with controller:
        other.close()
        assert engine.tell is not None
        assert engine.edits() == (CALM,)


def test_it_does_not_wait_on_its_engines_event_loop():
    controller, engine = made(to(1.0))
    engine.on_its_loop = True
    with pytest.raises(SpecError, match="async with"):
        controller.__enter__()
    engine.on_its_loop = False
    with controller:
        engine.on_its_loop = True
        with pytest.raises(SpecError, match=r"asyncio\.to_thread"):
            controller.close(keep=True)
        engine.on_its_loop = False
    assert engine.get() is None


def test_what_is_no_engine_is_refused(monkeypatch):
    monkeypatch.setattr(module, "_finders", [])
    one = Controller(lambda *_: None, {"calm": CALM}, bounds={"calm": (0.0, 1.0)})
    with pytest.raises(SpecError, match=r"'llm' is no engine with vllm-scope; give a vllm.LLM"):
        one.on("llm")


def begun(engine):
    edits = control.edits_of(SimpleNamespace(llm_engine=engine))
    return Controller(to(1.0), {"calm": CALM}, bounds={"calm": (-1.0, 2.0)}).on(edits)


class OfLlm(Thing):
    """An LLM's engine with server-wide edits."""

    def __init__(self):
        self.vllm_config, self.output_processor = Thing(), Thing()
        self.vllm_config.additional_config = {}
        self.text = "before"

    def collective_rpc(self, name, args=()):
        if name == "scope_set_edits":
            self.text = args[0]
        return [self.text]


def test_edits_that_wait_to_be_restored_are_restored_before_the_next_controller_starts():
    """Only the caller's thread can change the edits of an LLM. If another thread closes a
    controller, the earlier edits are restored later."""
    engine = OfLlm()
    first = begun(engine).__enter__()
    closing = threading.Thread(target=first.close)
    closing.start()
    closing.join()
    assert engine.text != "before"
    with begun(engine):
        assert engine.text != "before"
    assert engine.text == "before"
