"""vLLM Activation Capture System: environment variables turn capture on; requests write files."""

import os
import sys
from pathlib import Path

import torch
from vllm import LLM, SamplingParams

from examples.demo import MODEL, set_environment
from vllm_scope.compat.act_capture import load_manifest

PROMPTS = ["My father told me about the book Goldette.", "The capital of"]
VARIABLES = {"VLLM_ACT_CAPTURE": "1", "VLLM_ACT_MODE": "rp8", "VLLM_ACT_RP_K": "128"}


def run(llm: LLM) -> list[tuple[int, torch.Tensor]]:
    """(layer, rows) of every file that the requests wrote."""
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=8), use_tqdm=False)
    found = []
    for output in outputs:
        manifest = load_manifest(output.activation_manifest["path"])
        found += [(layer, manifest.load(layer)) for layer in manifest.layers]
    return found


if __name__ == "__main__":
    set_environment()
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "activations")
    os.environ |= VARIABLES | {"VLLM_ACT_OUTDIR": str(folder)}
    worker = "vllm_scope.compat.act_capture.WorkerCapture"
    for layer, rows in run(LLM(str(MODEL), max_model_len=256, worker_cls=worker)):
        print(f"layer {layer}: {list(rows.shape)}")
    size = sum(path.stat().st_size for path in folder.rglob("*.npz"))
    print(f"{size / 1e3:.0f} kB in {folder}")
