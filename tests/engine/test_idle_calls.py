"""How much Python of this package runs in a step of plain requests."""

from __future__ import annotations

import cProfile
import gc
import pstats
from collections import Counter
from pathlib import Path

import pytest
from vllm import SamplingParams

import vllm_scope
from tests.conftest import TOYWORLD, local_engine, long_except
from vllm_scope import Add, Probe, Read, scope
from vllm_scope.engine import heap

PACKAGE = str(Path(vllm_scope.__file__).parent)
#: The thread of the engine makes at most this many calls of the package's functions in a step, in
#: the front-end, EngineCore and the worker together.
MOST_CALLS = 26
STEPS = 40


@pytest.fixture(scope="module")
def llm():
    with local_engine(TOYWORLD, dtype="float32") as llm:
        yield llm


def generate(llm, num_tokens, spec=None):
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, extra_args=spec
    )
    return llm.generate([{"prompt_token_ids": [5] * 8}] * 2, params, use_tqdm=False)


def calls(llm, num_tokens):
    """The number of calls of each of the package's functions while plain requests generate."""
    profile = cProfile.Profile()
    profile.enable()
    try:
        generate(llm, num_tokens)
    finally:
        profile.disable()
    found = Counter()
    for (file, _, name), (_, count, *_) in pstats.Stats(profile).stats.items():
        # In an eager forward, idle taps also call Python, as CUDA graphs do not.
        if file.startswith(PACKAGE) and not file.startswith(f"{PACKAGE}/graph/"):
            found[f"{file[len(PACKAGE) :]}:{name}"] += count
    return found


def calls_per_step(llm):
    """The calls that STEPS more steps make, divided by STEPS."""
    found = calls(llm, 8 + STEPS)
    found.subtract(calls(llm, 8))
    return {name: count / STEPS for name, count in found.items() if count > 1}


SPECS = {
    "nothing": None,
    "a read": scope(Read("resid_post", layers=[2])),
    "a probe": scope(Probe([0.1] * 256, layer=2, name="p")),
    "an edit": scope(Add([0.1] * 256, layer=2)),
}


@pytest.mark.parametrize("earlier", long_except(SPECS, "a read"))
def test_a_step_of_plain_requests_makes_few_calls(llm, earlier):
    """Also after requests with taps have ended."""
    if SPECS[earlier] is not None:
        outputs = generate(llm, 12, SPECS[earlier])
        assert {o.scope.status for o in outputs} == {"complete"}
        del outputs
    generate(llm, 8)
    found = calls_per_step(llm)
    assert found, "the plugin is not installed"
    assert sum(found.values()) <= MOST_CALLS, "\n".join(f"{n} {found[n]}" for n in found)


def test_garbage_collections_are_rarer_until_the_last_request_with_taps_ends(llm):
    gc.collect(0)  # after earlier requests, only a collection makes the thresholds usual again
    usual, engine = gc.get_threshold(), llm.llm_engine
    params = SamplingParams(max_tokens=4, ignore_eos=True, extra_args=SPECS["a read"])
    engine.add_request("reads", {"prompt_token_ids": [5] * 8}, params)
    found = []
    while engine.has_unfinished_requests():
        engine.step()
        found.append(gc.get_threshold()[0])
    assert found[0] == heap._FIRST
    assert found[-1] < heap._FIRST
    gc.collect(0)
    assert gc.get_threshold() == usual


def test_a_request_with_taps_ends_the_rest(llm):
    """The rows of a request that begins after many plain steps, beside a plain request."""
    generate(llm, 20)
    first, second = (generate(llm, 12, SPECS["a read"]) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.scope["resid_post", 2].shape == (19, 256)
        assert (one.scope["resid_post", 2] == other.scope["resid_post", 2]).all()
