"""A request with a LoRA adapter reads the adapted model; one without, the plain one."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import NUM_LAYERS, Reference, check_completion, reference, row_error
from tests.conftest import local_engine
from tests.engine.test_edits import D, V
from tests.engine.test_gates import gated
from vllm_scope import Add, Gate, Probe, Read, scope


def make_adapter(folder, hidden_size: int, num_layers: int = NUM_LAYERS, rank: int = 8) -> None:
    torch.manual_seed(1)
    tensors = {}
    for layer in range(num_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden_size) / hidden_size**0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden_size, rank) / rank**0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    config |= {"target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def adapted(path, folder) -> Reference:
    from safetensors.torch import load_file

    ref = Reference(path, torch.float32)
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for layer in range(len(ref.model.model.layers)):
            name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
            delta = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
            ref.model.model.layers[layer].self_attn.o_proj.weight += delta
    return ref


@pytest.mark.long
def test_lora_requests_are_edited_and_scored_in_their_own_model(checkpoints, tmp_path):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    path = checkpoints("llama")
    make_adapter(tmp_path, 128)
    gate = Gate(D, 0, kind="sigmoid", sharpness=0.1, name="g")
    actions = [
        Add(V, layer=0),
        Add(D, layer=1, gate=gate),
        Probe(D, layer=1, name="p"),
        Read("resid_post"),
    ]
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, detokenize=False,
        extra_args=scope(*actions),
    )  # fmt: skip
    prompt = {"prompt_token_ids": list(range(20, 50))}
    adapter = LoRARequest("adapter", 1, str(tmp_path))
    with local_engine(path, dtype="float32", enable_lora=True, max_lora_rank=8) as llm:
        (output,) = llm.generate(prompt, params, lora_request=adapter, use_tqdm=False)
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    edits, _ = gated(
        ("resid_post", 0),
        ("resid_post", 1),
        lambda x: torch.sigmoid(0.1 * (x @ D)),
        lambda x: x + D,
    )
    edits.insert(1, ("resid_post", 0, lambda x: x + V))  # the gate sees the row before it
    streams, _ = adapted(path, tmp_path).edited(ids, edits)
    for layer in range(NUM_LAYERS):
        rows = output.scope["resid_post", layer]
        assert row_error(rows, streams["resid_post", layer]) < 1e-4
    expected = streams["resid_post", 1].double() @ D.double()
    torch.testing.assert_close(output.scope.scores["p"].double(), expected, rtol=1e-3, atol=1e-2)


def test_lora_requests_read_their_own_model(checkpoints, tmp_path):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    path = checkpoints("llama")
    make_adapter(tmp_path, 128)
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, detokenize=False,
        extra_args=scope(Read("resid_post")),
    )  # fmt: skip
    prompt = {"prompt_token_ids": list(range(20, 50))}
    adapter = LoRARequest("adapter", 1, str(tmp_path))
    with local_engine(path, dtype="float32", enable_lora=True, max_lora_rank=8) as llm:
        # One after the other: vLLM 0.32 on a CPU, without any plugin, applies the
        # adapter to the plain requests of the same batch too.
        outputs = [
            llm.generate(prompt, params, lora_request=request, use_tqdm=False)[0]
            for request in (adapter, None)
        ]
    refs = [adapted(path, tmp_path), reference(path, torch.float32)]
    for output, ref in zip(outputs, refs, strict=True):
        ids = list(output.outputs[0].token_ids)
        check_completion(output.scope, output.prompt_token_ids, ids, ref)
    with_lora, plain = (o.scope["resid_post", NUM_LAYERS - 1][:30] for o in outputs)
    assert (with_lora - plain).abs().max() > 0.1
