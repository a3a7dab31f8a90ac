"""What a request may ask of an engine, as its front-end checks it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.unit.strategies import sentence
from vllm_scope import (
    Add,
    CompatError,
    Features,
    LensTopK,
    Probe,
    Read,
    Replace,
    Spec,
    SpecError,
    scope,
)
from vllm_scope.config import ScopeConfig
from vllm_scope.engine.frontend import connection as connection_of_engine
from vllm_scope.engine.frontend.connection import (
    RETRY_S,
    Connection,
    connect_async,
    connections,
    needs_connection,
)
from vllm_scope.engine.model import check_engine
from vllm_scope.engine.params import names_module
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.errors import ConfigError
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.request.actions.base import Module
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Place, Sites
from vllm_scope.results.allocator import memory_bytes
from vllm_scope.results.inbox import inbox, share_memory

SITES = Sites(2, 4, "float32", (0, 2, 4))
IDS = np.arange(5)


def _connection(optimistic: bool) -> Connection:
    limits = Limits((16,), 0, 100, 100, 100, 100, optimistic)
    return Connection(SITES, None, 1, 1.0, limits, {}, {})


def _replace(positions: list[int]):
    rows = np.arange(1.0, 1.0 + 4 * len(positions)).reshape(-1, 4)
    return Spec(edits=(Replace(rows, positions=positions, layer=1),)).resolve(SITES)


@pytest.mark.parametrize(
    ("positions", "max_tokens"),
    [
        pytest.param([5, 6], 3, id="every-generated-one"),
        pytest.param([0, 5, 6], 3, id="and-one-of-the-prompt"),
        pytest.param([5, 6], 9, id="some-of-them"),
    ],
)
def test_drafts_and_a_replacement_of_several_generated_tokens_do_not_mix(positions, max_tokens):
    said = sentence(lambda: _connection(True).check(_replace(positions), IDS, max_tokens))
    assert "edits[0].positions has several generated tokens" in said
    assert "start without speculation" in said
    _connection(False).check(_replace(positions), IDS, max_tokens)


def _after_an_edit_of_the_same_tokens(positions: list[int]):
    rows = np.arange(1.0, 1.0 + 4 * len(positions)).reshape(-1, 4)
    add = Add(np.ones(4), layer=0, tokens=positions)
    return Spec(edits=(add, Replace(rows, positions=positions, layer=1))).resolve(SITES)


def test_a_replacement_is_checked_after_another_edit_of_the_same_tokens():
    asked = _after_an_edit_of_the_same_tokens([-1, 4])
    said = sentence(lambda: _connection(False).check(asked, IDS, 1))
    assert said == "edits[1].positions names a position twice."
    asked = _after_an_edit_of_the_same_tokens([5, 6])
    said = sentence(lambda: _connection(True).check(asked, IDS, 3))
    assert "edits[1].positions has several generated tokens" in said


@pytest.mark.parametrize(
    ("lens", "max_tokens", "rows"),
    [
        pytest.param([LensTopK()], 1, 10, id="a-prompt"),
        pytest.param([LensTopK()], 10**12, 2 * (10**12 + 4), id="as-many-as-one-likes"),
        pytest.param([LensTopK()], 4, 16, id="the-last-token-is-not-processed"),
        pytest.param([LensTopK(layer=1, tokens=[0, -1])], 9, 2, id="positions"),
        pytest.param([LensTopK(layer=0, tokens="generated")], 9, 8, id="generated"),
        pytest.param([LensTopK(layer=1, tokens="last")], 9, 9, id="the-end-is-not-known"),
        pytest.param([LensTopK(), LensTopK(layer=1, name="b", tokens="prompt")], 2, 17, id="two"),
    ],
)
def test_a_lens_has_as_many_rows_as_the_operator_allows(lens, max_tokens, rows):
    found, asked = _connection(False), Spec(lens=tuple(lens)).resolve(SITES)
    found.lens_rows = rows
    found.check(asked, IDS, max_tokens)
    found.lens_rows = rows - 1
    with pytest.raises(SpecError) as caught:
        found.check(asked, IDS, max_tokens)
    said = str(caught.value)
    assert said.startswith(
        f"the request's lenses are applied to {rows:,} rows (tokens x layers, with"
    )
    assert f"at most {rows - 1:,} (additional_config['scope'].lens_rows)" in said


def test_the_operator_says_how_many_rows_a_lens_has():
    async def run(options):
        engine = Engine()
        engine.vllm_config.additional_config["scope"] = options
        await connect_async(engine)
        return connections.of(engine.output_processor).lens_rows

    assert asyncio.run(run({})) == 65_536
    assert asyncio.run(run({"lens_rows": 7})) == 7
    for bad in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="lens_rows"):
            ScopeConfig.parse({"lens_rows": bad})


def test_an_edit_of_several_layers_counts_once_in_the_paths_of_errors():
    edits = (Add([1.0] * 4, layer=[0, 1]), Add([1.0] * 4, layer=1, tokens=[99]))
    asked = Spec(edits=edits).resolve(SITES)
    said = sentence(lambda: _connection(False).check(asked, IDS, 3))
    assert said.startswith("edits[1].tokens")


@pytest.mark.parametrize(
    ("action", "named"),
    [
        (Add("mine", layer=0), True),
        (Add(Module("mine"), layer=0), True),
        (Probe("mine", layer=0, name="p"), True),
        (Add([1.0] * 4, layer=0), False),
        (Read("embed"), False),
    ],
)
def test_a_spec_that_names_a_module_is_known_by_its_text(action, named):
    assert names_module(scope(action)["scope"]) == named


@pytest.mark.parametrize("text", ['{"edits":[{"vector" :  "mine"}]}', '{"a":[{"weight":"m"}]}'])
def test_a_string_in_place_of_numbers_is_a_modules_name(text):
    assert names_module(text)


@pytest.mark.parametrize("positions", [[0, -1], [4], [5], [-2, 5]])
def test_with_drafts_tokens_of_the_prompt_and_the_only_generated_one_are_replaced(positions):
    _connection(True).check(_replace(positions), IDS, 2)


def test_engines_whose_rows_are_not_in_the_order_of_the_plan_have_no_taps():
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
        speculative_config=None,
        model_config=SimpleNamespace(runner_type="generate"),
    )
    check_engine(config)
    config.speculative_config = SimpleNamespace(enable_adaptive_verification=True)
    with pytest.raises(CompatError, match="adaptive verification"):
        check_engine(config)


def test_deepseek_in_float16_scales_its_stream_and_has_no_taps():
    """vLLM divides it by routed_scaling_factor there; Hugging Face does not."""
    import torch
    from torch import nn
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer, DeepseekV2Model

    from vllm_scope.engine.model import anatomy_of

    def bare(made_of: type) -> nn.Module:
        made = made_of.__new__(made_of)
        nn.Module.__init__(made)
        return made

    model = nn.Module()
    model.model = bare(DeepseekV2Model)
    model.model.layers = nn.ModuleList([bare(DeepseekV2DecoderLayer) for _ in range(2)])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
        speculative_config=None,
        model_config=SimpleNamespace(
            runner_type="generate", dtype=torch.bfloat16, get_total_num_hidden_layers=lambda: 2
        ),
    )
    assert sorted(anatomy_of(model, config).layers) == [0, 1]
    config.model_config.dtype = torch.float16
    with pytest.raises(CompatError, match="DeepseekV2DecoderLayer scales the stream in float16"):
        anatomy_of(model, config)


class Config(SimpleNamespace):
    """Can be referenced weakly, as vLLM's configuration can."""


