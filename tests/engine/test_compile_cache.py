"""One compile cache, starts with and without taps in any order; and the canary.

vLLM's key for a compiled graph holds neither the plugin nor its taps. A graph that
was compiled without them, loaded for a start with them, computes the right tokens
and reads nothing, silently.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import copy

import pytest

from tests.conftest import TOYWORLD, local_engine
from vllm_scope import CompatError

START = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    {before}
    llm = LLM({model!r}, dtype="float32", max_model_len=256, distributed_executor_backend="uni",
              gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 29)
    body = {{}}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
    texts = ["The capital of Kimar is", "Happily, it was", 'Irma says: "']
    outputs = llm.generate(texts, params, use_tqdm=False)
    body["tokens"] = [list(o.outputs[0].token_ids) for o in outputs]
    body["logprobs"] = [
        [sorted(lp.logprob for lp in step.values()) for step in o.outputs[0].logprobs]
        for o in outputs
    ]
    if {reads}:
        from vllm_scope import Read, scope
        params = SamplingParams(temperature=0, max_tokens=4,
                                extra_args=scope(Read("resid_post"), Read("embed")))
        result = llm.generate(texts[0], params, use_tqdm=False)[0].scope
        body["status"] = result.status
        body["norms"] = {{f"{{s}} {{k}}": result[s, k].norm(dim=-1).min().item()
                         for s, k in result.keys()}}
    print("BODY" + json.dumps(body))

if __name__ == "__main__":
    main()
"""
#: Makes vLLM's key forget the plugin's configuration.
FORGETFUL_KEY = """
    from vllm.config import VllmConfig
    original = VllmConfig.compute_hash

    def forgetful(self):
        kept, self.additional_config = self.additional_config, {}
        try:
            return original(self)
        finally:
            self.additional_config = kept

    VllmConfig.compute_hash = forgetful
"""


def start(cache, on: bool, before: str = "pass", check: bool = True):
    code = START.format(model=str(TOYWORLD), before=before, reads=on)
    script = cache / f"start-{on}.py"
    script.write_text(code)
    environment = {
        **os.environ,
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_SCOPE": "1" if on else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    environment.pop("VLLM_USE_AOT_COMPILE", None)  # tests/conftest.py sets it
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    if not check:
        return done
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("BODY")[1])


def check_reads(body):
    assert body["status"] == "complete"
    assert len(body["norms"]) == 7
    assert all(norm > 0.1 for norm in body["norms"].values())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("off-then-on")


@pytest.fixture(scope="module")
def off_then_on(cache):
    return start(cache, on=False), start(cache, on=True)


@pytest.mark.long
def test_off_then_on(off_then_on):
    check_reads(off_then_on[1])


@pytest.mark.long
def test_on_then_off_then_on(off_then_on, cache):
    # The cache now holds both graphs; each start must find its own.
    off, on = off_then_on
    again_off, again_on = start(cache, on=False), start(cache, on=True)
    assert again_off == off
    assert again_on == on
    check_reads(again_on)


@pytest.mark.long
def test_the_plugin_leaves_greedy_tokens_and_logprobs_within_rounding(off_then_on):
    off, on = off_then_on
    assert on["tokens"] == off["tokens"]
    for a, b in zip(off["logprobs"], on["logprobs"], strict=True):
        for x, y in zip(a, b, strict=True):
            assert x == pytest.approx(y, abs=1e-4)


@pytest.mark.gpu
def test_the_canary_refuses_a_stale_graph(off_then_on, cache):
    """Off, then on with a key that forgets the plugin: the stale graph is loaded.

    On a CPU vLLM 0.32 fails to load what it saved, and compiles again every time.
    """
    done = start(cache, on=True, before=FORGETFUL_KEY, check=False)
    assert done.returncode != 0
    assert "7 of 7 taps wrote nothing: the compiled graph has no taps" in done.stderr


def test_the_canary_refuses_a_graph_in_which_a_tap_is_missing(checkpoints, monkeypatch):
    """What a stale graph looks like: the engine believes in taps that it does not run."""
    from vllm_scope.engine.worker import loading

    install = loading.install_taps

    def install_all_but_one(anatomy, arena, tables):
        fewer = copy(tables)
        fewer.tap_of = {b: t for b, t in tables.tap_of.items() if b != 2}
        real = install(anatomy, arena, fewer)
        return tuple(sorted({*real, 2}))

    monkeypatch.setattr(loading, "install_taps", install_all_but_one)
    with (
        pytest.raises(
            CompatError,
            match=r"1 of 4 taps wrote nothing: 'resid_post' of layers \[0\]\. The model's",
        ),
        local_engine(checkpoints("llama"), dtype="float32"),
    ):
        pass
