"""Monitors of several API servers: a file tells each process what another has set."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.unit.engine.test_connection import SITES
from vllm_scope.core.registry import Registry
from vllm_scope.engine import monitors
from vllm_scope.engine.frontend.connection import connections
from vllm_scope.engine.http.calls import EngineCalls
from vllm_scope.server.changes import NoTurnError
from vllm_scope.server.shared import Shared

FLAG = {"weight": [0.5] * 4, "layers": [1], "threshold": 10**30}


class Thing(SimpleNamespace):
    """Has a weak reference, as vLLM's objects."""

    __hash__ = object.__hash__


class Cores(Thing):
    """vLLM's client of one EngineCore."""

    async def call_utility_all_async(self, *call):
        return [[Registry(SITES).hold(*call[3])]]


def engine_of(num_processes):
    parallel = Thing(_api_process_count=num_processes, pipeline_parallel_size=1)
    config = Thing(additional_config={"scope": {}}, parallel_config=parallel)
    engine = Thing(vllm_config=config, output_processor=Thing(), engine_core=Cores())
    connections.put(engine.output_processor, SimpleNamespace(sites=SITES))
    return engine


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Of this process. Another `Shared` stands for another process."""
    monkeypatch.setattr(monitors, "_file", None)
    monitors.share(Shared(lambda: tmp_path))
    return tmp_path / "monitors"


def names(engine):
    return [monitor.name for monitor in monitors.monitors_of(engine.vllm_config)]


def put(engine, bodies):
    asyncio.run(EngineCalls(engine).set_monitors(bodies))


def test_what_one_process_sets_another_has(file):
    engine, other = engine_of(2), Shared(lambda: file.parent)
    assert names(engine) == []
    put(engine, {"one": FLAG})
    assert names(engine) == ["one"]
    other.set(other.news().replace(b'"one"', b'"two"'))
    assert names(engine) == ["two"]
    (monitor,) = monitors.monitors_of(engine.vllm_config)
    assert monitor is monitors.monitors_of(engine.vllm_config)[0], "parsed once"
    assert monitor.probe.threshold == 1e30
    put(engine, {})
    assert names(engine) == []


def test_one_api_server_has_no_file(file):
    engine = engine_of(1)
    put(engine, {"one": FLAG})
    assert names(engine) == ["one"]
    assert not file.exists()


def test_what_cannot_be_written_is_not_set(file, monkeypatch):
    engine = engine_of(2)
    put(engine, {"one": FLAG})

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(NoTurnError, match=r"No space left on device.*VLLM_SCOPE_RESULTS_DIR"):
        put(engine, {"two": FLAG})
    assert names(engine) == ["one"]
