"""The results of one HTTP request, put into its answer or into its chunks.

Owns:  Answer, Options, `current`.
Runs:  in an API server process, on its event loop.
From:  engine.http, which hears of each output.   To: encode, store.

Promise: a chunk carries everything new of its choice that has arrived, each value once
and in position order; the chunk that ends a choice carries the rest and the counts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

from vllm_scope.errors import CapacityError, SpecError, shown
from vllm_scope.result import Column, ScopeResult
from vllm_scope.server import encode
from vllm_scope.server.store import Store

#: Rows of one chunk; what is larger comes as a file in the end.
MAX_CHUNK_BYTES = 8 << 20
_ALLOWED = {"scope_tensors": ("auto", "handle"), "scope_stream": ("scores", "rows")}


@dataclass(frozen=True)
class Options:
    """How a request wants its tensors; fields of `vllm_xargs` beside `scope`.

    Attributes:
        tensors: "auto": small ones inline; "handle": all rows as a file.
        stream: what chunks carry: "scores", or "rows" as well.
    """

    tensors: Literal["auto", "handle"] = "auto"
    stream: Literal["scores", "rows"] = "scores"

    @staticmethod
    def parse(xargs: Mapping[str, Any]) -> Options:
        """Raises SpecError for a field or a value that is not known."""
        found = {}
        for name in (n for n in xargs if n.startswith("scope") and n != "scope"):
            value = xargs[name]
            if name not in _ALLOWED:
                raise SpecError(
                    f"vllm_xargs has {shown(name)}; beside 'scope' there are {', '.join(_ALLOWED)}."
                )
            if value not in _ALLOWED[name]:
                raise SpecError(
                    f"vllm_xargs[{name!r}] is {shown(value)}; it is one of "
                    f"{', '.join(_ALLOWED[name])}."
                )
            found[name.removeprefix("scope_")] = value
        if "scope" not in xargs:
            raise SpecError("vllm_xargs has options of a scope and no 'scope'.")
        return Options(**found)


class Answer:
    """What one HTTP request's generations deliver.

    Args:
        choices_per_prompt: `n`.
        streams: the answer comes in chunks.

    Attributes:
        error: why a generation failed, once one has.
        opened: set when every generation was let in, or one was not.
    """

    def __init__(
        self, options: Options, store: Store, inline_bytes: int, owner: str,
        choices_per_prompt: int, streams: bool,
    ) -> None:  # fmt: skip
        self.options, self.streams = options, streams
        self.error: BaseException | None = None
        self.opened = asyncio.Event()
        self._store, self._inline_bytes, self._owner = store, inline_bytes, owner
        self._per_prompt = choices_per_prompt
        self._num_prompts = self._num_opened = 0
        self._results: dict[int, ScopeResult] = {}
        self._forget: list[Callable[[], None]] = []
        #: Of each choice and column: how many values were sent.
        self._sent: dict[tuple[int, Any], int] = {}
        #: Choices whose chunks left rows out.
        self._left_out: set[int] = set()
        #: Data waits for the end: an engine that guesses tokens may still take it back.
        self.holds = False

    def add_prompt(self) -> int:
        """A generation is about to start; its number."""
        self._num_prompts += 1
        return self._num_prompts - 1

    def open_one(self, forget: Callable[[], None]) -> None:
        """The engine has let in one completion.

        Args:
            forget: drops its rows. Called once the answer is out or nobody waits for it:
                a cancelled request's frames live until the garbage collector comes.
        """
        self._forget.append(forget)
        self._num_opened += 1
        if self._num_opened == self._num_prompts * self._per_prompt:
            self.opened.set()

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.opened.set()

    def close(self) -> None:
        self._results.clear()
        while self._forget:
            self._forget.pop()()

    def take(self, prompt: int, index: int, result: ScopeResult) -> None:
        """A completion's result as of now; it replaces the one before."""
        self._results[prompt * self._per_prompt + index] = result

    async def fill(self, choices: list[Any]) -> None:
        """Put a `scope` on each choice of a whole answer."""
        for number, choice in enumerate(choices):
            choice.scope = await self._whole(self._results[number])

    async def chunk(self, text: str) -> str:
        """A server-sent event, with a `scope` on each of its choices."""
        if not text.startswith("data: {"):
            return text
        body = json.loads(text.removeprefix("data: "))
        for choice in body.get("choices", ()):
            result = self._results.get(choice["index"])
            if result is not None:
                ended = choice.get("finish_reason") is not None
                choice["scope"] = await self._part(choice["index"], result, ended)
        return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"

    async def _part(self, number: int, result: ScopeResult, ended: bool) -> dict[str, Any]:
        new = []
        for column in result.columns() if ended or not self.holds else ():
            if isinstance(column.label, str) or self.options.stream == "rows":
                new.append(self._unsent(number, column, ended))
        size = sum(c.values.nbytes for c in new if not isinstance(c.label, str))
        if size > MAX_CHUNK_BYTES:
            self._left_out.add(number)
            new = [c for c in new if isinstance(c.label, str)]
        body = encode.columns([c for c in new if len(c.positions)], True, True)
        if not ended:
            return body
        whole = self.options.stream == "rows" and number not in self._left_out
        rows = [] if whole else [c for c in result.columns() if not isinstance(c.label, str)]
        return encode.counts(result) | body | await self._rows(result, rows, body["rows"])

    def _unsent(self, number: int, column: Column, ended: bool) -> Column:
        """What of a column was not sent yet, and can be now."""
        key = (number, column.label)
        first = self._sent.get(key, 0)
        last = max(first, len(column.positions) if ended else column.num_settled)
        self._sent[key] = last
        return replace(
            column, values=column.values[first:last], positions=column.positions[first:last]
        )

    async def _whole(self, result: ScopeResult) -> dict[str, Any]:
        found = result.columns()
        scores = [column for column in found if isinstance(column.label, str)]
        rows = [column for column in found if not isinstance(column.label, str)]
        inline = sum(column.values.numel() for column in scores) <= encode.MAX_INLINE_SCORES
        body = encode.counts(result) | encode.columns(scores, True, inline)
        return body | await self._rows(result, rows, [], keep=not inline)

    async def _rows(
        self, result: ScopeResult, rows: list[Column], sent: list[Any], keep: bool = False
    ) -> dict[str, Any]:
        """`rows`, inline or described, and `result`, the file of what is not inline."""
        size = sum(column.values.nbytes for column in rows)
        by_handle = size > self._inline_bytes or (self.options.tensors == "handle" and size > 0)
        body: dict[str, Any] = {
            "rows": sent + encode.columns(rows, not by_handle, False)["rows"], "result": None
        }  # fmt: skip
        if not (by_handle or keep):
            return body
        try:
            kept = await asyncio.to_thread(self._keep, result)
        except (CapacityError, OSError) as error:
            reason = str(error) if isinstance(error, CapacityError) else "the disk is full."
            return body | {"status": "failed", "error": f"The rows could not be kept: {reason}"}
        body["result"] = {
            "id": kept.id,
            "url": f"/v1/scope/results/{kept.id}",
            "num_bytes": kept.num_bytes,
            "expires_in_s": kept.ttl_s,
        }
        asyncio.get_running_loop().call_later(kept.ttl_s + 1, self._store.sweep)
        return body

    def _keep(self, result: ScopeResult) -> Any:
        return self._store.put(*encode.tensors(result), self._owner)


#: The answer that the code running now works for; a path where that path has no place
#: for a scope; None outside of HTTP requests.
current: ContextVar[Answer | str | None] = ContextVar("vllm_scope_answer", default=None)
