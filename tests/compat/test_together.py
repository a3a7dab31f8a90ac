"""Requests through different faces in one batch, and what the seam between them promises."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.conftest import local_engine
from tests.engine.test_edits import D, V
from vllm_scope import Ablate, Add, Clamp, Probe, Read, SpecError, scope
from vllm_scope.compat.act_capture import load_manifest
from vllm_scope.compat.probe_hook import KEY, Options
from vllm_scope.compat.vllm_lens import SteeringVector
from vllm_scope.engine.frontend import translators
from vllm_scope.engine.frontend.connection import connections

LENGTHS = [40, 23, 57, 31, 38, 44]


@pytest.fixture(scope="module")
def llm(checkpoints):
    # Chunks of 48 tokens: prompts of several faces share steps, and cross them.
    with local_engine(
        checkpoints("llama"), dtype="float32", max_num_batched_tokens=48, max_num_seqs=8
    ) as llm:
        yield llm


def run(llm, extras):
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=3,
            extra_args=extra,
        )
        for extra in extras
    ]  # fmt: skip
    prompts = [
        {"prompt_token_ids": list(range(20 + 7 * i, 20 + 7 * i + n))}
        for i, n in enumerate(LENGTHS[: len(extras)])
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # Batches of other shapes multiply in another order.
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_concurrent_requests_through_every_face_are_as_if_alone(llm, monkeypatch, tmp_path):
    read = Read("resid_post")
    lens = {
        "output_residual_stream": True,
        "apply_steering_vectors": [SteeringVector(V[None], [1], scale=0.5)],
    }
    faces = [
        lens,
        {KEY: Options([0, 2], include_prefill=True)},
        {
            "decode_steering_vectors": {"post_block": {0: V}},
            "prefill_steering_clamps": {"post_block": {1: [{"vector": D, "value": 0.5}]}},
        }
        | scope(read),
        scope(Ablate(D, layer=1), Probe(D, layer=2, name="p"), read),
        {"output_residual_stream": [2]},
        None,
    ]
    native = [
        scope(Add(V, layer=1, scale=0.5), read),
        scope(read),
        scope(
            Add(V, layer=0, tokens="generated"),
            Clamp(D, lo=0.5, hi=0.5, layer=1, tokens="prompt"),
            read,
        ),
        scope(Ablate(D, layer=1), Probe(D, layer=2, name="p"), read),
        scope(read),
        scope(read),
    ]
    expected = run(llm, native)
    monkeypatch.setenv("VLLM_ACT_CAPTURE", "1")
    monkeypatch.setenv("VLLM_ACT_MODE", "full8")
    monkeypatch.setenv("VLLM_ACT_OUTDIR", str(tmp_path))
    found = run(llm, faces)
    for face, alone in zip(found, expected, strict=True):
        assert face.outputs[0].token_ids == alone.outputs[0].token_ids
        manifest = load_manifest(face.activation_manifest["path"])
        for layer in range(3):
            close(face.scope["resid_post", layer], alone.scope["resid_post", layer])
            rows = alone.scope["resid_post", layer]
            assert float((manifest.load(layer) - rows).norm() / rows.norm()) < 0.02
    rows = [[o.scope["resid_post", k] for k in range(3)] for o in expected]
    close(found[0].activations["residual_stream"], torch.stack(rows[0]))
    assert list(found[1].hidden_states) == [0, 2]
    close(found[1].hidden_states[2], rows[1][2][LENGTHS[1] :])
    close(found[1].prefill_hidden[0], rows[1][0][: LENGTHS[1]])
    close(found[3].scope.scores["p"], expected[3].scope.scores["p"])
    close(found[4].activations["residual_stream"], rows[4][2][None])
    for i, name in ((0, "hidden_states"), (1, "activations"), (5, "activations")):
        assert not hasattr(found[i], name)


def test_one_request_may_use_several_faces(llm):
    both = {
        "output_residual_stream": [1],
        "steering_vectors": {"post_block": {0: V}},
        KEY: Options([2]),
    }
    (output,) = run(llm, [both])
    (native,) = run(llm, [scope(Add(V, layer=0), Read("resid_post"))])
    assert torch.equal(
        output.activations["residual_stream"][0], native.scope["resid_post", 1]
    )  # fmt: skip
    assert torch.equal(output.hidden_states[2], native.scope["resid_post", 2][40:])


@pytest.fixture
def translator():
    """Registers translators that are gone after the test."""
    before = dict(translators._entries)
    yield translators.register
    for name in set(translators._entries) - set(before):
        del translators._entries[name]
    translators.register(*_first(before))


def _first(entries):
    name, entry = next(iter(entries.items()))
    return name, entry.keys, entry.translate, entry.everywhere


def test_an_error_in_a_decorator_fails_its_own_request_alone(llm, translator, caplog, monkeypatch):
    def broken(output, completion):
        raise RuntimeError("on purpose")

    def translate(values, sites):
        return translators.Translation((Read("resid_post", layers=[0]),), broken)

    translator("broken", ["broken_key"], translate)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    outputs = run(llm, [{"broken_key": 1}, {"output_residual_stream": [0]}])
    assert "on purpose" in caplog.text
    assert outputs[0].scope.status == "failed"
    assert "RuntimeError" in outputs[0].scope.error
    assert outputs[1].scope.status == "complete"
    assert outputs[1].activations["residual_stream"].shape == (1, 28, 128)


def test_an_engine_without_taps_refuses_the_keys(llm, monkeypatch):
    engine = llm.llm_engine
    connection = connections.pop(engine.output_processor)
    monkeypatch.setattr(engine.vllm_config, "additional_config", {})
    try:
        with pytest.raises(SpecError, match="started without vllm-scope"):
            run(llm, [{"output_residual_stream": [0]}])
        assert run(llm, [None])[0].scope is None
    finally:
        connections.put(engine.output_processor, connection)


def test_keys_that_nobody_translates_stay_where_they_are(llm):
    (output,) = run(llm, [{"somebody_elses": 3}])
    assert output.scope is None


def test_what_a_translator_refuses_is_the_clients_fault(llm):
    from vllm.exceptions import VLLMClientError

    with pytest.raises(SpecError) as caught:
        run(llm, [{"output_qk": True}])
    assert isinstance(caught.value, VLLMClientError)
    assert run(llm, [scope(Read("embed"))])[0].scope.status == "complete"
