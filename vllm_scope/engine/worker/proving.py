"""Proves a model's anatomy from the numbers that a forward computes, before the model gets taps.

Owns:  `proved_anatomy`, the class `Proved`, `agreed`.
Runs:  in every worker, at the model's load, before vLLM compiles the model. Hooks do not run in
       compiled code, and vLLM's own profile run is compiled. Therefore this module runs an
       additional dummy forward of two rows, without compilation.
From:  graph.anatomy (Watch, find_faults), runners (the forward).   To: worker.

An equality is a statement about rows that the forward must confirm, such as
resid_post = resid_mid + mlp_out. If the parser does not understand the model's source, there must
be exactly one convention whose equalities all hold. Later, the compiled graph must give the same
rows as a second uncompiled forward (`Proved.rows`).

Promise: if one rank of an engine refuses the model, all ranks refuse the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vllm_scope.engine.model import anatomy_of, hidden_size_of, supposed_anatomies_of
from vllm_scope.engine.vllm_types import ModelRunner, VllmConfig
from vllm_scope.engine.worker import runners
from vllm_scope.engine.worker.loading import with_parts
from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.layers import Anatomy, UnreadError
from vllm_scope.graph.anatomy.proof import Findings, find_faults
from vllm_scope.graph.anatomy.supposed import prove_supposed, stream_rows
from vllm_scope.graph.anatomy.tapped import norm_of, refused_site
from vllm_scope.graph.anatomy.watched import Watch
from vllm_scope.request.sites import ATTENTION_SITES, Place, Sites, place_at

logger = logging.getLogger("vllm.vllm_scope")

#: The number of tokens of the dummy forward. Despite `_uncompiled`, torch can compile a part of the
#: model in this forward. If the forward had one token, the graph of this part would be valid for
#: one token only.
_NUM_TOKENS = 2


@dataclass(frozen=True)
class Proved:
    """The parts of the model that a worker can tap.

    Attributes:
        anatomy: the model's anatomy, with the modules inside layers that get taps.
        moved: the layers before which the model changes the stream.
        rows: by boundary on the stream, the row of a dummy token in an uncompiled forward:
            [hidden_size], float32, CPU. Empty if the parser understands the model's source.
    """

    anatomy: Anatomy
    moved: tuple[int, ...] = ()
    rows: Mapping[int, Tensor] = field(default_factory=dict)


def proved_anatomy(
    runner: ModelRunner, config: VllmConfig, sites: Sites, groups: Sequence[Any]
) -> Proved:
    """The anatomy of a loaded model without taps, checked against the numbers of a forward.

    Args:
        groups: vLLM's groups of ranks that must agree. The groups exchange their answers one after
            another.

    Raises:
        CompatError: this rank or another rank cannot tap the model.
        ConfigError: the numbers show that a configured site has other values than the site's name
            says, or `with_parts` raises this error.
    """
    proved = findings = None
    reason = None
    try:
        try:
            anatomy = with_parts(
                anatomy_of(runner.get_model(), config), sites,
                config.parallel_config.tensor_parallel_size,
            )  # fmt: skip
            findings = _findings(runner, config, anatomy, sites)
            proved = Proved(anatomy, () if findings is None else findings.moved)
        except UnreadError as error:
            proved = _proved_by_numbers(runner, config, str(error))
    except CompatError as error:
        reason = str(error)
    reason = agreed(reason, groups)
    if proved is None or reason is not None:
        raise CompatError(reason)
    if proved.anatomy.unread is not None:
        _check_sites(proved.anatomy.unread, sites)
    if findings is None:
        return proved
    for site, why in findings.wrong_sites.items():
        layers = proved.anatomy.layers
        if any(Place(site, number).boundary in sites.readable for number in layers):
            raise refused_site(site, why)
    _tell(findings)
    return proved


def agreed(reason: str | None, groups: Sequence[Any]) -> str | None:
    """The reason of the first rank that has a reason; None if no rank has a reason. All ranks of
    the groups must call this function."""
    for group in groups:
        if group.world_size > 1:
            found: list[str | None] = [None] * group.world_size
            torch.distributed.all_gather_object(found, reason, group=group.cpu_group)
            reason = next((one for one in found if one is not None), None)
    return reason


def _findings(
    runner: ModelRunner, config: VllmConfig, anatomy: Anatomy, sites: Sites
) -> Findings | None:
    """The findings of a forward. None if the forward or the computation of the findings fails. In
    this case, only the source proves the anatomy."""
    try:
        watch = _watched(Watch(anatomy), runner, config)
        middles, dtype = _middles(anatomy, sites), config.model_config.dtype
        return find_faults(anatomy, middles, watch, dtype, _attention_sizes(anatomy, sites))
    except CompatError:
        raise
    except Exception:  # the anatomy from the source can still be right
        logger.warning(
            "vllm-scope: the forward before compilation failed; the anatomy is as its source says, "
            "and was not compared with numbers.", exc_info=True,
        )  # fmt: skip
        return None


def _attention_sizes(anatomy: Anatomy, sites: Sites) -> dict[str, int]:
    """The size of a row on this rank, for each site inside the attention that has a tap on this
    rank."""
    return {
        site: anatomy.splits[site].part if site in anatomy.splits else sites.row_size(site)
        for site in ATTENTION_SITES
        if any(Place(site, number).boundary in sites.boundaries for number in anatomy.attention)
    }


def _watched(watch: Watch, runner: ModelRunner, config: VllmConfig) -> Watch:
    """Run an uncompiled forward of dummy tokens. The watch records its rows. Returns the watch."""
    from vllm.config import set_current_vllm_config

    num_tokens = min(_NUM_TOKENS, int(config.scheduler_config.max_num_batched_tokens))
    with set_current_vllm_config(config), _uncompiled(runner), watch:
        runners.dummy_forward(runner, lambda: None, num_tokens)
    return watch


def _proved_by_numbers(runner: ModelRunner, config: VllmConfig, unread: str) -> Proved:
    """The only possible anatomy with which the numbers of a forward agree.

    Raises:
        CompatError: the numbers do not prove where the stream is.
    """
    dtype = config.model_config.dtype
    anatomies = supposed_anatomies_of(runner.get_model(), config, unread)
    try:
        watch = _watched(Watch(anatomies[0]), runner, config)
        plain = _watched(Watch(anatomies[0], noise=False), runner, config)
    except Exception as error:
        raise CompatError(
            f"{unread}, and the forward whose numbers could show the stream failed "
            f"({type(error).__name__}: {error})"
        ) from error
    anatomy = prove_supposed(anatomies, watch, dtype, hidden_size_of(config))
    logger.warning(
        "vllm-scope: %s. By numbers, %s; only embed, resid_pre and resid_post are served.",
        unread, anatomy.convention.value,
    )  # fmt: skip
    return Proved(anatomy, rows=stream_rows(anatomy, plain, dtype))


def _check_sites(unread: str, sites: Sites) -> None:
    """Raises ConfigError if a configured site is not proved by the stream's numbers."""
    for boundary in sites.readable:
        site, _ = place_at(boundary)
        # resid_pre of a layer has the same boundary as embed, or as resid_post of another layer.
        if site not in ("embed", "resid_post"):
            raise refused_site(
                site, f"{unread}; numbers prove only embed, resid_pre and resid_post"
            )


