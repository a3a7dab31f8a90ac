"""Objects that all requests share."""

from __future__ import annotations

import copy
import threading

from vllm_scope.control.background import Background

DEADLINE_S = 60.0


class Worker(Background):
    def __init__(self):
        super().__init__("worker")
        self.idents, self.ended = [], threading.Event()

    def _run(self):
        self.idents.append(threading.get_ident())
        self.ended.set()

    def begin(self):
        self._start()


def test_its_thread_is_started_once_whichever_threads_ask_for_it():
    worker = Worker()
    assert not worker.idents
    callers = [threading.Thread(target=worker.begin) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE_S)
    worker.begin()
    assert worker.ended.wait(DEADLINE_S)
    assert len(worker.idents) == 1


def test_a_copy_of_what_holds_it_has_the_same_object():
    worker = Worker()
    assert copy.deepcopy({"held": worker})["held"] is worker
