"""The route of sweeps with an engine whose cells are made up: events, errors, ends."""

from __future__ import annotations

import asyncio
import json

import pytest
from fastapi.testclient import TestClient

from tests.unit.server.test_routes import app_with
from vllm_scope import CapacityError, Cell, ScopeError, SpecError
from vllm_scope.sweeps.table import SweepTable

BODY = {"prompts": [[1, 2]], "source": {"rows": [1.0, 2.0]}, "metric": {"kind": "kl"}}


class Run:
    """Sends its steps' cells; an exception among the steps ends it."""

    def __init__(self, steps):
        self.table = SweepTable.empty([["a", "b"]], [3], [0, 1], None, "KL", "resid_pre", "patch")
        self.num_cells, self.steps, self.closed = 2, steps, 0

    async def run(self, tell):
        for step in self.steps:
            await asyncio.sleep(0.01)
            if isinstance(step, BaseException):
                raise step
            for cell in step:
                self.table.values[self.table.index_of(cell)] = cell.value
                tell(cell)
        self.table.plain[0] = 0.5

    def close(self):
        self.closed += 1


class Engine:
    def __init__(self, made):
        self.made = made

    async def sweep(self, asked, settings):
        self.asked = asked
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


CELLS = [Cell(0, 3, 0, None, 1.0), Cell(0, 3, 1, None, float("nan"))]


@pytest.fixture
def post(tmp_path, monkeypatch):
    apps = []

    def post(made, **changed):
        app = app_with(tmp_path, monkeypatch, engine=Engine(made))
        apps.append(app)
        client = TestClient(app, raise_server_exceptions=False)
        return client.post("/v1/scope/sweeps", content=json.dumps(BODY | changed))

    yield post
    for app in apps:
        app.state.scope.store.close()


def events(response):
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_cells_come_as_they_arrive(post):
    run = Run([CELLS[:1], CELLS[1:]])
    run.table.errors[0, 0, 1] = "it is zero."
    first, *groups, last = events(post(run, stream=True))
    assert first["num_cells"] == 2
    assert first["table"]["tokens"] == [["a", "b"]]
    cells = [cell for group in groups for cell in group["cells"]]
    assert cells == [
        {"prompt": 0, "layer": 3, "position": 0, "head": None, "value": 1.0},
        {"prompt": 0, "layer": 3, "position": 1, "head": None, "value": None,
         "error": "it is zero."},
    ]  # fmt: skip
    assert last == {"plain": [0.5], "source": [None], "counts": {"cells": 2, "failed": 1}}
    assert run.closed


def test_the_whole_table_is_one_answer(post):
    run = Run([CELLS])
    found = post(run).json()
    assert found["values"] == [1.0, None]
    assert found["counts"] == {"cells": 2, "failed": 0}
    assert run.closed


@pytest.mark.parametrize(
    ("error", "status"), [(SpecError("no."), 400), (CapacityError("full."), 429)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_its_status_before_anything_is_sent(stream, error, status, post):
    response = post(error, stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["message"] == str(error)


@pytest.mark.parametrize(
    ("error", "status"),
    [(ScopeError("lost."), 400), (CapacityError("full."), 429), (ValueError("a secret"), 500)],
)
def test_a_sweep_that_fails_says_why(error, status, post):
    run = Run([CELLS[:1], error])
    *_, last = events(post(run, stream=True))
    assert last["error"]["code"] == status
    assert "secret" not in last["error"]["message"]
    assert run.closed
    response = post(Run([CELLS[:1], error]))
    assert response.status_code == status
    assert "secret" not in response.text


def test_a_wrong_body_is_refused(post):
    for content in ({"prompts": []}, {"more": 1}, {"source": [1, 2]}):
        response = post(Run([]), **content)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "SpecError"
