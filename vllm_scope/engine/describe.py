"""Builds a model's workers, without an engine around them, and asks what they can read.

Runs:  in `vllm-scope doctor`. No KV cache, no compilation, random weights.
"""

from __future__ import annotations

from typing import Any


def describe_model(model: str, options: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Each worker's `scope_describe`, and vLLM's version.

    Args:
        model: name or folder, as vLLM takes it.
        options: further arguments of vLLM's EngineArgs.

    Raises:
        ScopeError: vLLM's seams moved, or the options are wrong.
    """
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor import Executor

    config = EngineArgs(
        model, load_format="dummy", skip_tokenizer_init=True, **options
    ).create_engine_config()
    executor = Executor.get_class(config)(config)
    try:
        return executor.collective_rpc("scope_describe"), vllm.__version__
    finally:
        executor.shutdown()
