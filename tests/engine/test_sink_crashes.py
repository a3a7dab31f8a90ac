"""Kill -9 in mid-write: nothing half-written is seen, and what was called ok is there."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import vllm_scope
from tests.asking import run
from tests.conftest import local_engine, process_engine
from tests.engine.test_sinks import check_equal, params
from tests.warm_start import cold
from vllm_scope import Read

pytestmark = pytest.mark.long


def files_in(root, layout):
    files = {
        "root": str(root), "layout": layout, "file_mib": 1, "packed_requests": 8, "fsync": True,
        "threads": 2, "flush_s": 0.3,
    }  # fmt: skip
    return {"scope": {"sinks": {"filesystem": files}}}


def names_of(root: Path, suffix: str) -> list[str]:
    return [name for _, _, names in os.walk(root) for name in names if name.endswith(suffix)]


class Killer(threading.Thread):
    """Kills processes once they are seen in the middle of writing.

    Args:
        victims: the process that writes comes first.
        told: requests whose callers were told ok; it waits for some.
        after: called when they are dead.

    Attributes:
        caught: hidden names that were there after it was dead.
    """

    def __init__(
        self,
        root: Path,
        victims: list[psutil.Process],
        told: list[str],
        after: Callable[[], None],
    ) -> None:
        super().__init__(daemon=True)
        self._root, self._victims, self._told, self._after = root, victims, told, after
        self.caught: list[str] = []

    def run(self) -> None:
        while len(self._told) < 20:
            time.sleep(0.002)
        self._stop_in_mid_write()
        for victim in self._victims:
            victim.send_signal(signal.SIGKILL)
        while any(alive(victim) for victim in self._victims):
            time.sleep(0.01)
        self.caught = names_of(self._root, ".tmp")
        self._after()

    def _stop_in_mid_write(self) -> None:
        """Stops the first victim at a moment when it has a hidden file.

        A process that is seen to write may have ended the file before a signal reaches it, so
        what counts is what is there while it stands still.
        """
        writer = self._victims[0]
        while True:
            while not names_of(self._root, ".tmp"):
                pass
            writer.send_signal(signal.SIGSTOP)
            while writer.status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
            if names_of(self._root, ".tmp"):
                return
            writer.send_signal(signal.SIGCONT)


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_in_mid_write(
    llm, root: Path, victims: list[psutil.Process]
) -> tuple[list[str], list[str]]:
    """Requests until the worker is dead: the names of those whose callers were told ok,
    and hidden names that it left."""
    from vllm.v1.engine.exceptions import EngineDeadError

    told: list[str] = []
    queue = llm.llm_engine.engine_core.outputs_queue
    # vLLM's LLM would wait for a core that says nothing any more for good.
    killer = Killer(root, victims, told, lambda: queue.put_nowait(EngineDeadError()))
    killer.start()
    with pytest.raises(EngineDeadError):
        serve_for_good(llm.llm_engine, told)
    killer.join(30)
    return told, killer.caught


def serve_for_good(engine, told: list[str]) -> None:
    for number in itertools.count():
        name = f"r{number}"
        reads = [Read(site, to="filesystem", name=name) for site in ("resid_post", "embed")]
        prompt = {"prompt_token_ids": [i % 500 for i in range(number, number + 60)]}
        engine.add_request(name, prompt, params(*reads))
        while engine.get_num_unfinished_requests() >= 48:
            for output in [output for output in engine.step() if output.finished]:
                assert output.scope.status == "complete", output.scope.manifests
                told.append(output.request_id)


def check_after(root: Path, told: list[str]) -> int:
    """All that is visible is whole, and all that was promised is visible."""
    capture = vllm_scope.open(root)
    for request in capture:
        assert request.status == "ok"
        for stream in request.keys():
            assert request[stream].shape == (71, 128)
        assert len(request.token_ids) == 72
    stored = [request.manifest.name for request in capture]
    assert len(set(stored)) == len(stored)
    assert set(told) <= set(stored)
    for beside in root.rglob("*.json"):
        assert beside.with_suffix(".safetensors").exists()
    return len(capture)


def check_goes_on(model, root: Path, layout: str, num_before: int) -> None:
    """A new engine on the root cleans up, and adds to what is there."""
    with local_engine(model, dtype="float32", additional_config=files_in(root, layout)) as llm:
        assert names_of(root, ".tmp") == []
        reads = [Read("resid_post", to=to) for to in ("memory", "filesystem")]
        outputs = run(llm, [range(i, i + 60) for i in range(20)], params(*reads))
        capture = vllm_scope.open(root)
        assert len(capture) == num_before + 20
        for output in outputs:
            (stored,) = capture.find(request_id=output.request_id.partition("-")[0])[-1:]
            check_equal(output.scope, stored)


@pytest.mark.parametrize("layout", ["sharded", "per_request"])
def test_a_killed_core_loses_nothing_that_was_called_ok(checkpoints, tmp_path, layout):
    model, me = checkpoints("llama"), psutil.Process()
    before = set(me.children(recursive=True))
    with cold(), process_engine(
        model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        additional_config=files_in(tmp_path, layout),
    ) as llm:  # fmt: skip
        started = [p for p in me.children(recursive=True) if p not in before]
        names = {p: " ".join(p.cmdline()) for p in started}
        # The worker first: it is the one that writes.
        victims = [p for p in reversed(started) if "VLLM" in names[p]]
        assert {names[p].split("::")[1].strip() for p in victims} == {"EngineCore", "Worker"}
        told, caught = kill_in_mid_write(llm, tmp_path, victims)
    assert caught, "it was not writing when it was killed; the test shows nothing"
    num_before = check_after(tmp_path, told)
    check_goes_on(model, tmp_path, layout, num_before)
