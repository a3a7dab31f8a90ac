"""Hook: a Python function inside the model, for one request or for all requests of this process.

    def ablate_neuron(ctx, h):                  # h: [seq_len, hidden], the rows of this step
        ctx.saved.setdefault("before", []).append(h[:, 42].cpu())
        h[:, 42] = 0
        return h                                # None leaves the rows as they are

    llm = LLM(model, enforce_eager=True, distributed_executor_backend="uni")  # with
    # VLLM_ENABLE_V1_MULTIPROCESSING=0, before vLLM is imported
    params = SamplingParams(extra_args={"apply_hooks": [Hook(ablate_neuron, [15])]})
    llm.generate(prompt, params)[0].hook_results["0"]["before"]

In each step with tokens of its request, a function is called one time for each of its layers: for
each chunk of the prompt, then for each generated token. With async scheduling, the last call can be
for a token that vLLM then discards. The model continues with the rows that the function returns. A
function is never pickled and never leaves this process. A function has the rights of this process.

vllm-lens adds `llm.register_hooks(...)` and related methods to vllm.LLM. vllm-scope adds the
methods when Hook is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from vllm_scope.compat import PERSISTENT
from vllm_scope.compat.vllm_lens.model import NO_HOOKS, Model
from vllm_scope.errors import ScopeError, SpecError, shown

if TYPE_CHECKING:
    from vllm import LLM

#: The values that a hook saves, by names that the hook chooses.
Saved = dict[str, Any]


class HookContext:
    """Where a hook runs, and the values that it saves. One context per hook and completion.

    Attributes:
        layer_idx: the layer.
        seq_len: number of rows.
        positions: the rows' absolute positions.
        saved: a dict for the hook's values; it becomes `output.hook_results[hook's index]`.
        model: vLLM's model.
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
    """A function to call after some layers, or before some layers.

    Attributes:
        fn: (HookContext, rows) -> the new rows, or None to keep the old rows. `rows` is a copy of
            the residual stream, [seq_len, hidden], in the model's dtype, on its device.
        layer_indices: the layers, from 0.
        pre: True: call `fn` before each layer, with the layer's input. False: after it.
    """

    fn: Callable[[HookContext, Tensor], Tensor | None]
    layer_indices: Sequence[int]
    pre: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise SpecError(
                f"Hook.fn is {shown(self.fn)}; it must be a function of this process. Functions "
                "are arbitrary code; no request can send a function."
            )
        layers = list(self.layer_indices)
        object.__setattr__(self, "layer_indices", layers)
        if {type(n) for n in layers} != {int}:
            raise SpecError(f"Hook.layer_indices is {shown(layers)}; it must be a list of layers.")

    def model_dump(self, mode: str = "json") -> NoReturn:
        """Raises SpecError: functions are not sent as JSON."""
        raise SpecError(NO_HOOKS)


class HookRun:
    """The hooks of one request, and the values that they saved.

    Implements engine.functions.Functions.

    Args:
        of_all: the hooks of every request, which run before the request's own hooks.
        own: the request's hooks.
    """

    def __init__(self, of_all: Sequence[Hook], own: Sequence[Hook]) -> None:
        self._hooks, self._num_of_all = [*of_all, *own], len(of_all)
        self.places = {(layer, hook.pre) for hook in self._hooks for layer in hook.layer_indices}
        #: Index of a completion -> index of a hook that was called -> its context.
        self._contexts: dict[int, dict[int, HookContext]] = {}
        self._errors: dict[int, str] = {}

    def call(
        self, child: int, place: tuple[int, bool], rows: Tensor, first: int,
        model: torch.nn.Module,
    ) -> Tensor | None:  # fmt: skip
        """The rows that the hooks of a place (layer, pre) return; None if no hook returns rows.

        Each hook gets the rows that the previous hook returned.
        """
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
        """The values that the request's own hooks saved for a completion. If `of_all` is True: the
        values of the hooks of every request."""
        start = 0 if of_all else self._num_of_all
        stop = self._num_of_all if of_all else len(self._hooks)
        contexts = self._contexts.get(child, {})
        found = {str(i - start): c for i, c in contexts.items() if start <= i < stop}
        return HookResults(found, self._errors.get(child))


class HookResults(Mapping[str, Saved]):
    """`output.hook_results`: a hook's index, as text -> the values that the hook saved.

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


class PersistentHooks:
    """The hooks that all requests of one LLM have, and the values that these hooks saved.

    Attributes:
        hooks: run before a request's own hooks.
        results: request id -> the hook's index, as text -> the values that the hook saved. If a
            request has several completions, the completion's index and "_" come before the id.
    """

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.results: dict[str, HookResults] = {}

    def __bool__(self) -> bool:
        return bool(self.hooks)


def _of(llm: LLM) -> PersistentHooks:
    found = llm.llm_engine.vllm_config.__dict__.setdefault(PERSISTENT, PersistentHooks())
    assert isinstance(found, PersistentHooks)
    return found


def register_hooks(
    self: LLM, hooks: Sequence[Hook], prefetch_params: Sequence[str] | None = None
) -> None:
    """Let every later request run these hooks too.

    Raises:
        SpecError: a value is no Hook, or the engine cannot run hooks.
    """
    from vllm_scope.engine.functions import check_engine

    check_engine(self.llm_engine)
    if not all(isinstance(hook, Hook) for hook in hooks):
        raise SpecError(f"hooks is {shown(hooks)}; it must be a list of Hook.")
    _of(self).hooks.extend(hooks)


def collect_hook_results(self: LLM) -> dict[str, HookResults]:
    """request id -> a hook's index -> the values that the hook saved, since the last clear."""
    return dict(_of(self).results)


def clear_hooks(self: LLM) -> None:
    """Forget the hooks and their results. Running requests keep their hooks."""
    _of(self).hooks = []
    clear_hook_results(self)


def clear_hook_results(self: LLM) -> None:
    """Forget the results, and keep the hooks."""
    _of(self).results = {}


def prefetch_params(self: LLM, names: Sequence[str]) -> None:
    """Does nothing: the only worker has all parameters."""


def clear_prefetched(self: LLM) -> None:
    """Does nothing."""


def attach() -> None:
    """Give vllm.LLM these methods, if vLLM is installed."""
    try:
        from vllm import LLM
    except ImportError:
        return
    for method in (
        register_hooks, collect_hook_results, clear_hooks, clear_hook_results, prefetch_params,
        clear_prefetched,
    ):  # fmt: skip
        setattr(LLM, method.__name__, method)
