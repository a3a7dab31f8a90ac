"""Every edit equals a Hugging Face model edited by a hook at the same place."""

from __future__ import annotations

import pytest
import torch

from tests.asking import run
from tests.checkpoints import reference, row_error
from tests.conftest import local_engine, long_except
from vllm_scope import Ablate, Add, Clamp, Probe, Read, Replace, scope
from vllm_scope.program.table_rows import OpList

HIDDEN = 128
SITES = ("resid_pre", "resid_mid", "resid_post")
ENGINE = {"dtype": "float32", "additional_config": {"scope": {"sites": ["embed", *SITES]}}}
READ_ALL = [Read(site) for site in ("embed", *SITES)]
PROMPT = list(range(30, 70))


def direction(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))


V, D = direction(1, 3.0), direction(2)
UNIT = D / D.norm()
ROWS = torch.stack([direction(10 + i, 2.0) for i in range(3)])


def _along(x: torch.Tensor) -> torch.Tensor:
    return (x @ UNIT)[:, None]


def _replaced(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[[0, 5, len(PROMPT) - 1]] = ROWS
    return x


#: name -> (how a caller asks, what it means)
EDITS = {
    "add": (lambda **at: Add(V, scale=0.7, **at), lambda x: x + 0.7 * V),
    "norm-matched-add": (
        lambda **at: Add(V, scale=0.5, norm_match=True, **at),
        lambda x: x + 0.5 * x.norm(dim=1, keepdim=True) * V / V.norm(),
    ),
    "ablate": (lambda **at: Ablate(D, **at), lambda x: x - _along(x) * UNIT),
    "clamp": (
        lambda **at: Clamp(D, lo=-0.2, hi=0.3, **at),
        lambda x: x + (_along(x).clamp(-0.2, 0.3) - _along(x)) * UNIT,
    ),
    "part-of-a-clamp": (
        lambda **at: Clamp(D, lo=-0.2, hi=0.3, strength=0.4, **at),
        lambda x: x + 0.4 * (_along(x).clamp(-0.2, 0.3) - _along(x)) * UNIT,
    ),
    "replace": (lambda **at: Replace(ROWS, positions=[0, 5, -1], **at), _replaced),
}


def params(*actions, **options):
    from vllm import SamplingParams

    defaults = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "detokenize": False}
    extra = scope(*actions) if actions else None
    return SamplingParams(**(defaults | {"logprobs": 5} | options), extra_args=extra)


def check(output, ref, edits, logprobs=2e-3):
    """Rows of every site, tokens and logprobs equal the edited reference's."""
    (completion,) = output.outputs
    ids = [*output.prompt_token_ids, *completion.token_ids]
    streams, logits = ref.edited(ids[:-1], edits)
    result = completion.scope
    assert result.status == "complete", (result, result.error)
    for stream in result.keys():
        if stream[0] == "embed":
            continue
        rows = result[stream].flatten(1)  # of heads
        error = row_error(rows, streams[stream][result.positions(*stream)])
        assert error <= 1e-4, (stream, error)
    check_logprobs(completion, logits[len(output.prompt_token_ids) - 1 :], logprobs)


def check_logprobs(completion, logits, within=2e-3):
    wanted = logits.log_softmax(-1)
    for i, found in enumerate(completion.logprobs or []):
        for token, entry in found.items():
            assert entry.logprob == pytest.approx(float(wanted[i, token]), abs=within), i


@pytest.fixture(
    scope="module",
    params=long_except(["llama", "qwen3", "gemma2", "gemma3", "gpt2"], "llama", "gpt2"),
)
def family(request, checkpoints):
    path = checkpoints(request.param)
    with local_engine(path, **ENGINE) as llm:
        yield llm, reference(path, torch.float32)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_equals_a_hook_at_the_same_place(kind, site, family):
    llm, ref = family
    ask, mean = EDITS[kind]
    (output,) = run(llm, [PROMPT], params(ask(site=site, layer=1), *READ_ALL))
    check(output, ref, [(site, 1, mean)])
    (plain,) = run(llm, [PROMPT], params(max_tokens=1))
    assert plain.outputs[0].logprobs != output.outputs[0].logprobs[:1], "the edit did nothing"


