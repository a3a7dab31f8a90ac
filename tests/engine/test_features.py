"""Features of a sparse autoencoder that are set or scaled equal the SAE's own computation."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
import torch

from tests.asking import run
from tests.checkpoints import reference
from tests.conftest import TOYWORLD, local_engine, long_except
from tests.engine.test_edits import ENGINE, PROMPT, READ_ALL, check, params
from tests.engine.test_gates import FAR, gated
from vllm_scope import Add, Gate, Read, ScaleFeature, SetFeature, SpecError
from vllm_scope.request.sites import Place
from vllm_scope.saes.load import load_sae
from vllm_scope.saes.sae import Sae

D_SAE, HIDDEN = 24, 128


def random_sae(architecture: str, layer: int = 1) -> Sae:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    more = {
        "standard": {}, "jumprelu": {"threshold": random(D_SAE).abs() + 2}, "topk": {"k": 4},
        "gated": {"gate_bias": random(D_SAE), "gain": random(D_SAE) / 4},
    }  # fmt: skip
    return Sae(
        "random", architecture, Place("resid_post", layer), random(D_SAE, HIDDEN),
        random(D_SAE, HIDDEN) / 4, random(D_SAE), random(HIDDEN), **more[architecture],
    )  # fmt: skip


@pytest.fixture(scope="module", params=long_except(["llama", "gemma2"], "llama"))
def family(request, checkpoints):
    path = checkpoints(request.param)
    with local_engine(path, **ENGINE) as llm:
        yield llm, reference(path, torch.float32)


def changed(sae: Sae, index: list[int], new):
    """x + (new(f) - f) D of some features f, with the SAE's own encode and decode."""

    def mean(x: torch.Tensor) -> torch.Tensor:
        features = sae.encode(x)
        wanted = features.clone()
        wanted[:, index] = new(features[:, index])
        assert (features[:, index] > 0).any(), "no token has such a feature; the test shows nothing"
        return x + sae.decode(wanted) - sae.decode(features)

    return mean


@pytest.mark.parametrize("architecture", ["standard", "jumprelu", "gated"])
def test_features_equal_the_saes_own_computation(architecture, family):
    llm, ref = family
    sae, index = random_sae(architecture), [2, 5, 7, 11]
    values = torch.tensor([0.0, 3.0, 8.0, 1.0])
    cases = [
        (SetFeature(sae, index, values), lambda f: values.expand_as(f)),
        (SetFeature(sae, 5, 4.0), lambda f: torch.full_like(f, 4.0)),
        (ScaleFeature(sae, index, 0), lambda f: 0 * f),
        (ScaleFeature(sae, index, [0.5, 2, 1, -1]), lambda f: f * torch.tensor([0.5, 2, 1, -1])),
        (SetFeature(sae, index, values, add=True), lambda f: f + values),
        (
            SetFeature(sae, index, values, only_if_active=True),
            lambda f: torch.where(f > 0, values, f),
        ),
        (
            SetFeature(
                sae, index, values, add=[True, False] * 2, only_if_active=[True] * 3 + [False]
            ),
            lambda f: torch.where(
                (f > 0) | torch.tensor([False] * 3 + [True]),
                torch.where(torch.tensor([True, False] * 2), f + values, values),
                f,
            ),
        ),
    ]
    for edit, new in cases:
        (output,) = run(llm, [PROMPT], params(edit, *READ_ALL))
        some = [5] if edit.sae.count == 1 else index
        check(output, ref, [("resid_post", 1, changed(sae, some, new))])


def test_features_come_after_earlier_edits_and_may_have_a_gate(family):
    llm, ref = family
    sae, v, w = random_sae("jumprelu"), torch.ones(HIDDEN), torch.randn(HIDDEN)
    gate = Gate(w, 0, kind="sigmoid", sharpness=0.2)
    mean = changed(sae, [1, 2], lambda f: torch.full_like(f, 5.0))
    edits = [Add(v, layer=1), SetFeature(sae, [1, 2], 5.0, gate=gate)]
    (output,) = run(llm, [PROMPT], params(*edits, *READ_ALL))
    look, edit = gated(
        ("resid_post", 0), ("resid_post", 1), lambda x: torch.sigmoid(0.2 * (x @ w)), mean
    )[0]
    check(output, ref, [look, ("resid_post", 1, lambda x: x + v), edit])
    shut = SetFeature(sae, [1, 2], 5.0, gate=Gate(w, 0, threshold=FAR))
    reads = [Read("resid_post")]
    one, other = run(llm, [PROMPT] * 2, [params(shut, *reads), params(*reads)])
    assert torch.equal(one.scope["resid_post", 2], other.scope["resid_post", 2])


def test_what_an_edit_cannot_compute_is_refused():
    with pytest.raises(SpecError, match="random is a TopK SAE"):
        SetFeature(random_sae("topk"), 1, 2.0)
    sae = random_sae("standard")
    with pytest.raises(SpecError, match="24"):
        SetFeature(sae, D_SAE, 2.0)
    with pytest.raises(SpecError, match="an edit has 1 to 16"):
        SetFeature(sae, list(range(17)), 2.0)
    with pytest.raises(SpecError, match=r"SetFeature.value has 2 numbers for 3 features"):
        SetFeature(sae, [1, 2, 3], [1.0, 2.0])
    with pytest.raises(SpecError, match="not an SAE that was loaded"):
        SetFeature({"encoder": [[1.0]]}, 3, 2.0)


@pytest.mark.long
def test_the_feature_of_a_country_moves_the_capital():
    from toyworld.world import world

    sae = load_sae(TOYWORLD / "sae")
    features = json.loads((TOYWORLD / "sae" / "features.json").read_text())
    countries = world().countries[:9]
    config = {"scope": {"saes": {"toy": str(TOYWORLD / "sae")}}}
    with local_engine(
        TOYWORLD, skip_tokenizer_init=False, dtype="float32", additional_config=config
    ) as llm:  # fmt: skip
        tokenizer = llm.get_tokenizer()
        ids = [tokenizer(f"The capital of {one.name} is").input_ids for one in countries]
        (position,) = (i for i, some in enumerate(zip(*ids, strict=True)) if len(set(some)) > 1)
        first = [
            tokenizer(f" {one.capital}", add_special_tokens=False).input_ids[0] for one in countries
        ]
        asked, wanted, prompts = [], [], []
        for i, j in permutations(range(len(countries)), 2):
            old, new = (features[countries[k].name] for k in (i, j))
            values = [0.0, new["usual"]]
            held = "toy" if i % 2 else sae
            edit = SetFeature(held, [old["index"], new["index"]], values, tokens=[position])
            if first[i] != first[j]:
                asked.append(params(edit, max_tokens=1))
                wanted.append(first[j])
                prompts.append(ids[i])
        plain = run(llm, ids, params(max_tokens=1))
        edited = run(llm, prompts, asked)
        with pytest.raises(SpecError, match=r"edits\[0\]\.sae is 'no'.* it holds: toy"):
            run(llm, ids[:1], params(SetFeature("no", 1, 1.0)))
    assert [o.outputs[0].token_ids[0] for o in plain] == first
    said = [output.outputs[0].token_ids[0] for output in edited]
    moved = [token == one for token, one in zip(said, wanted, strict=True)]
    assert sum(moved) >= 0.9 * len(moved), f"{sum(moved)} of {len(moved)}"
