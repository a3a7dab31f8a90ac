"""Shared checkpoints and engines. Engines are dear: a test file has one of each kind."""

from __future__ import annotations

import os
import sys

# Before vLLM is imported anywhere.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from pathlib import Path

from tests import warm_start

if not Path("/dev/nvidiactl").exists():  # on a GPU, vLLM itself decides how processes start
    warm_start.use()
    # On a CPU vLLM 0.32 cannot load the graphs that it saves ahead of time. It compiles them anew
    # at each start, which takes 11 s. If it saves none, Inductor's own cache serves: 5 s.
    # tests/engine/test_compile_cache.py, the examples and the demos start as users do.
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings

from tests.checkpoints import TOLERANCE, make_checkpoint, reference

#: The share of a CPU's memory that vLLM wants to find free, whatever it then takes.
MEMORY = {"gpu_memory_utilization": 0.3}
# Hypothesis's examples: `make test` has the same few each time, `make test-all` draws new ones, and
# `--hypothesis-profile explore` draws many.
settings.register_profile("same", max_examples=30, derandomize=True, deadline=None)
settings.register_profile("new", max_examples=60, print_blob=True, deadline=None)
settings.register_profile("explore", max_examples=1000, print_blob=True, deadline=None)
settings.load_profile("same")

TOYWORLD = Path(__file__).parent.parent / "toyworld" / "model"


def long_except(values: Iterable[Any], *short: Any) -> list[Any]:
    """The values for `parametrize`. Tests with other values than `short` are marked long. If a test
    has several parameters, each value is a tuple with one item for each parameter."""
    found = list(values)
    assert all(one in found for one in short), short
    each = [(one if isinstance(one, tuple) else (one,), one in short) for one in found]
    return [pytest.param(*one, marks=[] if keep else pytest.mark.long) for one, keep in each]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    """family -> folder of its random checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, folder)
            # Now, because vLLM's Transformers backend changes the model's class in
            # this process: a reference made later would need vLLM's configuration.
            for dtype in TOLERANCE:
                reference(made[family], dtype)
        return made[family]

    return get


@pytest.fixture(scope="session")
def llama(checkpoints) -> Path:
    return checkpoints("llama")


@pytest.fixture(scope="session")
def ref(llama) -> Any:
    """Hugging Face's, of `llama`, in float32."""
    import torch

    return reference(llama, torch.float32)


@contextmanager
def without_llvmlite() -> Iterator[None]:
    """vLLM searches all modules for its kernels when an engine starts, and trips over
    llvmlite, which n-gram speculation imports."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if "llvmlite" in name}
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextmanager
def process_engine(model: Path | str, **options: Any) -> Iterator[Any]:
    """An LLM as users start it: its own processes, compiled, async scheduling."""
    from vllm import LLM

    with without_llvmlite():
        llm = LLM(str(model), **({"max_model_len": 512} | MEMORY | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm


def async_engine(model: Path | str, **options: Any) -> Any:
    """An AsyncLLM, eager, on the running loop; the caller shuts it down."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    defaults = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, **MEMORY}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), **(defaults | options)))


@contextmanager
def inside_this_process() -> Iterator[None]:
    """LLMs made in here start no process; what they leave behind is cleaned up."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.distributed import cleanup_dist_env_and_memory

    # The engine before this one forbade captures, for the whole process.
    set_cudagraph_capturing_enabled(True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            # Otherwise the engine would store the values of all environment variables, and an
            # engine that a test starts beside it would not see the variables of that test.
            patch.setattr("vllm.v1.engine.core.enable_envs_cache", lambda: None)
            yield
    finally:
        cleanup_dist_env_and_memory()


@contextmanager
def local_engine(model: Path | str, make: Any = None, **options: Any) -> Iterator[Any]:
    """An LLM inside this process: two seconds to start, eager unless asked otherwise.

    Args:
        make: a face's LLM; None for vLLM's.
    """
    from vllm import LLM

    defaults: dict[str, Any] = {
        "max_model_len": 512,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "skip_tokenizer_init": True,
        **MEMORY,
    }
    merged = {k: v for k, v in (defaults | options).items() if v is not None}
    with inside_this_process():
        with without_llvmlite():
            llm = (make or LLM)(str(model), **merged)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm


def preempted_in(llm: Any) -> list[str]:
    """The requests that an engine in this process preempts from now on, as it does."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original, found = scheduler._preempt_request, []

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