def test_the_worker_uploads_the_programs_that_enginecore_made_in_its_process(family, monkeypatch):
    llm, ref = family
    made, original = [], OpList.at
    monkeypatch.setattr(OpList, "at", lambda *args: made.append(args) or original(*args))
    places = range(20)  # one program each
    edits = [Add(V, layer=1, scale=0.1 * (i + 1), tokens=[i]) for i in places]
    (output,) = run(llm, [PROMPT], params(*edits, *READ_ALL))
    steps = torch.tensor([0.1 * (i + 1) for i in places])[:, None] * V
    check(output, ref, [("resid_post", 1, lambda x: torch.cat((x[:20] + steps, x[20:])))])
    assert len(made) == 1


def test_edits_of_one_site_apply_in_the_order_given(family):
    llm, ref = family
    add, ablate = EDITS["add"], EDITS["ablate"]
    for first, second in ((add, ablate), (ablate, add)):
        edits = [first[0](layer=0), second[0](layer=0)]
        (output,) = run(llm, [PROMPT], params(*edits, *READ_ALL))
        check(output, ref, [("resid_post", 0, first[1]), ("resid_post", 0, second[1])])


def test_edits_at_every_site_and_layer_at_once(family):
    llm, ref = family
    ask, mean = EDITS["add"]
    (output,) = run(llm, [PROMPT], params(*(ask(site=s, layer="all") for s in SITES), *READ_ALL))
    check(output, ref, [(site, layer, mean) for site in SITES for layer in range(3)])


def test_a_read_looks_before_or_after_the_edits_of_its_own_site(family):
    llm, ref = family
    sides = [Read("resid_post", layers=[0], when=when) for when in ("before", "after")]
    entry = Read("resid_pre", layers=[1], when="after")
    actions = [Add(V, layer=0), Ablate(D, site="resid_pre", layer=1), *sides, entry]
    (output,) = run(llm, [PROMPT], params(*actions))
    ids = [*PROMPT, *output.outputs[0].token_ids][:-1]
    edits = [("resid_post", 0, lambda x: x + V), ("resid_pre", 1, EDITS["ablate"][1])]
    streams, _ = ref.edited(ids, edits)
    result = output.scope
    assert row_error(result["resid_post", 0, "after"], streams["resid_post", 0]) <= 1e-4
    assert row_error(result["resid_pre", 1], streams["resid_pre", 1]) <= 1e-4
    before = result["resid_post", 0, "before"]
    assert row_error(before + V, streams["resid_post", 0]) <= 1e-4
    assert torch.equal(result["resid_post", 0], result["resid_post", 0, "after"])


def test_scores_equal_a_dot_product_with_the_rows_that_a_read_returns(family):
    llm, _ = family
    probes = [
        Probe(direction(20 + i), bias=0.5 * i, site=site, layer=layer, name=f"{site}-{layer}")
        for i, (site, layer) in enumerate((s, k) for s in SITES for k in range(3))
    ]
    edits = [EDITS["add"][0](layer=1), EDITS["ablate"][0](site="resid_mid", layer=2)]
    (output,) = run(llm, [PROMPT], params(*edits, *probes, *READ_ALL))
    result = output.scope
    assert list(result.scores) == [p.name for p in probes]
    for i, probe in enumerate(probes):
        stream = (probe.site, probe.layers[0])
        rows = result[stream].double()
        expected = rows @ direction(20 + i).double() + 0.5 * i
        found = result.scores[probe.name]
        assert found.dtype == torch.float32
        assert result.scores.positions(probe.name).tolist() == list(range(len(rows)))
        scale = rows.norm(dim=1) * direction(20 + i).double().norm()
        assert float(((found - expected).abs() / scale).max()) < 1e-5, probe.name
