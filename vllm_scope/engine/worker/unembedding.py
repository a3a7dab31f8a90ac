"""Makes the lens of a loaded model from its final norm and its unembedding.

Owns:  LogitsCall, `logits_call`, `lens_of`, `check_lens`.
Runs:  in every worker, once, after the canary. With several ranks, `logits_call` also runs when the
       model is loaded.
From:  graph.anatomy (the final norm), vLLM's LogitsProcessor.   To: own_lens, worker.lens.

Promise: the lens applies the model's own norm after the layers, and then the model's own
LogitsProcessor with the same unembedding and bias. A dummy forward checks that the model computes
nothing else between the last layer and the logits. If the check fails, the model has no lens. Each
request for a lens then gets an error with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.engine.worker.vocabulary import part_alone, tensors_of
from vllm_scope.errors import CompatError
from vllm_scope.request.sites import Place, Sites
from vllm_scope.worker.lens import DeviceLens

#: The largest allowed error of the lens, relative to the length of the model's own result. The
#: model applies its norm before a row is rounded, and the lens applies the norm to the rounded row.
#: Therefore the error is not 0. With a wrong norm, the relative error is about 1. The same bounds
#: are used for logits.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
#: The numbers of rows in the first calls of a lens. The norms of some models are compiled for one
#: row, for two rows and for many rows. The first calls compile these norms, so that the drain
#: thread need not do it.
_FIRST_ROWS = (1, 2, 3)


@dataclass
class LogitsCall:
    """The arguments and the result of one call of a model's LogitsProcessor.

    Attributes:
        model: the model's name, for the text of errors.
        args: the unembedding module (head), the rows [n, hidden_size], and further arguments.
        logits: the result, [n, vocab_size]; None on ranks to which vLLM returns no logits.
    """

    model: str
    processor: nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    logits: object

    @property
    def head(self) -> nn.Module:
        assert isinstance(self.args[0], nn.Module)
        return self.args[0]

    def logits_by(self, parts: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
        """A function that computes logits [n, vocab_size] from rows [n, hidden_size], with all
        parts.

        Raises:
            CompatError: the head is split among ranks, and an argument of the call is a tensor that
                does not belong to the head. The other ranks' parts of this tensor are unknown.
        """
        made = [self._logits_of(head) for head in parts]
        if len(made) == 1:
            return made[0]
        vocab_size = int(self.processor.org_vocab_size)  # type: ignore[arg-type]
        return lambda rows: torch.cat([one(rows) for one in made], -1)[:, :vocab_size]

    def _logits_of(self, head: nn.Module) -> Callable[[Tensor], Tensor]:
        rest = [self._of(head, value) for value in self.args[2:]]
        options = {name: self._of(head, value) for name, value in self.kwargs.items()}

        def made(rows: Tensor) -> Tensor:
            found = self.processor(head, rows, *rest, **options)
            assert isinstance(found, Tensor)
            return found

        return made

    def _of(self, head: nn.Module, value: object) -> object:
        """The argument `value` for a call with `head` in place of this call's own head. If `value`
        is a tensor of the own head, the result is the tensor of `head` with the same name. Other
        values are returned unchanged."""
        if not isinstance(value, Tensor):
            return value
        for name, one in tensors_of(self.head).items():
            if one is value:
                return tensors_of(head)[name]
        if getattr(self.head, "tp_size", 1) == 1:
            return value
        raise CompatError(f"{self.model} adds a tensor to its logits that is not its unembedding's")


def check_lens(
    config: VllmConfig, is_last: bool, sites: Sites, here: Collection[int], unembedding_mib: float
) -> None:
    """Check whether this engine supports a lens of its model. `lens_of` checks the model later.

    Args:
        is_last: True on the last pipeline stage.
        here: boundaries with a tap on this worker.
        unembedding_mib: additional_config['scope'].unembedding_mib.

    Raises:
        CompatError: the engine does not support a lens. The error says what a lens needs.
    """
    if not is_last:
        raise CompatError(
            "only the last pipeline stage has the final norm and the unembedding; name layers of "
            "that stage, or read the rows and use vllm_scope.analysis.lens"
        )
    if config.model_config.runner_type != "generate":
        raise CompatError("the model does not generate, so that it has no unembedding")
    ranks = config.parallel_config.tensor_parallel_size
    if ranks > 1 and not unembedding_mib:
        size = config.model_config.get_vocab_size() * sites.hidden_size
        needed = size * config.model_config.dtype.itemsize * (ranks - 1) / ranks / 2**20
        raise CompatError(
            f"tensor_parallel_size is {ranks}, and no rank has the whole unembedding; start with "
            f"additional_config={{'scope': {{'unembedding_mib': {math.ceil(needed * 1.01)}}}}}, so "
            "that the first rank holds the parts of the others, or read the rows and use "
            "vllm_scope.analysis.lens"
        )
    last = sites.num_layers - 1
    if Place("resid_post", last).boundary not in here:
        raise CompatError(
            f"resid_post of the last layer, {last}, has no tap, and a lens is compared with the "
            "model there; add it to additional_config={'scope': {'sites': ..., 'layers': ...}}"
        )


def lens_of(
    call: LogitsCall, final_norm: nn.Module | None, row: Tensor,
    parts: Sequence[nn.Module] | None = None,
) -> DeviceLens:  # fmt: skip
    """The lens of a model.

    Args:
        call: the LogitsCall with the output of the forward that computed `row`.
        final_norm: `Anatomy.norm_here`.
        row: the row after the last layer in one forward, [hidden_size].
        parts: the parts of the unembedding from all tensor-parallel ranks
            (vocabulary.gather_parts). None if this rank has the whole unembedding.

    Raises:
        CompatError: a lens would not compute what the model computes. The error says why.
    """
    if final_norm is None:
        raise CompatError(f"{call.model} does not call exactly one norm after its layers")
    norm, hidden, logits = _norm_of(final_norm), call.args[1], call.logits
    assert isinstance(hidden, Tensor)
    assert isinstance(logits, Tensor)
    head = call.head
    if parts is None:
        # On a CPU, the lens uses a copy, because two threads cannot use the same unembedding at the
        # same time.
        parts = [part_alone(head, tensors_of(head))] if hasattr(head, "cpu_linear") else [head]
    with torch.inference_mode():
        if not _near(norm(row[None]), hidden, row.dtype):
            raise CompatError(
                f"{call.model} computes more between its last layer and its unembedding than its "
                "final norm"
            )
        made = call.logits_by(parts)
        if len(parts) > 1 and not _near(made(hidden), logits, row.dtype):
            raise CompatError(f"the ranks' parts of {call.model}'s unembedding make other logits")
    lens = DeviceLens(lambda rows: made(norm(rows)), logits.shape[1])
    for num_rows in _FIRST_ROWS:
        lens.pack(row.expand(num_rows, -1).contiguous(), 1)
    return lens


def _near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    """True if two tensors are equal except for the rounding of `dtype`."""
    if found.shape != exact.shape:
        return False
    error = (found.float() - exact.float()).norm()
    return bool(error <= _TOLERANCE[dtype] * exact.float().norm())


def _norm_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function that applies a norm to rows, without adding a residual and without the norm's tap.

    vLLM compiles some norms. A norm's forward_native is not compiled, and any thread can call it.
    """
    untapped = getattr(module, "scope_base", type(module))
    call = getattr(module, "forward_native", None) or partial(untapped.forward, module)

    def norm(rows: Tensor) -> Tensor:
        made = call(rows)
        found = made[0] if isinstance(made, tuple) else made  # a tuple from Cohere's norm
        assert isinstance(found, Tensor)
        return found

    return norm


