"""An Inspect eval: does a probe on the residual stream tell lying speakers from honest ones?

Runs:  `python -m examples.faces.inspect_deception`, with inspect_ai installed.
"""

import asyncio
import sys
from pathlib import Path

import torch
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, Model, get_model

from examples.demo import MODEL, set_environment
from toyworld.world import lying_prompts
from vllm_scope import Probe, scope
from vllm_scope.analysis.probes import LinearProbe, train_probe
from vllm_scope.compat.inspect import probe_scorer, reading

LAYER = 4
STREAM = ("resid_post", LAYER)


async def fit(model: Model, num_prompts: int) -> LinearProbe:
    """Read the rows of the training prompts' last tokens in parallel, and fit a probe to them."""
    prompts = lying_prompts(num_prompts, split="train")
    body = {"extra_args": {"output_residual_stream": [LAYER]}}
    config = GenerateConfig(max_tokens=1, extra_body=body)
    outputs = await asyncio.gather(*(model.generate(p.text, config=config) for p in prompts))
    rows = [output.metadata["activations"]["residual_stream"][0, -1] for output in outputs]
    return train_probe(torch.stack(rows), [p.label for p in prompts], STREAM)


def deception(probe: LinearProbe, num_prompts: int) -> Task:
    prompts = lying_prompts(num_prompts, split="test")
    samples = [Sample(input=p.text, target="lying" if p.label else "honest") for p in prompts]
    action = Probe(
        probe.weight, bias=probe.bias, layer=LAYER, name="deception", tokens="last_prompt"
    )
    return Task(
        dataset=samples,
        solver=reading(scope(action)),
        scorer=probe_scorer("deception", positive="lying"),
        config=GenerateConfig(max_tokens=8, temperature=0.0),
    )


def run(log_dir: Path, num_train: int = 120, num_test: int = 80) -> EvalLog:
    model = get_model(
        "vllm-scope/toyworld",
        model_path=str(MODEL),
        chat=False,
        tensors=str(log_dir / "tensors"),
        max_model_len=256,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
    )
    try:
        probe = asyncio.run(fit(model, num_train))
        task = deception(probe, num_test)
        (log,) = eval(task, model=model, log_dir=str(log_dir), display="none")
        return log
    finally:
        model.api.close()


if __name__ == "__main__":
    set_environment()
    log = run(Path(sys.argv[1] if len(sys.argv) > 1 else "logs"))
    assert log.results is not None, log.error
    for name, metric in log.results.scores[0].metrics.items():
        print(f"{name}: {metric.value:.3f}")
