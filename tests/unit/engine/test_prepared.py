"""What is worked on at once on the event loop, and what goes to a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.collector import collector_off
from vllm_scope import Add, Spec, scope
from vllm_scope.engine.frontend import requests as frontend
from vllm_scope.engine.frontend import translators
from vllm_scope.engine.frontend.connection import Connection, connections
from vllm_scope.engine.frontend.prepared import SMALL, is_quick, is_small
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.request.sites import Sites
from vllm_scope.results.inbox import inbox

HALF = SMALL // 2


@pytest.mark.parametrize(
    ("values", "small"),
    [
        pytest.param(None, True, id="nothing"),
        pytest.param("a" * SMALL, True, id="a-text"),
        pytest.param("a" * (SMALL + 1), False, id="a-long-text"),
        pytest.param([1] * SMALL, True, id="ids"),
        pytest.param([1] * (SMALL + 1), False, id="many-ids"),
        pytest.param(("a" * 100, [1] * 100), True, id="a-text-and-ids"),
        pytest.param(("a" * HALF, [1] * HALF, "a"), False, id="together"),
        pytest.param([[1] * HALF, [1] * HALF], False, id="lists-together"),
        pytest.param([1, "a" * SMALL], False, id="a-text-behind-a-number"),
        pytest.param([1, [1] * SMALL], False, id="a-list-behind-a-number"),
        pytest.param({"a": [1] * 100, "b": {"c": "d"}}, True, id="an-object"),
        pytest.param({"a": 1, "b": {"c": ["a" * SMALL]}}, False, id="within-an-object"),
        pytest.param({"a" * (SMALL + 1): 1}, False, id="a-long-key"),
        pytest.param([[]] * (SMALL + 1), False, id="empty-lists"),
    ],
)
def test_values_are_small_if_all_items_together_are(values, small):
    assert is_small(values) == small


def test_counting_items_stops_at_the_bound_and_does_not_recurse():
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    wide = [[[1] * 1000] * 1000] * 1000
    for large in (deep, wide):
        with collector_off():
            started = time.thread_time()
            assert not is_small(large)
            assert time.thread_time() - started < 0.05


@pytest.mark.parametrize("padding", ["", " " * SMALL], ids=["small", "large"])
def test_names_in_a_large_spec_are_looked_for_off_the_event_loop(padding, monkeypatch):
    parsed_on: list[threading.Thread] = []

    def from_json(text: object) -> Spec:
        parsed_on.append(threading.current_thread())
        return original(text)

    class Processor:
        """vLLM's OutputProcessor."""

    class Engine:
        vllm_config = SimpleNamespace(
            additional_config={"scope": {}}, parallel_config=SimpleNamespace(worker_cls="auto")
        )

        def __init__(self) -> None:
            limits = Limits((16,), 0, 100, 100, 100, 100, False)
            connection = Connection(Sites(2, 4, "float32", (0, 2, 4)), None, 1, 1.0, limits, {}, {})
            connection.generation = inbox().generation
            self.output_processor = Processor()
            connections.put(self.output_processor, connection)
            self.asked: list[str] = []

        async def collective_rpc(self, name):
            self.asked.append(name)
            return [{"mine": {"streams": [["resid_post", 0]], "digest": "d"}}]

        async def add_request(self, request_id, prompt, params):
            pass

    original = Spec.from_json
    monkeypatch.setattr(frontend, "Spec", SimpleNamespace(from_json=from_json))
    engine = Engine()
    extra = {"scope": scope(Add("mine", layer=0))["scope"] + padding}
    params = SimpleNamespace(extra_args=extra, n=1, skip_clone=True)

    async def run() -> threading.Thread:
        await frontend._add_async(Engine.add_request, engine, "one", "prompt", params)
        return threading.current_thread()

    loop_thread = asyncio.run(run())
    assert engine.asked == ["scope_modules"]
    assert list(connections.of(engine.output_processor).modules) == ["mine"]
    assert [thread is loop_thread for thread in parsed_on] == [not padding]


def test_a_spec_that_names_features_of_an_sae_is_not_quick():
    """A few characters of it become many rows."""
    assert is_quick('{"reads": [{"site": "embed"}]}', [1, 2])
    assert not is_quick('{"edits": [{"kind": "set_feature", "sae": "a", "index": [1]}]}', [1, 2])
    assert not is_quick('{"features": [{"sae": "a", "\\u0069ndices": [1]}]}', [1, 2])
    assert not is_quick('{"reads": []}', list(range(SMALL)))


def test_vllm_does_not_look_through_what_a_translator_counts(monkeypatch):
    """A field of a face with 600,000 numbers; the check of vLLM took 0.6 s on the event loop."""
    for name, empty in {"_entries": {}, "_keys": frozenset(), "_everywhere": ()}.items():
        monkeypatch.setattr(translators, name, empty)
    seen: list[object] = []

    def translate(values: Mapping[str, object], sites: Sites) -> translators.Translation:
        seen.append(values)
        return translators.Translation(())

    translators.register("one", ["word"], translate)
    rows = {"layer": [10**30]}
    with pytest.raises(VLLMValidationError, match="integers"):
        SamplingParams(extra_args={"word": rows})
    beside = translators.Uncounted(rows)
    params = SamplingParams(extra_args={"word": beside})
    config, sites = SimpleNamespace(additional_config={}), Sites(2, 4, "float32", (0,))
    applied = translators.applying(params, config)
    translated = translators.translated(params, applied, sites, {})
    assert seen == [{"word": rows}]
    assert translated.extra_args is None
    plain = SamplingParams(extra_args={"other": 1})
    assert translators.applying(plain, config) == []
    assert translators.translated(plain, [], sites, {}) is plain
    assert not is_small({"word": translators.Uncounted([0] * (SMALL + 1))})
    assert "0" not in repr(beside), "a log does not show it"
