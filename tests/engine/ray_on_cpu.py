"""Reads from workers that are Ray actors, on a CPU. Run by test_ray.py in its own process.

vLLM's CPU platform says that it does not know Ray. It lacks the name of a resource
only, so here each process is given one, and Ray is told of GPUs that nobody uses.
"""

from __future__ import annotations

import os
import sys


def name_the_resource() -> None:
    """Also the hook that Ray runs in every worker process."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"
    CpuPlatform.device_control_env_var = "CUDA_VISIBLE_DEVICES"


def main(road: str, num_stages: int) -> None:
    import ray
    import torch

    from tests.checkpoints import check_completion, reference
    from tests.conftest import TOYWORLD
    from vllm_scope import Read, scope

    name_the_resource()
    hook = "tests.engine.ray_on_cpu.name_the_resource"
    ray.init(
        num_cpus=2, num_gpus=num_stages, include_dashboard=False,
        runtime_env={"worker_process_setup_hook": hook},
    )  # fmt: skip
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(TOYWORLD), dtype="float32", max_model_len=256, enforce_eager=True,
        skip_tokenizer_init=True, distributed_executor_backend="ray",
        gpu_memory_utilization=0.2, pipeline_parallel_size=num_stages,
        additional_config={"scope": {"road": road}},
    )  # fmt: skip
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False,
        extra_args=scope(Read("resid_post"), Read("embed")),
    )  # fmt: skip
    (output,) = llm.generate([{"prompt_token_ids": list(range(5, 45))}], params, use_tqdm=False)
    ref = reference(TOYWORLD, torch.float32)
    ids = list(output.outputs[0].token_ids)
    check_completion(output.scope, output.prompt_token_ids, ids, ref)
    counters = llm.collective_rpc("scope_counters")
    assert len({os.getpid(), *(one["pid"] for one in counters)}) == 1 + num_stages
    roads = {way for one in counters for way in one["roads"]}
    print(f"right rows of {num_stages} over {' and '.join(roads)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
