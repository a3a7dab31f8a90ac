"""Requests that have entered, and the completions that vLLM makes of them.

Owns:  Running and Live, and the tables of both.
Runs:  in the front-end process, on its main thread or event loop.
From:  requests (which puts a Running beside vLLM's RequestState).   To: outputs, http.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from vllm_scope.engine.beside import Beside
from vllm_scope.engine.frontend.translators import Decorators
from vllm_scope.engine.vllm_types import CompletionOutput, Detokenizer, RequestOutput
from vllm_scope.errors import ScopeError
from vllm_scope.results.buffer import Pending

logger = logging.getLogger("vllm.vllm_scope")


class Running:
    """A request that has entered, and what its outputs get.

    Attributes:
        text: the spec.
        vectors: True if it edits or probes. EngineCore may still refuse such a request.
        texts: the text that each generated token added to the answer; empty without probes. A
            stop token that is not shown has no entry.
    """

    def __init__(
        self,
        pending: Pending,
        decorators: Decorators,
        detokenizer: Detokenizer,
        text: str,
        vectors: bool,
    ) -> None:
        self.pending, self.decorators = pending, decorators
        self.text, self.vectors = text, vectors
        self._detokenizer = detokenizer
        self._output_ids: list[int] = []
        self.texts: list[str] = []
        decode = getattr(detokenizer, "decode_next", None)
        if pending.asked.probes and decode is not None:
            detokenizer.decode_next = self._following(decode)

    def _following(self, decode: Callable[..., str]) -> Callable[..., str]:
        def decode_next(*args: object, **kwargs: object) -> str:
            text = decode(*args, **kwargs)
            self.texts.append(text)
            return text

        return decode_next

    def output_ids(self) -> list[int]:
        """All generated tokens so far. Snapshots share this list, and later calls extend it."""
        every, known = self._detokenizer.token_ids, self._output_ids
        count = self._detokenizer.num_output_tokens()
        if count < len(known):  # a stop string removed some
            known = self._output_ids = known[:count]
        known.extend(every[len(every) - count + len(known) :])
        return known

    def give(self, output: RequestOutput, completion: CompletionOutput) -> None:
        """Set the completion's result so far, and call the request's decorators."""
        # Read before the snapshot is taken: values that arrive in between then count as new.
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
                # Only this request fails; the step's other outputs go on.
                logger.exception("vllm-scope: output %s was not decorated", output.request_id)
                self.pending.error = self.pending.error or (
                    "what this output was to have beside its rows could not be made "
                    f"({type(error).__name__}); the server's log has the traceback."
                )
                completion.scope = self.pending.snapshot(
                    self.output_ids(), completion.finish_reason
                )


@dataclass
class Live:
    """A completion whose result may still change.

    Attributes:
        running: its request; None if EngineCore refused a request without a spec of its own.
        num_seen: `Pending.num_came` at the last snapshot; -1 before the first.
        refusal: why EngineCore refused the request, or None.
    """

    running: Running | None
    num_seen: int = -1
    refusal: ScopeError | None = None


#: vLLM's RequestState -> its Running.
runs: Beside[Running] = Beside()
#: vLLM's CompletionOutput -> its Live, until the completion has its last result.
lives: Beside[Live] = Beside()


def running_of(completion: object) -> Running | None:
    """The request of a completion whose result may still change; None for any other completion."""
    live = lives.of(completion)
    return None if live is None else live.running
