"""Translates vllm-probe-hook's options to reads, and shows a result's rows as hidden states.

Owns:  Options, HiddenStates, `translate`.
Runs:  in the front-end.
To:    probe_hook, whose LLM and AsyncLLM put their Options into each request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm import SamplingParams

from vllm_scope.compat import EDITING
from vllm_scope.engine.frontend.translators import Translation, called, give, named
from vllm_scope.errors import ScopeError, SpecError, shown
from vllm_scope.request.actions import Read
from vllm_scope.request.selectors import Except
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec
from vllm_scope.results.result import ScopeResult

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput


SITE = "resid_post"
KEY = "probe_hook"
#: Maps the parts of a Read to the arguments of LLM and AsyncLLM. Error texts name the arguments.
WORDS = {"Read.layers": "layers", "Read.site": "layers"}


@dataclass(frozen=True)
class Options:
    """The arguments of LLM and AsyncLLM that say which hidden states are captured.

    Attributes:
        layers: the numbers of the layers, from 0, or "all".
        include_prefill: capture the prompt's tokens, as `output.prefill_hidden`.
        include_decode: capture the generated tokens, as `output.hidden_states`.
        last_prefill_token: capture only the last token of the prompt. The option captures this
            token even if `include_prefill` is False.
        last_decode_token: capture only the last generated token that the model processes. The
            option captures this token even if `include_decode` is False.
        process_last_token: also process the token that was sampled last, in a second request. If
            prefix caching is on, the second request takes most other tokens from the cache. A
            request with edits cannot use this option. `max_model_len` must leave room for one more
            token.

    Raises:
        SpecError: no option selects tokens, or the value of an option has a wrong type.
    """

    layers: Sequence[int] | str = "all"
    include_prefill: bool = False
    include_decode: bool = True
    last_prefill_token: bool = False
    last_decode_token: bool = False
    process_last_token: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "layers" and not isinstance(value, bool):
                raise SpecError(f"{name} is {shown(value)}; it must be True or False.")
        with called(WORDS):
            Read(SITE, layers=self.layers)
        if not self.prefill and not self.decode:
            raise SpecError(
                "nothing is captured: include_prefill and include_decode are both False."
            )

    @property
    def prefill(self) -> bool:
        return self.include_prefill or self.last_prefill_token

    @property
    def decode(self) -> bool:
        return self.include_decode or self.last_decode_token

    def reads(self) -> list[Read]:
        found = []
        if self.prefill:
            tokens = "last_prompt" if self.last_prefill_token else "prompt"
            found.append(Read(SITE, layers=self.layers, tokens=tokens))
        if self.decode:
            some = Except("last", "prompt") if self.last_decode_token else "generated"
            found.append(Read(SITE, layers=self.layers, tokens=some))
        return found

    def params(self, given: SamplingParams | None) -> SamplingParams:
        """Copy a request's sampling parameters, and add these Options to the copy."""
        params = copy(given) if given is not None else SamplingParams()
        extra = params.extra_args or {}
        if self.process_last_token:
            edits = sorted(key for key in EDITING & extra.keys() if extra[key] is not None)
            if "scope" in extra and Spec.from_json(extra["scope"]).edits:
                edits = ["edits"]
            if edits:
                raise SpecError(
                    f"process_last_token and {edits[0]} do not go together: the token sampled last "
                    "is processed in another request. Generate one token more instead."
                )
        params.extra_args = {**extra, KEY: self}
        return params


class HiddenStates(Mapping[int, Tensor]):
    """Maps each layer to its rows that have arrived so far, [num_rows, d_model].

    Args:
        of_prompt: True for the rows of the prompt's tokens, False for those of generated tokens.

    Raises:
        ScopeError: the caller accesses a layer of a request that failed, or that ended with missing
            rows.
    """

    def __init__(self, result: ScopeResult, layers: Sequence[int], *, of_prompt: bool) -> None:
        self._result, self._layers, self._of_prompt = result, tuple(layers), of_prompt
        self._last: HiddenStates | None = None
        self._last_alone = False

    def end_with(self, last: HiddenStates, alone: bool) -> None:
        """Append the rows of `last`, which has the row of the token that was sampled last.

        Args:
            alone: whether each layer then has only the rows of `last`, without its own rows.
        """
        self._last, self._last_alone = last, alone

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self._layers:
            raise KeyError(f"layer {layer} was not captured; there are {list(self._layers)}.")
        result = self._result
        if result.status not in ("complete", "streaming", "aborted"):
            raise ScopeError(
                f"the hidden states of this request are {result.status}: "
                f"{result.error or f'{result.dropped} rows are missing'}."
            )
        in_prompt = result.positions(SITE, layer) < result.num_prompt
        rows = result[SITE, layer][in_prompt if self._of_prompt else ~in_prompt]
        if self._last is None:
            return rows
        return self._last[layer] if self._last_alone else torch.cat([rows, self._last[layer]])

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"HiddenStates of layers {list(self)}"


def translate(values: Mapping[str, object], sites: Sites) -> Translation:
    """Return the Reads of the layers and tokens that the Options of a request name.

    Raises:
        SpecError: the engine does not tap a layer, or the options were not set by LLM or AsyncLLM.
    """
    options = values[KEY]
    if not isinstance(options, Options):
        raise SpecError(f"{KEY} must be set by LLM and AsyncLLM of this module.")
    numbers = Read(SITE, layers=options.layers).layer_numbers
    with called(WORDS):
        layers = [layer for _, layer in sites.find(SITE, numbers, "Read")]

    def decorate(output: RequestOutput, completion: CompletionOutput) -> None:
        result: ScopeResult = completion.scope
        decode = HiddenStates(result, layers, of_prompt=False) if options.decode else None
        prefill = HiddenStates(result, layers, of_prompt=True) if options.prefill else None
        give(output, completion, "hidden_states", decode)
        give(output, completion, "prefill_hidden", prefill)

    reads = options.reads()
    paths = named((read, {".layers": "layers", ".site": "layers"}) for read in reads)
    return Translation(tuple(reads), decorate, paths=paths)
