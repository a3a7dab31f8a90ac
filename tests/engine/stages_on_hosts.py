"""One model whose two stages are on two hosts. Run by test_hosts.py, once on each.

python -m tests.engine.stages_on_hosts MODEL ADDRESS_OF_FIRST 0    or 1, on the second
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from vllm_scope import Read

READS = (Read("resid_post"), Read("embed"))


def main(model: str, address: str, rank: int) -> None:
    options: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 256, "enforce_eager": True,
        "skip_tokenizer_init": True, "gpu_memory_utilization": 0.1, "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp", "nnodes": 2, "node_rank": rank,
        "master_addr": address, "master_port": 29511,
    }  # fmt: skip
    if rank:
        stage(model, options)
    else:
        ask(model, options)


def stage(model: str, options: dict[str, Any]) -> None:
    """What `vllm serve --headless` does on the second host."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = EngineArgs(model, **options).create_engine_config(headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)


def ask(model: str, options: dict[str, Any]) -> None:
    import torch
    from vllm import LLM

    from tests.asking import run
    from tests.checkpoints import check_completion, reference
    from tests.engine.test_edits import EDITS, PROMPT, check, params

    llm = LLM(model, **options)
    ref = reference(Path(model), torch.float32)
    add, meaning = EDITS["add"]
    # In the first stage, whose edit the second one gets, and in the last.
    places = [("resid_post", 0), ("resid_post", 2)]
    asked = [params(*READS), params(*(add(site=s, layer=i) for s, i in places), *READS)]
    plain, edited = run(llm, [PROMPT, PROMPT], asked)
    ids = list(plain.outputs[0].token_ids)
    check_completion(plain.scope, plain.prompt_token_ids, ids, ref)
    check(edited, ref, [(*place, meaning) for place in places])
    roads = {road for one in llm.collective_rpc("scope_counters") for road in one["roads"]}
    print(f"right rows and edits over {' and '.join(sorted(roads))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
