"""What a harvest leaves in an engine that it was given, and what it says of that engine."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.conftest import TOYWORLD
from vllm_scope import Read
from vllm_scope.engine.frontend import outputs
from vllm_scope.engine.frontend.connection import connections
from vllm_scope.engine.offline import OfflineEngine
from vllm_scope.errors import ConfigError, ScopeError, SpecError
from vllm_scope.request.sites import Place, Sites
from vllm_scope.results.inbox import inbox


class OutputProcessor:
    """vLLM's, which a connection belongs to."""


class Engine:
    """An LLMEngine by its calls. Each step ends every request, and the rows of the odd ones are
    late: their outputs wait, as in outputs._step."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="m"), additional_config={},
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=4),
        )  # fmt: skip
        self.engine_core = SimpleNamespace()  # another process
        self.output_processor = OutputProcessor()
        self.added, self.aborted = [], []
        self.waiting = outputs._waiting.put(self, [])

    def has_unfinished_requests(self):
        return outputs._has_unfinished(lambda self: bool(self.added), self)

    def add_request(self, name, prompt, params):
        self.added.append(name)

    def step(self):
        ended, self.added = self.added, []
        made = [
            SimpleNamespace(request_id=name, finished=True, outputs=[SimpleNamespace(scope="rows")])
            for name in ended
        ]
        self.waiting += [(output, time.monotonic() + 60) for output in made[1::2]]
        return made[::2]

    def abort_request(self, names):
        self.aborted += names
        self.added = [name for name in self.added if name not in names]


def test_a_harvest_that_ends_early_leaves_no_output_for_the_callers_next_call():
    engine = Engine()
    computed = OfflineEngine(SimpleNamespace(llm_engine=engine), {}).compute(
        ((number, [1, 2]) for number in range(100)), [Read("embed")]
    )
    assert next(computed) == (0, "rows")
    assert engine.waiting
    computed.close()
    assert not engine.waiting
    assert not engine.has_unfinished_requests()


def test_an_engine_with_running_requests_is_refused_and_keeps_them():
    engine = Engine()
    engine.added.append("7")
    computed = OfflineEngine(SimpleNamespace(llm_engine=engine), {}).compute(
        [(0, [1, 2])], [Read("embed")]
    )
    with pytest.raises(ScopeError, match="this LLM has requests that run; let them end before the"):
        next(computed)
    assert engine.added == ["7"]
    assert not engine.aborted


def engine_of(model, sites, **more):
    """An OfflineEngine of an LLM with this ModelConfig and these taps."""
    engine = Engine()
    given = {
        "model": model, "tokenizer": model, "dtype": torch.bfloat16, "revision": None,
        "tokenizer_revision": None, "quantization": None, "hf_overrides": {},
    }  # fmt: skip
    engine.vllm_config.model_config = SimpleNamespace(**given | more)
    engine.vllm_config.cache_config = SimpleNamespace(cache_dtype="auto")
    connections.put(engine.output_processor, Connected(sites))
    return OfflineEngine(SimpleNamespace(llm_engine=engine), {})


class Connected:
    """A Connection, as far as a harvest asks it."""

    def __init__(self, sites):
        self.sites, self.reason, self.generation = sites, None, inbox().generation


def sites_at(*layers):
    places = (Place("resid_post", layer) for layer in layers)
    return Sites(
        num_layers=6, hidden_size=4, dtype="float32", boundaries=tuple(p.boundary for p in places)
    )


READS = [Read("resid_post", layers="all"), Read("resid_post", layer=4)]


def test_settings_say_what_the_engine_makes_of_its_options():
    assert engine_of("m", sites_at(2, 4)).settings(READS) == {
        "model": "m", "dtype": "bfloat16", "tokenizer": "m", "revision": None,
        "tokenizer_revision": None, "quantization": None, "hf_overrides": {}, "kv_cache": "auto",
        "layers": [[2, 4], [4]],
    }  # fmt: skip
    with pytest.raises(SpecError, match=r"reads\[1\].layers has 4; this engine does not tap"):
        engine_of("m", sites_at(2)).settings(READS)


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": torch.float32}, {"tokenizer": "other"}, {"revision": "main"},
        {"tokenizer_revision": "main"}, {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 2}}, {"hf_overrides": Engine.step},
        {"sites": sites_at(4)},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_settings_differ_if_rows_may(more):
    same = {"sites": sites_at(2, 4)}
    settings = engine_of("m", **same).settings(READS)
    assert settings == engine_of("m", **same).settings(READS)
    other = engine_of("m", **same | more).settings(READS)
    assert other != settings
    assert msgspec.json.decode(msgspec.json.encode(other)) == other


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (
            Read("resid_post", layers=[99]),
            r"reads\[0\]\.layers has 99; this model has layers 0 to 5",
        ),
        (
            Read("router_logits"),
            "has 'router_logits', and vLLM's configuration of this model has no experts",
        ),
    ],
    ids=["layer", "site"],
)
def test_a_read_of_what_the_model_does_not_have_is_refused_before_an_engine_starts(
    read, said, monkeypatch
):
    from vllm.v1.engine.llm_engine import LLMEngine

    def start(self, *args, **kwargs):
        raise AssertionError("an engine starts")

    monkeypatch.setattr(LLMEngine, "__init__", start)
    with pytest.raises((ConfigError, SpecError), match=said):
        OfflineEngine(str(TOYWORLD), {"max_model_len": 64}, [read])
    with pytest.raises(ScopeError, match="an engine starts"):
        OfflineEngine(str(TOYWORLD), {"max_model_len": 64}, [Read("resid_post", layers=[5])])
