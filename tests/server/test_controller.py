"""A server whose configuration names a controller, which a package of the operator's brings."""

from __future__ import annotations

import json
import time

from tests.server.conftest import ROOT, serving
from tests.server.test_answers import OPTIONS, TEXT

MOOD = {"weight": [1 / 16] * 256, "layers": [2], "aggregate": "mean", "threshold": 1e30}
MODULE = """
from vllm_scope import Add
from vllm_scope.control import Change, Controller


def louder(observations, scales):
    return Change({"loud": scales["loud"] + 1}, f"{len(observations)} answers")


def made():
    edit = Add([1 / 16] * 256, layer=2, scale=0.0, tokens="generated")
    bounds, steps = {"loud": (0, 3)}, {"loud": 0.5}
    return Controller(louder, {"loud": edit}, bounds=bounds, max_step=steps, rate=20)
"""


def test_a_controller_runs_as_long_as_its_server(tmp_path):
    site = tmp_path / "site"
    (site / "operators-0.1.dist-info").mkdir(parents=True)
    (site / "operators.py").write_text(MODULE)
    points = "[vllm_scope.controller]\nlouder = operators:made\n"
    (site / "operators-0.1.dist-info" / "entry_points.txt").write_text(points)
    (site / "operators-0.1.dist-info" / "METADATA").write_text("Name: operators\nVersion: 0.1\n")
    config = {"scope": {"monitors": {"mood": MOOD}, "controller": "louder"}}
    with (
        serving(
            tmp_path,
            "--additional-config",
            json.dumps(config),
            PYTHONPATH=f"{ROOT}:{site}",
            VLLM_LOGGING_LEVEL="INFO",
        ) as server,
        server.client() as client,
    ):

        def scale():
            (edit,) = client.edits()
            return edit["scale"]

        assert scale() == 0.0
        client.complete(TEXT, **OPTIONS)
        deadline = time.monotonic() + 30
        while scale() != 0.5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert scale() == 0.5, "a step is at most 0.5"
        deadline = time.monotonic() + 60
        while scale() != 3.0 and time.monotonic() < deadline:
            client.complete(TEXT, **OPTIONS)
        assert scale() == 3.0, "the bound"
        client.complete(TEXT, **OPTIONS)
        time.sleep(0.2)
        assert scale() == 3.0, "no step goes over the bound"
        # Before the server ends: vLLM's own processes may end in the wrong order, with a traceback.
        log = server.log.read_text()
    assert "the edit 'loud' went from 0.0 to 0.5: 1 answers" in log
    assert "Traceback" not in log, log[-3000:]
