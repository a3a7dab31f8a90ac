"""The server-wide edits of an LLM, which only the caller's thread can set."""

from __future__ import annotations

import threading

from vllm_scope import Add, Spec
from vllm_scope.control.controller import Change, Controller, Observation
from vllm_scope.engine import control

CALM = Add([1.0, 2.0], layer=0, scale=0.0, tokens="generated")


class Config:
    """As vLLM's VllmConfig."""

    additional_config = None
    _api_process_count = 1

    @property
    def parallel_config(self):
        return self


class Engine:
    """An LLMEngine whose EngineCore takes every edit."""

    output_processor = None

    def __init__(self, text=None):
        self.text, self.vllm_config = text, Config()
        self.caller = threading.get_ident()

    def collective_rpc(self, name, args=()):
        assert threading.get_ident() == self.caller
        if name == "scope_set_edits":
            self.text = args[0]
        return [self.text]


class Llm:
    def __init__(self, text=None):
        self.llm_engine = Engine(text)


def made(callback=lambda *_: None):
    return Controller(callback, {"calm": CALM}, bounds={"calm": (0, 1)}, rate=1000)


def elsewhere(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_edits_of_another_thread_wait_for_the_callers_next_request():
    llm = Llm("before")
    with made().on(llm) as controller:
        assert Spec.from_json(llm.llm_engine.text).edits == (CALM,)
        elsewhere(controller.close)
        assert llm.llm_engine.text != "before"
        control.flush(llm.llm_engine)
        assert llm.llm_engine.text == "before"


def test_the_edits_before_a_controller_are_those_that_an_earlier_one_left_waiting():
    llm = Llm("before")
    first = made().on(llm)
    with first:
        elsewhere(first.close)
    with made().on(llm):
        control.flush(llm.llm_engine)
        assert Spec.from_json(llm.llm_engine.text).edits == (CALM,)
    assert llm.llm_engine.text == "before"


def test_a_controller_that_is_only_prepared_drops_no_change_of_the_running_one():
    llm, changed = Llm(), threading.Event()

    def callback(observations, scales):
        if scales["calm"] == 1.0:
            changed.set()
        return Change({"calm": 1.0})

    with made(callback).on(llm) as controller:
        while not changed.is_set():
            controller.tell(Observation("r", "mood", 1.0, 7))
        made().on(llm)
        control.flush(llm.llm_engine)
        assert Spec.from_json(llm.llm_engine.text).edits[0].scale == 1.0
