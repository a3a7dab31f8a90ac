"""The steering fork's clamps of features equal Hugging Face with hooks that compute the SAE."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import reference
from tests.conftest import TOYWORLD, local_engine
from tests.engine.test_edits import check
from vllm_scope import Read, SpecError, scope
from vllm_scope.compat.steering_http import LLM, SamplingParams

V = torch.randn(256, generator=torch.Generator().manual_seed(1)) / 4
PROMPT = "The capital of Ritova is"
COUNTRIES = json.loads((TOYWORLD / "sae" / "features.json").read_text())
RITOVA, WIMETH = (COUNTRIES[name]["index"] for name in ("Ritova", "Wimeth"))


@pytest.fixture(scope="module")
def sae():
    found = load_file(TOYWORLD / "sae" / "sae_weights.safetensors")
    return {name: tensor.float() for name, tensor in found.items()}


def activations(sae, x):
    """As SAELens defines a JumpReLU SAE, without this package."""
    before = (x - sae["b_dec"]) @ sae["W_enc"] + sae["b_enc"]
    return torch.relu(before) * (before > sae["threshold"])


@pytest.fixture(scope="module")
def llm():
    saes = {"toy": str(TOYWORLD / "sae")}
    with local_engine(
        TOYWORLD, LLM, dtype="float32", skip_tokenizer_init=False, max_model_len=256,
        additional_config={"scope": {"saes": saes}},
    ) as llm:  # fmt: skip
        yield llm


@pytest.fixture(scope="module")
def common(llm, sae):
    """The feature that is active at the most generated tokens."""
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, extra_args=scope(Read("resid_post"))
    )
    (out,) = llm.generate(PROMPT, params, use_tqdm=False)
    rows = out.scope["resid_post", 0][len(out.prompt_token_ids) :]
    active = (activations(sae, rows) > 0).sum(0)
    active[[RITOVA, WIMETH]] = 0
    assert 0 < active.max() < len(rows)
    return int(active.argmax())


def entry(feature, kind, value, active=False):
    return {"feature_idx": feature, "kind": kind, "value": value, "only_if_active": active}


def spec(*clamps, **more):
    return {"module_name": "toy", "clamps": {"post_block": {"0": list(clamps)}}, **more}


#: name -> (specs, vectors beside them); of "common" the feature stands in its place.
CASES = {
    "absolute": [spec(entry(RITOVA, "absolute", 0.0), entry(WIMETH, "absolute", 39.8))],
    "absolute-if-active": [
        spec(entry(RITOVA, "absolute", 5.0, True), entry(WIMETH, "absolute", 39.8, True))
    ],
    "additive": [spec(entry(WIMETH, "additive", 6.0), entry(RITOVA, "additive", -9.0))],
    "additive-if-active": [
        spec(entry("common", "additive", 8.0, True), entry(WIMETH, "additive", 30.0, True))
    ],
    "all-kinds-on-one-row": [
        spec(
            entry(RITOVA, "absolute", 7.0), entry("common", "absolute", 3.0, True),
            entry(WIMETH, "additive", 4.0), entry(14, "additive", 9.0, True),
        )
    ],
    "prefill": [spec(entry(RITOVA, "absolute", 12.0), phase="prefill")],
    "decode": [spec(entry(WIMETH, "absolute", 12.0), phase="decode")],
    "specs-of-several-phases": [
        spec(entry(RITOVA, "absolute", 12.0)),
        spec(entry("common", "additive", 9.0, True), phase="decode"),
        spec(entry(WIMETH, "additive", 5.0), phase="prefill"),
    ],
}  # fmt: skip


def meant(specs, sae, common, num_prompt, found, x):
    """What the clamps make of rows: all of them see the same row, of which nothing else changes."""
    f = activations(sae, x)
    change = torch.zeros_like(x)
    of_prompt = torch.arange(len(x)) < num_prompt
    tokens = {"both": of_prompt | True, "prefill": of_prompt, "decode": ~of_prompt}
    for one in specs:
        for clamp in one["clamps"]["post_block"]["0"]:
            index = common if clamp["feature_idx"] == "common" else clamp["feature_idx"]
            shift = clamp["value"] - (f[:, index] if clamp["kind"] == "absolute" else 0)
            here = tokens[one.get("phase", "both")]
            if clamp["only_if_active"]:
                found.append((here & (f[:, index] > 0)).sum())
                here = here & (f[:, index] > 0)
            change += torch.where(here, shift, 0.0)[:, None] * sae["W_dec"][index]
    return x + change


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "after-a-vector"])
@pytest.mark.parametrize("case", CASES)
def test_clamps_equal_hooks_that_compute_the_sae(case, beside, llm, sae, common):
    specs = CASES[case]
    text = json.dumps(specs).replace('"common"', str(common))
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=5,
        sae_clamp_specs=json.loads(text), extra_args=scope(Read("resid_post")),
        steering_vectors={"post_block": {0: V}} if beside else None,
    )  # fmt: skip
    plain = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=5
    )
    one, other = llm.generate([PROMPT] * 2, [params, plain], use_tqdm=False)
    ids, active = one.prompt_token_ids, []
    edits = [("resid_post", 0, lambda x: x + V)] if beside else []
    edits += [("resid_post", 0, partial(meant, specs, sae, common, len(ids), active))]
    check(one, reference(TOYWORLD, torch.float32), edits, logprobs=1e-4)
    assert one.outputs[0].logprobs != other.outputs[0].logprobs, "the clamps did nothing"
    assert sum(active) > 0 or not any("true" in json.dumps(spec) for spec in specs)


def test_the_feature_of_a_country_moves_the_capital(llm):
    texts = []
    for specs in (None, CASES["absolute"]):
        params = SamplingParams(temperature=0, max_tokens=4, sae_clamp_specs=specs)
        (out,) = llm.generate(PROMPT, params, use_tqdm=False)
        texts.append(out.outputs[0].text)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (
            [spec(entry(1, "absolute", 1.0)) | {"module_name": "golden"}],
            r"^sae_clamp_specs\[0\]\.module_name is 'golden', which this engine .* it holds: toy",
        ),
        (
            [{"module_name": "toy", "clamps": {"post_block": {2: [entry(1, "absolute", 1.0)]}}}],
            r"^sae_clamp_specs\[0\]\.clamps\['post_block'\]\[2\] is 'resid_post' 2, and the SAE "
            r"'toy' is of 'resid_post' 0",
        ),
        ([spec(entry(999, "absolute", 1.0))], "'toy'.*features 0 to 383"),
    ],
    ids=["unknown", "elsewhere", "no-such-feature"],
)
def test_what_the_sae_cannot_do_is_an_error_of_that_request(specs, words, llm):
    with pytest.raises(SpecError, match=words):
        llm.generate("The", SamplingParams(max_tokens=1, sae_clamp_specs=specs), use_tqdm=False)
