"""A CUDA graph without the taps that do nothing computes what the whole one computes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests import asking
from tests.asking import run
from tests.checkpoints import check_completion, reference
from tests.conftest import local_engine
from tests.gpu.test_rows import IDS, OPTIONS
from vllm_scope import Add, Read, scope
from vllm_scope.graph.tap import driver, graphs, op
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.program.operations import Program
from vllm_scope.request.sites import point_of

pytestmark = pytest.mark.gpu
WIDTH, NUM_TAPS, NUM_ROWS = 256, 12, 5
READ_ONE, READ_ALL = scope(Read("resid_post", layers=[1])), scope(Read("resid_post"), Read("embed"))
params = partial(asking.params, max_tokens=24)


@pytest.fixture
def launched(monkeypatch):
    """The graphs without some taps that are launched; each is made at its first replay."""
    monkeypatch.setattr(graphs, "PAYS", 0)
    found, launch = [], driver.Executable.launch

    def launching(executable, stream):
        found.append(executable)
        launch(executable, stream)

    monkeypatch.setattr(driver.Executable, "launch", launching)
    return found


class _Route:
    active = True

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    @property
    def acting(self):
        return self._tables.acting

    def begin_tap(self, tap):
        return 0, 0

    def end_tap(self, tap):
        pass


def test_a_captured_graph_leaves_out_what_does_nothing(launched):
    op.register()
    boundaries = tuple(range(1, NUM_TAPS + 1))
    device = torch.device("cuda")
    tables = Tables(boundaries, NUM_ROWS, WIDTH, Widths((2 * WIDTH,)), device)
    arena = torch.zeros((512, SLOT_BYTES // 2), dtype=torch.bfloat16, device=device)
    given = torch.randn(NUM_ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    weight = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) / 16
    hidden, out = torch.empty_like(given), torch.empty_like(given)
    route = _Route(tables)
    op.connect(tables.taps, route)

    def forward():
        hidden.copy_(given)
        for tap in range(NUM_TAPS):
            torch.ops.vllm_scope.tap(
                hidden, None, arena, tables.tokens, tables.programs, tables.ops, tables.vectors,
                tables.taps[tap], tables.host,
            )  # fmt: skip
            torch.mm(hidden, weight, out=out)
            hidden.copy_(out)

    rows = np.arange(NUM_ROWS)
    programs = [
        tables.program_id(Program.reading((point_of(tap + 1, 0),)), hold=True)
        for tap in range(NUM_TAPS)
    ]

    def load(*some):
        ids = np.array([programs[some[i % len(some)]] for i in range(NUM_ROWS)], np.int32)
        tables.load_step(rows, ids, 0 * rows, rows * tables.num_slots[programs[0]])

    try:
        with graphs.captured():
            forward()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                forward()
        assert isinstance(graph, graphs.TappedGraph)
        assert len(graph._nodes) == NUM_TAPS
        found = {}
        for turn in range(6):
            for name, some in (("none", ()), ("one", (1,)), ("two", (1, 9)), ("other", (4,))):
                arena.zero_()
                load(*some) if some else tables.clear_step()
                graph.replay()
                torch.cuda.synchronize()
                now = hidden.clone(), arena.clone()
                for one, first in zip(now, found.setdefault(name, now), strict=True):
                    assert torch.equal(one, first), (turn, name)
        assert len(set(launched)) == 4
        # Only the very first replay was of the whole graph.
        assert len(launched) == 6 * 4 - 1
    finally:
        op.disconnect(tables.taps)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_rows_and_edits_where_few_taps_act(runner, mode, llama, launched, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    ref = reference(llama, torch.bfloat16)
    sites = ["embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v"]
    config = {
        "compilation_config": {"cudagraph_mode": mode},
        "additional_config": {"scope": {"sites": sites}},
    }
    with local_engine(llama, **OPTIONS | config) as llm:
        hidden_size = llm.model_config.get_hidden_size()
        vector = np.random.default_rng(0).normal(size=hidden_size).astype(np.float32)
        edit = scope(Add(vector, layer=1, scale=4.0))
        plain = run(llm, IDS, [params(None)] * len(IDS))
        edited = run(llm, IDS, [params(edit)] * len(IDS))
        before = len(launched)
        for spec in (READ_ONE, READ_ALL, READ_ONE):
            for output in run(llm, IDS, [params(spec)] * len(IDS)):
                ids = list(output.outputs[0].token_ids)
                check_completion(output.scope, output.prompt_token_ids, ids, ref)
        assert len(launched) > before > 0
        for spec, expected in ((None, plain), (edit, edited)):
            found = run(llm, IDS, [params(spec)] * len(IDS))
            for one, other in zip(found, expected, strict=True):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
