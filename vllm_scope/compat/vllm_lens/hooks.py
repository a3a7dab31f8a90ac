"""A Hook calls a Python function inside the model, for one request or for all requests of an LLM.

    def ablate_neuron(ctx, h):                  # h: [seq_len, hidden], the rows of this step
        ctx.saved.setdefault("before", []).append(h[:, 42].cpu())
        h[:, 42] = 0
        return h                                # None leaves the rows as they are

    # VLLM_ENABLE_V1_MULTIPROCESSING=0 must be set before vLLM is imported.
    llm = LLM(model, enforce_eager=True, distributed_executor_backend="uni")
    params = SamplingParams(extra_args={"apply_hooks": [Hook(ablate_neuron, [15])]})
    llm.generate(prompt, params)[0].hook_results["0"]["before"]

In each step with tokens of the request, the function is called one time for each layer of the Hook.
These tokens are a chunk of the prompt, or one generated token. With async scheduling, the last call
can be for a token that vLLM then discards. The model continues with the rows that the function
returns. A function is never pickled and never leaves this process. A function can do all that this
process can do.

vllm-lens adds `llm.register_hooks(...)` and related methods to vllm.LLM. vllm-scope adds the same
methods when a caller imports Hook from vllm_scope.compat.vllm_lens.
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

#: The values that a hook saves, under names that the hook chooses.
Saved = dict[str, Any]


class HookContext:
    """The first argument of a hook's function. Each hook has one HookContext per completion.

    Attributes:
        layer_idx: the layer at which the function is called.
        seq_len: number of rows that the function receives.
        positions: the rows' absolute positions.
        saved: a dict for the values that the function saves. `output.hook_results` has this dict
            under the hook's index. If the hook is for all requests, PersistentHooks.results has
            this dict.
        model: vLLM's model.
    """

    model: torch.nn.Module

    def __init__(self) -> None:
        self.layer_idx, self.seq_len, self.positions = 0, 0, range(0)
        self.saved: Saved = {}

    def get_parameter(self, name: str) -> Tensor:
        """The parameter, buffer or other tensor of the model that has the dotted name `name`."""
        found: object = self.model
        for part in name.split("."):
            found = getattr(found, part)
        return torch.as_tensor(found)


@dataclass(frozen=True, eq=False)
class Hook(Model):
    """A function that the engine calls after some layers, or before these layers.

    Attributes:
        fn: a function of a HookContext and rows. `fn` returns new rows, or None to keep the old
            rows. The given rows are a copy of the residual stream, [seq_len, hidden], in the
            model's dtype, on the model's device.
        layer_indices: the numbers of the layers, from 0.
        pre: whether `fn` is called before each layer, with the layer's input. If False, `fn` is
            called after each layer, with the layer's output.
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
        """Raises SpecError, because functions cannot be sent as JSON."""
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
        #: Maps a completion's index to a dict from the index of each called hook to its context.
        self._contexts: dict[int, dict[int, HookContext]] = {}
        self._errors: dict[int, str] = {}

    def call(
        self, child: int, place: tuple[int, bool], rows: Tensor, first: int,
        model: torch.nn.Module,
    ) -> Tensor | None:  # fmt: skip
        """Call the hooks of one place (layer, pre) on `rows`, in order.

        Each hook receives the rows that the hooks before it returned. Returns the last rows that a
        hook returned, or None if no hook returned rows.
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
        """The values that the request's own hooks saved for a completion.

        If `of_all` is True, the result has the values that the hooks of every request saved.
        """
        start = 0 if of_all else self._num_of_all
        stop = self._num_of_all if of_all else len(self._hooks)
        contexts = self._contexts.get(child, {})
        # The results do not hold the contexts, because a context holds the engine's model.
        found = {str(i - start): c.saved for i, c in contexts.items() if start <= i < stop}
        return HookResults(found, self._errors.get(child))


class HookResults(Mapping[str, Saved]):
    """`output.hook_results`, which maps a hook's index, as text, to the hook's saved values.

    Raises:
        ScopeError: the caller reads a value, and a hook of the completion has failed.
    """

    def __init__(self, saved: Mapping[str, Saved], error: str | None) -> None:
        self._saved, self._error = saved, error

    def __getitem__(self, index: str) -> Saved:
        if self._error is not None:
            raise ScopeError(f"hook_results: {self._error}")
        return self._saved[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


class PersistentHooks:
    """The hooks that all requests of one LLM have, and the values that these hooks saved.

    Attributes:
        hooks: the hooks, which run before a request's own hooks.
        results: maps request ids to the values that the hooks saved. If a request has several
            completions, the key is the completion's index, "_" and the request id.
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
    """Let every later request of this LLM run these hooks too.

    Raises:
        SpecError: an item is not a Hook, or the engine cannot run hooks.
    """
    from vllm_scope.engine.functions import check_engine

    check_engine(self.llm_engine)
    if not all(isinstance(hook, Hook) for hook in hooks):
        raise SpecError(f"hooks is {shown(hooks)}; it must be a list of Hook.")
    _of(self).hooks.extend(hooks)


def collect_hook_results(self: LLM) -> dict[str, HookResults]:
    """A copy of PersistentHooks.results, without the results that were cleared."""
    return dict(_of(self).results)


def clear_hooks(self: LLM) -> None:
    """Forget the hooks of all requests, and the results of these hooks. Running requests keep
    their hooks."""
    _of(self).hooks = []
    clear_hook_results(self)


def clear_hook_results(self: LLM) -> None:
    """Forget the results of the hooks, and keep the hooks."""
    _of(self).results = {}


def prefetch_params(self: LLM, names: Sequence[str]) -> None:
    """Does nothing, because the only worker has all parameters of the model."""


def clear_prefetched(self: LLM) -> None:
    """Does nothing."""


def attach() -> None:
    """Add the functions above to vllm.LLM as methods, if vLLM is installed."""
    try:
        from vllm import LLM
    except ImportError:
        return
    for method in (
        register_hooks, collect_hook_results, clear_hooks, clear_hook_results, prefetch_params,
        clear_prefetched,
    ):  # fmt: skip
        setattr(LLM, method.__name__, method)
