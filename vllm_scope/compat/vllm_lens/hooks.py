"""Hook: Python functions inside the model, in this process alone.

    def ablate_neuron(ctx, h):                  # h: [seq_len, hidden], the rows of this step
        ctx.saved.setdefault("before", []).append(h[:, 42].cpu())
        h[:, 42] = 0
        return h                                # None leaves them as they are

    llm = LLM(model, enforce_eager=True, distributed_executor_backend="uni")  # with
    # VLLM_ENABLE_V1_MULTIPROCESSING=0, before vLLM is imported
    params = SamplingParams(extra_args={"apply_hooks": [Hook(ablate_neuron, [15])]})
    llm.generate(prompt, params)[0].hook_results["0"]["before"]

A function is called once per layer and step that has tokens of its request: for each chunk of
the prompt, then for each token; with async scheduling maybe for one token that is not kept.
The model continues with the rows that the function returns. A function is never pickled and
never leaves this process; it has this process's rights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from vllm_scope.compat.vllm_lens.model import NO_HOOKS, Model
from vllm_scope.errors import ScopeError, SpecError, shown

#: Whatever a hook keeps.
Saved = dict[str, Any]


class HookContext:
    """Where a hook runs, and what it saves; one per hook and completion.

    Attributes:
        layer_idx: the layer.
        seq_len: number of rows.
        positions: absolute, of the rows.
        saved: the hook may put anything here; it becomes `output.hook_results[index]`.
        model: vLLM's.
    """

    model: torch.nn.Module

    def __init__(self) -> None:
        self.layer_idx, self.seq_len, self.positions = 0, 0, range(0)
        self.saved: Saved = {}

    def get_parameter(self, name: str) -> Tensor:
        """A parameter, a buffer or another tensor of the model, by its dotted name."""
        found: object = self.model
        for part in name.split("."):
            found = getattr(found, part)
        return torch.as_tensor(found)


@dataclass(frozen=True, eq=False)
class Hook(Model):
    """A function to call after some layers, or before them.

    Attributes:
        fn: (HookContext, rows) -> the new rows, or None to keep them. `rows` is a copy of
            the residual stream, [seq_len, hidden], in the model's dtype, on its device.
        layer_indices: from 0.
        pre: call it before the layers, with their input.
    """

    fn: Callable[[HookContext, Tensor], Tensor | None]
    layer_indices: Sequence[int]
    pre: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise SpecError(
                f"Hook.fn is {shown(self.fn)}; it is a function of this process. Functions are "
                "arbitrary code, and none is made from what was sent."
            )
        layers = list(self.layer_indices)
        object.__setattr__(self, "layer_indices", layers)
        if {type(n) for n in layers} != {int}:
            raise SpecError(f"Hook.layer_indices is {shown(layers)}; it is a list of layers.")

    def model_dump(self, mode: str = "json") -> NoReturn:
        """Raises SpecError: functions are not sent as JSON."""
        raise SpecError(NO_HOOKS)


class HookRun:
    """The hooks of one request, and what they saved (an engine.functions.Functions).

    Args:
        of_all: the hooks of every request; they run first.
        own: the request's hooks.
    """

    def __init__(self, of_all: Sequence[Hook], own: Sequence[Hook]) -> None:
        self._hooks, self._num_of_all = [*of_all, *own], len(of_all)
        self.places = {(layer, hook.pre) for hook in self._hooks for layer in hook.layer_indices}
        #: index of a completion -> index of a hook -> its context, once it was called
        self._contexts: dict[int, dict[int, HookContext]] = {}
        self._errors: dict[int, str] = {}

    def call(
        self, child: int, place: tuple[int, bool], rows: Tensor, first: int,
        model: torch.nn.Module,
    ) -> Tensor | None:  # fmt: skip
        """Call the hooks of a place (layer, pre) in turn, each with the rows of the one before.
        Returns None if no hook has returned rows."""
        layer, before = place
        contexts = self._contexts.setdefault(child, {})
        changed = None
        for i, hook in enumerate(self._hooks):
            if hook.pre != before or layer not in hook.layer_indices:
                continue
            context = contexts.setdefault(i, HookContext())
            context.layer_idx, context.seq_len, context.model = layer, len(rows), model
            context.positions = range(first, first + len(rows))
            found = hook.fn(context, rows.clone() if changed is None else changed.clone())
            changed = found if found is not None else changed
        return changed

    def fail(self, child: int, error: str) -> None:
        self._errors[child] = error

    def results(self, child: int, *, of_all: bool = False) -> HookResults:
        """What the request's own hooks, or those of every request, saved for a completion."""
        start = 0 if of_all else self._num_of_all
        stop = self._num_of_all if of_all else len(self._hooks)
        contexts = self._contexts.get(child, {})
        found = {str(i - start): c for i, c in contexts.items() if start <= i < stop}
        return HookResults(found, self._errors.get(child))


class HookResults(Mapping[str, Saved]):
    """`output.hook_results`: the hook's index, as text -> what it saved.

    Raises:
        ScopeError: on access, if a hook of the completion has failed.
    """

    def __init__(self, contexts: Mapping[str, HookContext], error: str | None) -> None:
        self._contexts, self._error = contexts, error

    def __getitem__(self, index: str) -> Saved:
        if self._error is not None:
            raise ScopeError(f"hook_results: {self._error}")
        return self._contexts[index].saved

    def __iter__(self) -> Iterator[str]:
        return iter(self._contexts)

    def __len__(self) -> int:
        return len(self._contexts)
