"""Finds which sites of a model can be read, by tapping a model that vLLM's worker has built.

Owns:  `describe_model`, ModelReport, SiteReport.
Runs:  in `vllm-scope doctor`, in one process. The model's modules are built without weights on
       torch's meta device. If the model's constructor computes with parameters, the modules are
       built on the CPU instead. No KV cache is allocated. No model is compiled or run.

Promise: a layer is reported as readable only if `_tap` has installed the site's taps on the layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from vllm_scope.config import KEY, ScopeConfig
from vllm_scope.engine import plugin
from vllm_scope.engine.model import anatomy_of, sites_of
from vllm_scope.engine.vllm_types import ModelConfig, VllmConfig, Worker
from vllm_scope.engine.worker import runners
from vllm_scope.engine.worker.loading import install_all_taps, with_parts
from vllm_scope.engine.worker.sizes import Sizes
from vllm_scope.errors import CompatError, ConfigError, reason_of
from vllm_scope.graph.anatomy.layers import Anatomy, UnreadError
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.request.sites import MODEL_SITES, SITES

#: The name under which vLLM knows the loader `NoWeights`.
LOAD_FORMAT = "scope_no_weights"
#: The default share of the device's memory that must be free. A worker without weights and without
#: a KV cache needs less memory than this share.
LEAST_MEMORY = 0.01


@dataclass(frozen=True)
class SiteReport:
    """The layers at which a site can be tapped. A site in MODEL_SITES counts as a site of layer 0.

    Attributes:
        layers: the layers that can be tapped.
        reason: why the first layer that is not in `layers` cannot be tapped. If each layer can be
            tapped alone, `reason` says why the layers cannot be tapped together. None if all layers
            can be tapped together.
        width: the number of elements of a row; None if no layer can be tapped.
    """

    layers: tuple[int, ...]
    reason: str | None
    width: int | None = None


@dataclass(frozen=True)
class ModelReport:
    """The findings of `describe_model`.

    Attributes:
        vllm_version: the version of vLLM.
        runner: the version of vLLM's model runner, "V1" or "V2"; "-" if `sites` is empty.
        num_layers, hidden_size, dtype: the properties of the model with these names.
        reason: why an engine with the configured sites cannot read this model, or None.
        sites: maps every site of vllm-scope to the site's report. Empty if taps do not support the
            model's layers or this engine.
        configured: the configured sites.
        num_taps, arena_mib: the number of taps and the size of the arena, in an engine with the
            configured sites. If there is a `reason`, both are 0.
        unread: True if the parser does not understand the model's source. An engine that compiles
            such a model finds the stream from the numbers of a forward instead.
    """

    vllm_version: str
    runner: str
    num_layers: int
    hidden_size: int
    dtype: str
    reason: str | None
    sites: dict[str, SiteReport]
    configured: tuple[str, ...]
    num_taps: int = 0
    arena_mib: float = 0.0
    unread: bool = False


def describe_model(
    model: str, options: dict[str, object], sites: Sequence[str] | None = None
) -> ModelReport:
    """Build a model without weights, tap each of its sites, and report what can be read.

    Args:
        model: the model's name or folder, as vLLM takes it.
        options: arguments of vLLM's EngineArgs other than the model.
        sites: the sites to configure; None for the engine's default sites.

    Raises:
        ConfigError: the sites are not valid, or vLLM cannot import its code of the model.
        CompatError: vllm-scope does not support this version of vLLM, or a symbol that a wrapper
            needs is missing.
        Exception: vLLM's own error: vLLM cannot build the model, or the device lacks the memory
            that `gpu_memory_utilization` requests.
    """
    scope = {} if sites is None else {"sites": list(sites)}
    config = ScopeConfig.parse(scope)  # checked before the import of vLLM, which takes seconds
    plugin.register()
    _register_loader()
    vllm_config = _config_of(model, options)
    alone = vllm_config
    if vllm_config.parallel_config.world_size > 1:
        # Each tensor-parallel rank has the whole stream. Therefore one rank is enough.
        alone = _config_of(model, options | {"tensor_parallel_size": 1})
    with _worker(alone) as worker:
        return _report(worker, vllm_config, config)


def _config_of(model: str, options: dict[str, object]) -> VllmConfig:
    """vLLM's configuration without this package's options, so that the worker adds no taps."""
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, object] = {
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        # Only the decoder of a multimodal model can have taps. The model's processor is not built,
        # because it would need a tokenizer and more files than the configuration.
        "language_model_only": True,
        "gpu_memory_utilization": LEAST_MEMORY,
    }
    try:
        found: Any = EngineArgs(model, **(arguments | options)).create_engine_config()
    except ValueError as error:
        _say_import(error)
        raise
    found.additional_config.pop(KEY, None)
    config: VllmConfig = found
    return config


def _say_import(error: ValueError) -> None:
    """If vLLM has code for the architecture but cannot import the code, raises ConfigError with the
    cause. vLLM's own error does not contain the cause."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in re.findall(r"'(\w+)'", reason_of(error)):
        try:
            if name in ModelRegistry.models:
                ModelRegistry.models[name].load_model_cls()
        except Exception as cause:
            package = (getattr(cause, "name", None) or "").partition(".")[0]
            if isinstance(cause, ModuleNotFoundError) and package and find_spec(package) is None:
                what = f"needs the package {package}, which is not installed; install it"
            else:
                what = f"cannot be imported ({reason_of(cause)}); look for a package whose version "
                what += "this vLLM does not support"
            raise ConfigError(f"vLLM's code of {name} {what}.") from cause