class Processor:
    """vLLM's OutputProcessor."""


class Engine:
    """An AsyncLLM as far as connecting knows it: one worker, whose road is there or not."""

    def __init__(self) -> None:
        self.vllm_config = Config(
            additional_config={"scope": {}}, parallel_config=SimpleNamespace(_api_process_count=4)
        )
        self.output_processor = Processor()
        self.engine_core = self
        self.num_asked = 0
        self.reason: str | None = None

    async def call_utility_all_async(self, *_):
        self.num_asked += 1
        await asyncio.sleep(0.01)
        reply = {
            "reason": self.reason, "drains": True, "num_stages": 1, "sinks": {}, "modules": {},
            "lens": None, "lenses": {},
            "needs_tcp": False, "taps_here": [0, 2, 4],
            "sites": {**asdict(SITES), "boundaries": list(SITES.boundaries)},
            "limits": msgspec.to_builtins(_connection(False).limits),
        }  # fmt: skip
        return [[reply]]


def test_each_process_of_a_server_keeps_its_share_of_memory(monkeypatch):
    monkeypatch.delenv("VLLM_SCOPE_REUSE_MIB", raising=False)
    try:
        asyncio.run(connect_async(Engine()))
        assert inbox().allocator.most_bytes == memory_bytes() // 16
    finally:
        share_memory(1)


def test_requests_that_come_at_once_connect_once_and_again_after_rows_were_missing():
    async def ask(engine):
        if needs_connection(engine):
            await connect_async(engine)
        return connections.of(engine.output_processor)

    async def run():
        engine = Engine()
        found = await asyncio.gather(*(ask(engine) for _ in range(50)))
        assert engine.num_asked == 1
        assert all(one is found[0] for one in found)
        assert await ask(engine) is found[0]
        inbox().renew()
        leaving = asyncio.ensure_future(ask(engine))
        await asyncio.sleep(0)
        leaving.cancel()  # the others' connection does not go with it
        again = await asyncio.gather(*(ask(engine) for _ in range(50)))
        assert engine.num_asked == 2
        assert again[0] is not found[0]
        return engine

    asyncio.run(run())


