"""A sweep and its table as JSON, and back."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from vllm_scope import KL, Cell, LogitDifference, Logprob, ScopeError, SpecError, Sweep
from vllm_scope.sweeps import wire
from vllm_scope.sweeps.table import SweepTable
from vllm_scope.sweeps.wire import AskedSweep, TableReader

METRIC = LogitDifference(" a", 7)
BODY = {
    "prompts": "x", "source": {"prompts": "y"}, "metric": {"kind": "logprob", "token": 3},
}  # fmt: skip


def sent(asked):
    return AskedSweep.from_json(json.loads(json.dumps(asked.to_json())))


@pytest.mark.parametrize(
    "sweep",
    [
        pytest.param(Sweep("other", metric=METRIC), id="defaults"),
        pytest.param(Sweep([{"prompt_token_ids": [4, 5]}], metric=KL(), layers=[1, 2]), id="ids"),
        pytest.param(
            Sweep({"module": "m"}, metric=Logprob(["a", 2]), mode="add", scale=2), id="module"
        ),
        pytest.param(
            Sweep("o", metric=METRIC, site="z", heads=[0], positions=[-1], together=True),
            id="heads",
        ),
        pytest.param(Sweep("o", metric=METRIC, receivers="logits"), id="to-logits"),
        pytest.param(Sweep("o", metric=METRIC, receivers=[["q", 2, 1], ["v", 1]]), id="to-heads"),
    ],
)  # fmt: skip
def test_a_sweep_arrives_as_it_was(sweep):
    found = sent(AskedSweep(["one", {"prompt_token_ids": [1, 2]}], sweep, True))
    assert found.prompts == ["one", {"prompt_token_ids": [1, 2]}]
    assert found.stream
    assert found.sweep.layers == (None if sweep.layers == "all" else sweep.layers)
    for name in ("metric", "site", "positions", "heads", "mode", "scale", "together", "receivers"):
        assert getattr(found.sweep, name) == getattr(sweep, name)
    assert found.sweep.module == sweep.module
    source = found.sweep.source
    assert (source[0] if isinstance(sweep.source, str) else source) == sweep.source


def test_a_prompt_of_another_form_does_not_travel():
    for prompts, source in (({"prompt": "x"}, "y"), (["x"], [{"prompt": "y"}])):
        with pytest.raises(SpecError, match=r"a prompt is \{'prompt': '.'\}; it must be a text or"):
            AskedSweep(prompts, Sweep(source, metric=METRIC)).to_json()


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 2, 2)])
def test_rows_arrive_as_float32(shape):
    rows = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / 7
    found = sent(AskedSweep(["x"], Sweep(rows, metric=METRIC, mode="add")))
    assert np.array_equal(found.sweep.source, rows.astype(np.float32))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"prompts": [[]]}, "prompts[0] is []"),
        ({"prompts": [[1.5]]}, "prompts[0] is [1.5]"),
        ({"prompts": [True]}, "prompts[0] is True"),
        ({"source": {}}, "one of prompts, rows, module"),
        ({"source": {"rows": [float("nan")]}}, "NaN or infinite"),
        ({"source": {"prompts": "a", "module": "b"}}, "one of prompts, rows, module"),
        ({"metric": {"kind": "kl", "token": 1}}, "metric has 'token'"),
        ({"metric": {"kind": ["kl"]}}, "whose kind is one of"),
        ({"together": "yes"}, "together is 'yes'"),
        ({"scale": None}, "Sweep.scale is None"),
        ({"site": 5}, "site"),
        ({"layers": "some"}, "Sweep.layers is 'some'"),
        ({"positions": None}, "Sweep.positions is None"),
    ],
)
def test_a_wrong_body_is_refused(changed, sentence):
    with pytest.raises(SpecError, match=re.escape(sentence)):
        AskedSweep.from_json(BODY | changed)


@pytest.mark.parametrize("body", [None, [], "x", {"prompts": "x"}, BODY | {"more": 1}])
def test_a_body_of_another_form_is_refused(body):
    with pytest.raises(SpecError, match="the body"):
        AskedSweep.from_json(body)


def table():
    return SweepTable.empty([["a", "b"], ["c"]], [2, 5], [0, -1], None, "KL", "resid_pre", "add")


def test_a_table_arrives_cell_by_cell():
    here, there = table(), TableReader()
    here.errors[1, 0, 1] = "it is zero."
    cells = [Cell(0, 5, -1, None, 1.5), Cell(1, 2, -1, None, np.nan)]
    for cell in cells:
        here.values[here.index_of(cell)] = cell.value
    here.plain[:], here.source[0] = 0.25, 0.5
    events = [
        {"table": wire.head(here), "num_cells": 8},
        {"cells": [wire.cell(here, one) for one in cells]}, wire.end(here, 8),
    ]  # fmt: skip
    seen = [one for event in events for one in there.take(json.loads(json.dumps(event)))]
    np.testing.assert_equal(seen, cells)
    found = there.table
    for name in ("values", "plain", "source"):
        np.testing.assert_array_equal(getattr(found, name), getattr(here, name))
    assert (found.errors, found.coords, found.tokens) == (here.errors, here.coords, here.tokens)
    whole = wire.whole(here, 8)
    assert whole["values"] == [None, None, None, 1.5, None, None, None, None]
    assert whole["errors"] == [{"at": [1, 0, 1], "error": "it is zero."}]
    assert whole["counts"] == {"cells": 8, "failed": 1}


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([{"cells": []}], id="no-table"),
        pytest.param([{"table": wire.head(table()) | {"shape": [9]}}], id="other-shape"),
        pytest.param(
            [{"table": wire.head(table())}, {"cells": [wire.cell(table(), Cell(0, 2, 0, None, 1))
                                                       | {"layer": 3}]}], id="no-such-cell"
        ),
        pytest.param([{"table": wire.head(table())}, {"counts": {}, "plain": [1.0] * 7}],
                     id="too-many-plain"),
        pytest.param([{"table": 5}], id="number"),
    ],
)  # fmt: skip
def test_a_servers_table_of_another_form_is_refused(events):
    reader = TableReader()
    for event in events[:-1]:
        reader.take(event)
    with pytest.raises(ScopeError, match="the server's"):
        reader.take(events[-1])


def test_a_table_that_is_far_larger_than_its_names_is_refused_before_it_is_made():
    names = list(range(300))
    head = wire.head(table()) | {
        "shape": [300] * 4, "tokens": [[]] * 300, "layers": names, "positions": names,
        "heads": names,
    }  # fmt: skip
    with pytest.raises(ScopeError, match="the server's table has 8,100,000,000 values; at most 13"):
        TableReader().take({"table": head})


def test_the_client_of_sweeps_loads_neither_torch_nor_vllm():
    code = (
        "import sys, vllm_scope.client, vllm_scope.sweeps.wire; "
        "assert not {'torch', 'vllm'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
