"""A controller holds a monitor's mean at a setpoint, by the scale of a server-wide Add."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
import torch

from tests.asking import run
from tests.conftest import async_engine, process_engine
from tests.engine.probing import numbers
from tests.engine.test_edits import params
from vllm_scope import Add, SpecError
from vllm_scope.control import Change, Controller
from vllm_scope.control.bounded_edits import BoundedEdits

PROMPTS = [list(range(start, start + 12)) for start in range(30, 130, 20)]
WEIGHT = torch.from_numpy(numbers(1, 128))
WEIGHT = WEIGHT / WEIGHT.norm()
#: Of a layer before the monitor's, so that the scores depend on the scale by way of the model.
ALONG = Add(WEIGHT, layer=1, scale=0.0, tokens="prompt")
MEAN = {
    "weight": WEIGHT.tolist(), "layers": [2], "aggregate": "mean", "tokens": "prompt",
    "threshold": 1e30,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(llama):
    # In processes of its own, as users start it.
    with process_engine(
        llama, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        additional_config={"scope": {"monitors": {"mood": MEAN}}},
    ) as llm:  # fmt: skip
        yield llm


def means(outputs):
    """Of each answer's scores, as the caller sees them."""
    return torch.stack([one.scope.scores["monitor/mood"].mean() for one in outputs])


def holding(setpoint, seen, batch=1, **options):
    """A controller that moves the scale by half of the error, once for each batch of PROMPTS."""

    def callback(observations, scales):
        seen.extend(observations)
        if len(seen) % batch:
            return None
        mean = sum(one.value for one in seen[-batch:]) / batch
        return Change({"mood": scales["mood"] + 0.5 * (setpoint - mean)}, f"the mean is {mean:.2f}")

    return Controller(callback, {"mood": ALONG}, bounds={"mood": (-8, 8)}, **options)


def waited(found):
    """Wait for the controller's thread."""
    deadline = time.monotonic() + 20
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found()


def changed(controller, before):
    waited(lambda: controller.counts["changes"] > before)


def test_a_monitors_mean_is_driven_to_a_setpoint_by_the_scale_of_an_add(llm):
    first = float(means(run(llm, PROMPTS, params(max_tokens=8))).mean())
    setpoint, seen, found = first + 2.0, [], []
    with holding(setpoint, seen, len(PROMPTS), rate=50.0).on(llm) as controller:
        for _ in range(14):
            before, scale = controller.counts["changes"], controller.scales["mood"]
            outputs = run(llm, PROMPTS, params(max_tokens=8))
            found.append(float(means(outputs).mean()))
            if abs(found[-1] - setpoint) < 0.02:
                break
            changed(controller, before)
            assert controller.scales["mood"] != scale
        waited(lambda: len(seen) == len(found) * len(PROMPTS))
    assert found[0] == pytest.approx(first, abs=1e-4), "the edit begins at scale 0"
    assert found[-1] == pytest.approx(setpoint, abs=0.05), found
    assert controller.counts["failures"] == controller.counts["hangs"] == 0
    # The observations are the values that the callers see.
    told = [one.value for one in seen[-len(PROMPTS) :]]
    assert {one.name for one in seen} == {"mood"}
    assert {one.position for one in seen} == {len(PROMPTS[0]) - 1}
    assert sum(told) / len(told) == pytest.approx(found[-1], abs=1e-5)
    assert llm.collective_rpc("scope_get_edits") == [None], "closing it ends its edits"
    after = float(means(run(llm, PROMPTS, params(max_tokens=8))).mean())
    assert after == pytest.approx(first, abs=1e-4)


def test_a_change_is_for_requests_that_enter_afterwards(llm):
    engine = llm.llm_engine
    with holding(50.0, [], rate=1000.0).on(llm) as controller:
        (whole,) = run(llm, PROMPTS[:1], params(max_tokens=30))
        changed(controller, 0)
        (edited,) = run(llm, PROMPTS[:1], params(max_tokens=30))
    asked = [params(max_tokens=30), params(replace(ALONG, scale=8.0), max_tokens=30)]
    plain, native = run(llm, PROMPTS[:1] * 2, asked)
    name = "monitor/mood"
    assert torch.equal(whole.scope.scores[name], plain.scope.scores[name])
    torch.testing.assert_close(edited.scope.scores[name], native.scope.scores[name])
    assert not torch.allclose(edited.scope.scores[name], plain.scope.scores[name], atol=0.5)
    # A request that runs while the edits change keeps those that it entered with.
    controller = holding(50.0, []).on(llm)
    with controller:
        engine.add_request("running", {"prompt_token_ids": PROMPTS[0]}, params(max_tokens=30))
        engine.step()
        controller._set(BoundedEdits({"mood": replace(ALONG, scale=8.0)}))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += [out for out in engine.step() if out.finished]
    assert torch.equal(outputs[0].scope.scores[name], plain.scope.scores[name])


def test_an_engine_has_one_controller(llm):
    with holding(0.0, []).on(llm):
        before = llm.collective_rpc("scope_get_edits")
        other = Controller(lambda *_: None, {"a": ALONG}, bounds={}).on(llm)
        with pytest.raises(SpecError, match="has a controller already"), other:
            pass
        assert llm.collective_rpc("scope_get_edits") == before


@pytest.mark.long
def test_an_async_engine_has_a_controller_too(llama):
    from vllm import SamplingParams

    async def answer(engine, i):
        options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
        async for out in engine.generate(
            {"prompt_token_ids": PROMPTS[0]}, SamplingParams(**options), str(i)
        ):
            last = out
        return float(last.scope.scores["monitor/mood"].mean())

    async def go():
        config = {"scope": {"monitors": {"mood": MEAN}}}
        engine = async_engine(llama, skip_tokenizer_init=True, additional_config=config)
        try:
            first = await answer(engine, "first")
            async with holding(first + 2, [], rate=50.0).on(engine) as controller:
                for i in range(14):
                    before = controller.counts["changes"]
                    found = await answer(engine, i)
                    if abs(found - first - 2) < 0.02:
                        break
                    await asyncio.to_thread(changed, controller, before)
            return first, found, await answer(engine, "last")
        finally:
            engine.shutdown()

    first, found, last = asyncio.run(go())
    assert found == pytest.approx(first + 2, abs=0.05)
    assert last == pytest.approx(first, abs=1e-4)