def test_a_transport_that_fails_for_a_while_does_not_end_an_engine():
    async def run():
        engine = Engine()
        await connect_async(engine)
        first = connections.of(engine.output_processor)
        inbox().renew()
        engine.reason = "this worker cannot reach the front-end"
        await connect_async(engine)
        assert connections.of(engine.output_processor) is first
        assert first.reason is None
        assert not needs_connection(engine), "it is not asked again at once"
        assert 0 < first.retry_at - time.monotonic() <= RETRY_S
        first.retry_at = time.monotonic()
        assert needs_connection(engine)
        engine.reason = None
        await connect_async(engine)
        assert connections.of(engine.output_processor) is not first
        assert not needs_connection(engine)

    asyncio.run(run())


def test_the_programs_of_a_request_are_computed_once(monkeypatch):
    looked: list[int] = []
    original = RequestProgram._columns

    def columns(self, positions):
        looked.extend(positions.tolist())
        return original(self, positions)

    monkeypatch.setattr(RequestProgram, "_columns", columns)
    _connection(False).check(_replace([0, 2]), IDS, 3)
    in_prompt = [position for position in looked if position < len(IDS)]
    assert sorted(in_prompt) == list(range(len(IDS)))


def test_probes_of_whole_phases_are_looked_through_once_for_each_state_of_the_engine(monkeypatch):
    looked: list[Resolved] = []
    original = connection_of_engine.check_sinks
    monkeypatch.setattr(
        connection_of_engine, "check_sinks",
        lambda asked, sinks: (looked.append(asked), original(asked, sinks)),
    )  # fmt: skip
    asked = Spec(probes=(Probe([1.0] * 4, layer=0, name="p", to="files"),)).resolve(SITES)
    connection = _connection(False)
    connection.sinks = {"files": ["probes"]}
    for num_prompt in (1, 3, 5):
        connection.check(asked, IDS[:num_prompt], 3)
    assert looked == [asked]
    connection.sinks = {"files": ["reads"]}
    with pytest.raises(SpecError, match="takes reads, not probes"):
        connection.check(asked, IDS, 3)
    some = Spec(probes=(Probe([1.0] * 4, layer=0, name="p", tokens=[4]),)).resolve(SITES)
    connection.check(some, IDS, 3)
    with pytest.raises(SpecError, match="has 4; with this prompt"):
        connection.check(some, IDS[:1], 3)


def test_a_front_end_asks_again_about_names_that_were_known_before():
    connection, names = _connection(False), ("a", "b")
    known: Any = {name: {"streams": [["resid_post", 0]]} for name in names}
    assert connection.lacks(names)
    connection.learn_modules(known, connection.num_doubts)
    assert not connection.lacks(names)
    assert not connection.lacks(names)
    connection.doubt_modules()
    assert connection.lacks(names)
    connection.learn_modules({"a": known["a"]}, connection.num_doubts)
    assert connection.lacks(names)


FILES, TABLES = ["reads", "features", "edits", "some features"], ["features"]
ADD = Add([1.0] * 4, layer=0)
SAE: Any = SimpleNamespace(place=Place("resid_post", 0), d_sae=64, d_model=4, k=None)


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ((Features("toy", to="files"), ADD), None),
        ((Features("toy", to="tables"),), None),
        ((Features("toy", threshold=1.0, to="files"),), None),
        ((Features("toy", threshold=1.0, to="tables"),),
         "features[0].to is 'tables', which takes all features of an SAE; leave out indices and"),
        ((Features("toy", ), Features("toy", name="b", to="tables"), ADD),
         "features[1].to is 'tables', which takes no results of a request with edits, because"),
        ((LensTopK(), LensTopK(layers=[1], name="b", to="files")),
         "lens[1].to is 'files', which takes reads and features, not tokens of a lens; let"),
        ((LensTopK(layers=[1], to="tables"),),
         "lens[0].to is 'tables', which takes features, not tokens of a lens; let"),
        ((LensTopK(layers=[1], to="hook"), ADD), None),
        ((Read("resid_post", to="tables"),),
         "reads[0].to is 'tables', which takes features, not reads; let"),
    ],
)  # fmt: skip
def test_a_sink_gets_what_it_takes_alone(actions, said):
    connection = _connection(False)
    connection.sinks = {"files": FILES, "tables": TABLES, "hook": ["probes", "features", "edits"]}
    connection.lens_rows = 100
    asked = Spec.from_json(scope(*actions)["scope"]).of_engine({"toy": SAE}).resolve(SITES)
    if said is None:
        connection.check(asked, IDS, 3)
    else:
        assert sentence(lambda: connection.check(asked, IDS, 3)).startswith(said)