def _middles(anatomy: Anatomy, sites: Sites) -> dict[int, nn.Module]:
    """Maps each layer with a tap at resid_mid, attn_out or mlp_out to the norm before its MLP. The
    worker later raises an error for a layer without this norm."""
    found = {}
    for number, layer in anatomy.layers.items():
        places = (Place(site, number) for site in ("resid_mid", "attn_out", "mlp_out"))
        if any(place.boundary in sites.readable for place in places):
            try:
                found[number] = norm_of(layer, number, anatomy.convention)
            except CompatError:
                continue
    return found


@contextmanager
def _uncompiled(runner: ModelRunner) -> Iterator[None]:
    """In the `with` block, the model and its draft model run without compilation. Single operations
    that vLLM would compile also run without compilation.
    vllm 0.32, compilation/decorators.py, _support_torch_compile; model_executor/custom_op.py
    """
    drafters = (getattr(runner, name, None) for name in ("drafter", "speculator"))
    models = [runner.get_model(), *(getattr(drafter, "model", None) for drafter in drafters)]
    compiled: list[Any] = [
        module
        for model in models if isinstance(model, nn.Module)
        for module in model.modules() if getattr(module, "do_not_compile", None) is False
    ]  # fmt: skip
    for module in compiled:
        module.do_not_compile = True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in compiled:
            module.do_not_compile = False


def _tell(findings: Findings) -> None:
    logger.info("vllm-scope: %d equalities of the stream hold by numbers.", findings.num_equal)
    for what, layers in findings.untold.items():
        logger.info("vllm-scope: numbers do not show %s %s.", what, ", ".join(map(str, layers)))
    if findings.moved:
        logger.warning(
            "vllm-scope: the model changes the stream before layers %s; resid_pre cannot be read "
            "there.", ", ".join(map(str, findings.moved)),
        )  # fmt: skip
