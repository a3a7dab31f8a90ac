"""Hooks of every request: `llm.register_hooks(...)` and the methods beside it.

vllm-lens adds these methods to vllm.LLM. Here vllm.LLM gets them when Hook is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_scope.compat import PERSISTENT
from vllm_scope.compat.vllm_lens.hooks import Hook, HookResults
from vllm_scope.errors import SpecError, shown

if TYPE_CHECKING:
    from vllm import LLM


class PersistentHooks:
    """The hooks that all requests of one LLM have, and what they saved.

    Attributes:
        hooks: they run before a request's own.
        results: request id -> the hook's index, as text -> what it saved. If a request has
            several completions, the completion's index and "_" come before the id.
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
        SpecError: a value that is no Hook, or an engine that cannot run hooks.
    """
    from vllm_scope.engine.functions import check_engine

    check_engine(self.llm_engine)
    if not all(isinstance(hook, Hook) for hook in hooks):
        raise SpecError(f"hooks is {shown(hooks)}; it is a list of Hook.")
    _of(self).hooks.extend(hooks)


def collect_hook_results(self: LLM) -> dict[str, HookResults]:
    """request id -> the hook's index -> what it saved, since the last clear."""
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
    """Give vllm.LLM the methods, if vLLM is installed."""
    try:
        from vllm import LLM
    except ImportError:
        return
    for method in (
        register_hooks, collect_hook_results, clear_hooks, clear_hook_results, prefetch_params,
        clear_prefetched,
    ):  # fmt: skip
        setattr(LLM, method.__name__, method)
