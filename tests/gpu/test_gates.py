"""Gates and edits inside a layer, in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from tests.asking import run
from tests.checkpoints import row_error
from tests.engine.test_edits import EDITS, PROMPT, READ_ALL, params
from tests.engine.test_gates import FAR, GATES, W, gated
from tests.gpu.test_edits import TOLERANCE, llm, ref  # noqa: F401
from vllm_scope import Add, Gate, Read

pytestmark = pytest.mark.gpu

ALL = [Read("resid_post"), Read("resid_pre", layers=[0])]


@pytest.mark.parametrize("kind", EDITS)
def test_an_open_gate_is_the_plain_edit_and_a_closed_one_no_edit_bit_by_bit(kind, llm):  # noqa: F811
    ask, _ = EDITS[kind]
    for options in ({}, {"kind": "sigmoid", "sharpness": 2.0}):
        open_, shut = (Gate(W, 0, threshold=far, **options) for far in (-FAR, FAR))
        asked = [[ask(layer=1)], [ask(layer=1, gate=open_)], [], [ask(layer=1, gate=shut)]]
        spec = {"logprobs": None, "max_tokens": 12}
        outputs = run(llm, [PROMPT] * 4, [params(*some, *ALL, **spec) for some in asked])
        for one, other in (outputs[:2], outputs[2:]):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            for stream in one.scope.keys():
                assert torch.equal(one.scope[stream], other.scope[stream]), stream


@pytest.mark.parametrize("across", [False, True], ids=["same-place", "across-layers"])
@pytest.mark.parametrize("kind", GATES)
def test_a_gate_has_the_value_of_its_row(kind, across, llm):  # noqa: F811
    options, value = GATES[kind]
    gate = Gate(W, 0 if across else 1, name="g", **options)
    edit = Add(W, layer=1, gate=gate, scale=2.0)
    before = Read("resid_post", layers=[gate.layer], when="before")
    for output in run(llm, [PROMPT] * 3, params(edit, before, logprobs=None, max_tokens=12)):
        rows = output.scope["resid_post", gate.layer, "before"].float()
        wanted = value(rows)
        got = output.scope.scores["g"]
        # The gate saw the row in float32, the reader gets it rounded.
        agree = (got - wanted).abs() < 2e-2
        assert agree.float().mean() > 0.9, (got, wanted)
        assert 0.02 < float(got.mean()) < 0.98, "the gate is always open or always closed"


@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_with_a_smooth_gate_in_a_graph_equals_a_hook(kind, llm, ref):  # noqa: F811
    ask, mean = EDITS[kind]
    options, value = GATES["sigmoid"]
    gate = Gate(W, 0, **options)
    edits, _ = gated(
        ("resid_post", 0), ("resid_post", 1),
        lambda x: value(x.cpu()).to(x.device), lambda x: mean(x.cpu()).to(x.device),
    )  # fmt: skip
    spec = params(ask(layer=1, gate=gate), *READ_ALL, logprobs=None, max_tokens=12)
    for output in run(llm, [PROMPT] * 3, spec):
        streams, _ = ref.edited([*PROMPT, *output.outputs[0].token_ids][:-1], edits)
        for stream in output.scope.keys():
            if stream[0] != "embed":
                error = row_error(output.scope[stream], streams[stream])
                assert error <= TOLERANCE, (stream, error)