def logits_call(model: nn.Module, hidden: Tensor) -> LogitsCall:
    """Run the model's `compute_logits`, and return the call of LogitsProcessor that it makes.

    All tensor-parallel ranks must call this function at the same time.

    Args:
        model: vLLM's model, which has a method `compute_logits`.
        hidden: [n, hidden_size], the model's output.

    Raises:
        CompatError: the model makes no call of LogitsProcessor or several; or the model changes the
            row or the logits outside this call; or LoRA adapters can change the unembedding.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    name = type(model).__name__
    if any(isinstance(getattr(m, "base_layer", None), LogitsProcessor) for m in model.modules()):
        raise CompatError("LoRA adapters may change the unembedding; start without enable_lora")
    calls: list[LogitsCall] = []
    copies: list[Tensor] = []

    def see(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object],
            logits: object) -> None:  # fmt: skip
        copies.extend(one.clone() for one in (*args[1:2], logits) if isinstance(one, Tensor))
        calls.append(LogitsCall(name, module, args, kwargs, logits))

    before = hidden.clone()
    every = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    handles = [one.register_forward_hook(see, with_kwargs=True) for one in every]
    try:
        with torch.inference_mode():
            logits = model.compute_logits(hidden)  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) != 1:
        raise CompatError(f"{name} does not make its logits with one LogitsProcessor")
    (call,) = calls
    # compute_logits itself must leave the row and the logits unchanged.
    same = (
        len(call.args) > 1 and isinstance(call.args[0], nn.Module)
        and call.args[1] is hidden and call.logits is logits
    )  # fmt: skip
    after = [before] if logits is None else [before, logits]
    if not same or len(copies) != len(after) or not all(map(torch.equal, copies, after)):
        raise CompatError(f"{name} changes its rows or its logits outside of LogitsProcessor")
    return call
