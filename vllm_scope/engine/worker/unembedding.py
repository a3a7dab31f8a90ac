"""The final norm and the unembedding of a loaded model, as the lens of its rows.

Owns:  `lens_of`, `check_lens`.
Runs:  in every worker, once, after the canary.
From:  graph.anatomy (the final norm), vLLM's LogitsProcessor.   To: worker.lens.

Promise: fail closed. The lens applies what the model itself applies: the norm that it calls after
its layers, then its LogitsProcessor, with the same head and bias. A dummy forward shows that
nothing else is between the last layer and the logits. A model for which one of these does not hold
has no lens, and requests are told why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.errors import CompatError
from vllm_scope.request.sites import Place, Sites
from vllm_scope.worker.lens import DeviceLens

#: Of a row's length: how far the norm of the row may be from what the model itself made of it,
#: before the row was rounded. Of another norm it is of the order of 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
#: Rows of the first calls: some models' norms are compiled for one row, for two, and for many, and
#: not on the drain thread.
_FIRST_ROWS = (1, 2, 3)


@dataclass
class _Call:
    """What a LogitsProcessor was called with, and what it returned.

    Attributes:
        copies: of the rows and the logits, as they were then.
    """

    processor: nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    logits: object
    copies: list[Tensor]


def check_lens(config: VllmConfig, is_last: bool, sites: Sites, here: Collection[int]) -> None:
    """Check what a lens needs of an engine, before its model is looked at.

    Args:
        is_last: of the pipeline stages.
        here: boundaries with a tap on this worker.

    Raises:
        CompatError: the text says what is needed.
    """
    ranks = config.parallel_config.tensor_parallel_size
    if ranks > 1:
        raise CompatError(
            f"tensor_parallel_size is {ranks}, so that no rank has the whole vocabulary; start "
            "with tensor_parallel_size 1, or read the rows and use vllm_scope.analysis.lens"
        )
    if not is_last:
        raise CompatError(
            "only the last pipeline stage has the final norm and the unembedding; name layers of "
            "that stage, or read the rows and use vllm_scope.analysis.lens"
        )
    if config.model_config.runner_type != "generate":
        raise CompatError("the model does not generate, so that it has no unembedding")
    last = sites.num_layers - 1
    if Place("resid_post", last).boundary not in here:
        raise CompatError(
            f"resid_post of the last layer, {last}, has no tap, where the lens is compared with "
            "the model; add it to additional_config={'scope': {'sites': ..., 'layers': ...}}"
        )


def lens_of(
    model: nn.Module, final_norm: nn.Module | None, row: Tensor, hidden: Tensor
) -> DeviceLens:
    """The lens of a model.

    Args:
        model: vLLM's, with `compute_logits`.
        final_norm: `Anatomy.norm_here`.
        row: [hidden_size], the exit of the last layer in a forward.
        hidden: [hidden_size], what the model returned of it there.

    Raises:
        CompatError: the model has no such lens; the text says why.
    """
    name = type(model).__name__
    if final_norm is None:
        raise CompatError(f"{name} does not call exactly one norm after its layers")
    norm = _norm_of(final_norm)
    with torch.inference_mode():
        error = (norm(row[None])[0].float() - hidden.float()).norm()
        if not error <= _TOLERANCE[row.dtype] * hidden.float().norm():
            raise CompatError(f"{name} does more after its layers than its final norm does")
        made, logits = _unembedding_of(model, hidden[None])
    lens = DeviceLens(lambda rows: made(norm(rows)), logits.shape[1])
    for num_rows in _FIRST_ROWS:
        lens.pack(row.expand(num_rows, -1).contiguous(), 1)
    return lens


def _norm_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module on rows alone, without its tap. vLLM's norms may be compiled; their forward_native
    is not, so that any thread may call it."""
    untapped = getattr(module, "scope_base", type(module))
    call = getattr(module, "forward_native", None) or partial(untapped.forward, module)

    def norm(rows: Tensor) -> Tensor:
        made = call(rows)
        found = made[0] if isinstance(made, tuple) else made  # Cohere's returns (rows, residual)
        assert isinstance(found, Tensor)
        return found

    return norm


def _unembedding_of(model: nn.Module, hidden: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """(hidden [n, hidden_size] -> logits [n, vocab_size], the logits of `hidden`)"""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    name = type(model).__name__
    if any(isinstance(getattr(m, "base_layer", None), LogitsProcessor) for m in model.modules()):
        raise CompatError("LoRA adapters may change the unembedding; start without enable_lora")
    calls: list[_Call] = []

    def see(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object],
            logits: object) -> None:  # fmt: skip
        copies = [one.clone() for one in (*args[1:2], logits) if isinstance(one, Tensor)]
        calls.append(_Call(module, args, kwargs, logits, copies))

    before = hidden.clone()
    every = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    handles = [one.register_forward_hook(see, with_kwargs=True) for one in every]
    try:
        logits = model.compute_logits(hidden)  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) != 1:
        raise CompatError(f"{name} does not make its logits with one LogitsProcessor")
    (call,) = calls
    # compute_logits itself must change neither the row nor the logits, in place neither.
    same = len(call.args) > 1 and call.args[1] is hidden and call.logits is logits
    if not same or not all(map(torch.equal, call.copies, (before, logits))):
        raise CompatError(f"{name} changes its rows or its logits outside of LogitsProcessor")
    head, rest, options = _own_head(call.args[0]), call.args[2:], call.kwargs

    def made(rows: Tensor) -> Tensor:
        found = call.processor(head, rows, *rest, **options)
        assert isinstance(found, Tensor)
        return found

    assert isinstance(logits, Tensor)
    return made, logits


def _own_head(head: object) -> object:
    """The head for another thread. On a CPU vLLM's product has a state (oneDNN's memory), which two
    threads must not use at once; the copy shares the weights, and uses torch's product.
    vllm 0.32, model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm
    """
    if not hasattr(head, "cpu_linear"):
        return head
    own = copy.copy(head)
    own.cpu_linear = torch.nn.functional.linear
    return own
