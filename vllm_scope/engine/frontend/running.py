"""Stores the requests that have entered, and their completions.

Owns:  Running and Live, and the tables of Running and Live objects.
Runs:  in the front-end process, on its main thread or event loop.
From:  requests (stores a Running for each RequestState of vLLM).   To: outputs, http.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from inspect import ismethod
from weakref import WeakMethod

from vllm_scope.engine.beside import Beside
from vllm_scope.engine.frontend.translators import Decorators
from vllm_scope.engine.vllm_types import CompletionOutput, Detokenizer, RequestOutput
from vllm_scope.errors import ScopeError
from vllm_scope.results.buffer import Pending

logger = logging.getLogger("vllm.vllm_scope")


class Running:
    """A request that has entered, with the data that its outputs need.

    Attributes:
        text: the JSON text of the request's spec.
        texts: the text that each generated token added to the answer. A stop token without text in
            the answer has no entry. The list is empty if there are no probes or no tokenizer.
        refusal: the error with which EngineCore ended the request, or None.
    """

    def __init__(
        self,
        pending: Pending,
        decorators: Decorators,
        detokenizer: Detokenizer,
        text: str,
    ) -> None:
        self.pending, self.decorators, self.text = pending, decorators, text
        self._detokenizer = detokenizer
        self._output_ids: list[int] = []
        self.texts: list[str] = []
        self.refusal: ScopeError | None = None
        decode = getattr(detokenizer, "decode_next", None)
        if pending.asked.probes and decode is not None:
            detokenizer.decode_next = self._following(decode)

    def _following(self, decode: Callable[..., str]) -> Callable[..., str]:
        # The detokenizer will hold `decode_next`. If `decode_next` held the detokenizer or this
        # Running, there would be a cycle, and the request's rows would stay in memory until a
        # garbage collection. Therefore `decode_next` holds only a weak reference and `texts`.
        texts = self.texts
        found: Callable[[], Callable[..., str] | None]
        found = WeakMethod(decode) if ismethod(decode) else lambda: decode

        def decode_next(*args: object, **kwargs: object) -> str:
            method = found()
            assert method is not None
            texts.append(method(*args, **kwargs))
            return texts[-1]

        return decode_next

    def output_ids(self) -> list[int]:
        """All tokens that were generated so far. Snapshots share the returned list, and later calls
        append tokens to the list."""
        every, known = self._detokenizer.token_ids, self._output_ids
        count = self._detokenizer.num_output_tokens()
        if count < len(known):  # a stop string has removed tokens from the output
            known = self._output_ids = known[:count]
        known.extend(every[len(every) - count + len(known) :])
        return known

    def give(self, output: RequestOutput, completion: CompletionOutput) -> None:
        """Set the completion's current result, and call the request's decorators."""
        # `num_seen` is read before the snapshot is taken, so that data that arrives in between
        # counts as new.
        num_seen = self.pending.num_came
        completion.scope = self.pending.snapshot(self.output_ids(), completion.finish_reason)
        completion.scope_texts = self.texts
        live = lives.of(completion)
        if completion.finish_reason is not None:
            lives.pop(completion)
        elif live is not None:
            live.num_seen = num_seen
        for decorate in self.decorators:
            try:
                decorate(output, completion)
            except Exception as error:
                # Only this request fails. The other outputs of the step are returned as usual.
                logger.exception("vllm-scope: output %s was not decorated", output.request_id)
                self.pending.error = self.pending.error or (
                    "the other data of this output, besides its rows, could not be made "
                    f"({type(error).__name__}); the server's log has the traceback."
                )
                completion.scope = self.pending.snapshot(
                    self.output_ids(), completion.finish_reason
                )


@dataclass
class Live:
    """A completion whose result can still change.

    Attributes:
        running: the completion's request; None if EngineCore refused a request without a spec.
        num_seen: the counter `Pending.num_came` at the last snapshot; -1 before the first snapshot.
        refusal: the error with which EngineCore refused the request, or None.
    """

    running: Running | None
    num_seen: int = -1
    refusal: ScopeError | None = None


#: Maps vLLM's RequestState to the Running of the same request.
runs: Beside[Running] = Beside()
#: Maps vLLM's CompletionOutput to its Live, until the completion has its last result.
lives: Beside[Live] = Beside()


def running_of(completion: object) -> Running | None:
    """The Running of a completion whose result can still change; None for all other completions."""
    live = lives.of(completion)
    return None if live is None else live.running


def refusal_of(completion: object) -> ScopeError | None:
    """The error with which EngineCore refused or ended the request of a completion, or None."""
    live = lives.of(completion)
    if live is None:
        return None
    # vLLM adds the newest tokens of a stream to a completion that the caller has not read yet. The
    # Live of that completion is older than the error, so that only the Running has the error.
    # vllm 0.32, outputs.py, RequestOutput.add
    return live.refusal or (live.running.refusal if live.running is not None else None)