@contextmanager
def _worker(vllm_config: VllmConfig) -> Iterator[Worker]:
    """vLLM's worker with the model, in this process."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    executor = UniProcExecutor(vllm_config)
    try:
        yield executor.driver_worker.worker
    finally:
        executor.shutdown()


def _register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    from vllm.utils.torch_utils import set_default_torch_dtype

    if hasattr(registry, "_run_in_subprocess"):
        # vLLM inspects a model's class in another process, because a process that has started CUDA
        # must not be forked later. This process forks no process. Therefore the inspection can run
        # in this process, which halves the total time.
        registry._run_in_subprocess = lambda ask: ask()

    class NoWeights(BaseModelLoader):
        """Makes the model's modules with parameters that have shapes, but no values."""

        def download_model(self, model_config: ModelConfig) -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            pass

        def load_model(
            self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
        ) -> nn.Module:
            named = {"vllm_config": vllm_config, "model_config": model_config, "prefix": prefix}
            with set_default_torch_dtype(model_config.dtype):
                try:
                    with torch.device("meta"):
                        model: nn.Module = initialize_model(**named)
                except (NotImplementedError, RuntimeError):
                    # The constructors of some models compute with the values of parameters. On the
                    # CPU, a parameter takes no memory until code writes its values.
                    vllm_config.compilation_config.static_forward_context.clear()
                    with torch.device("cpu"):
                        model = initialize_model(**named)
                return model.eval()

    register_model_loader(LOAD_FORMAT)(NoWeights)


def _report(worker: Worker, vllm_config: VllmConfig, config: ScopeConfig) -> ModelReport:
    import vllm

    runner = worker.model_runner
    sites = sites_of(vllm_config, ScopeConfig(sites=("resid_post",)))
    known = (sites.num_layers, sites.hidden_size, sites.dtype)
    try:
        version = runners.version_of(runner)
        anatomy = anatomy_of(runner.get_model(), vllm_config)
    except CompatError as error:
        unread = isinstance(error, UnreadError)
        return ModelReport(
            vllm.__version__, "-", *known, str(error), {}, config.sites, unread=unread
        )
    found = {site: _site_report(anatomy, vllm_config, site) for site in SITES}
    head = (vllm.__version__, version, *known)
    try:
        num_taps = _tap(anatomy, vllm_config, config)
    except (CompatError, ConfigError) as error:
        return ModelReport(*head, str(error), found, config.sites)
    arena_mib = _arena_mib(vllm_config, config)
    return ModelReport(*head, None, found, config.sites, num_taps, arena_mib)


def _site_report(anatomy: Anatomy, vllm_config: VllmConfig, site: str) -> SiteReport:
    """The report of a site. If not all layers can be tapped together, each layer is tried alone."""
    layers = (0,) if site in MODEL_SITES else tuple(range(anatomy.num_layers))
    refused = _refusal(anatomy, vllm_config, site, layers)
    if refused is None:
        return SiteReport(layers, None, _width_of(vllm_config, site))
    each = {k: _refusal(anatomy, vllm_config, site, (k,)) for k in layers}
    reasons = [reason for reason in each.values() if reason is not None]
    good = tuple(k for k, reason in each.items() if reason is None)
    width = _width_of(vllm_config, site) if good else None
    return SiteReport(good, reasons[0] if reasons else refused, width)


def _width_of(vllm_config: VllmConfig, site: str) -> int:
    return sites_of(vllm_config, ScopeConfig(sites=(site,))).row_size(site)


def _refusal(
    anatomy: Anatomy, vllm_config: VllmConfig, site: str, layers: tuple[int, ...]
) -> str | None:
    try:
        _tap(anatomy, vllm_config, ScopeConfig(sites=(site,), layers=layers))
    except (CompatError, ConfigError) as error:
        return str(error)
    return None


def _tap(anatomy: Anatomy, vllm_config: VllmConfig, config: ScopeConfig) -> int:
    """Install the taps of a configuration, remove the taps, and return their number.

    Raises:
        CompatError, ConfigError: the errors that an engine with this configuration would raise.
    """
    sites = sites_of(vllm_config, config)
    anatomy = with_parts(anatomy, sites, 1)
    widths = Sizes.of(vllm_config, sites, False).widths
    tables = Tables(
        sites.boundaries, 1, sites.hidden_size, widths, torch.device("cpu"), num_programs=1,
        num_ops=1,
    )  # fmt: skip
    arena = torch.zeros((1, SLOT_BYTES), dtype=torch.uint8)
    with _classes_kept(anatomy):
        return len(install_all_taps(anatomy, arena, tables, sites))


@contextmanager
def _classes_kept(anatomy: Anatomy) -> Iterator[None]:
    """A tap replaces the class of a module by a subclass. On exit, give each module its original
    class back."""
    modules = [module for layer in anatomy.layers.values() for module in layer.modules()]
    modules += [] if anatomy.norm_here is None else [anatomy.norm_here]
    classes = [type(module) for module in modules]
    try:
        yield
    finally:
        for module, own in zip(modules, classes, strict=True):
            module.__class__ = own


def _arena_mib(vllm_config: VllmConfig, config: ScopeConfig) -> float:
    """The size in MiB of the arena that `ScopeWorker` allocates."""
    cuda = vllm_config.device_config.device_type == "cuda"
    sizes = Sizes.of(vllm_config, sites_of(vllm_config, config), cuda)
    return sizes.arena_slots(config) * SLOT_BYTES / 2**20
