"""The results of one HTTP request, put into its answer or into its chunks.

Owns:  Answer, `current`.
Runs:  in an API server process, on its event loop.
From:  engine.http, which passes on each output.   To: encode, store, faces.

Promise: a chunk carries all new values of its choice that have arrived, each value once and in
position order, and each generated token once with the scores of its own row. The last chunk of a
choice carries the rest and the counts. The fields of faces come with the last chunk. Only
requests with a `scope` get a `scope`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from vllm_scope.errors import CapacityError, SpecError
from vllm_scope.results.column import Column
from vllm_scope.results.cursor import Cursor
from vllm_scope.results.result import ScopeResult
from vllm_scope.server import encode
from vllm_scope.server.exchange import running
from vllm_scope.server.faces import Reply
from vllm_scope.server.options import Options
from vllm_scope.server.store import Kept, Store
from vllm_scope.server.tokens import ScoredTokens

#: Rows of one chunk. Larger ones come as a file with the last chunk.
MAX_CHUNK_BYTES = 8 << 20
#: Rows and scores inside one answer, of all its choices. Base64 and JSON take a multiple of it
#: in memory, and the event loop makes them.
MAX_INLINE_BYTES = 32 << 20
#: JSON of a score, and of a token less its scores.
_SCORE_BYTES, _TOKEN_BYTES = 20, 80


class Answer:
    """What one HTTP request's generations deliver.

    Args:
        options: None if the request has no `scope`.
        choices_per_prompt: `n`.
        streams: the answer comes in chunks.

    Attributes:
        streams: chunks carry data as it comes.
        replies: of the faces whose words the request has; set before `fill` and `chunk`.
        error: of the first generation that failed.
        opened: set when the engine has accepted every generation, or has refused one.
        exchange: the request's. When it closes, the answer drops all rows.
    """

    def __init__(
        self, options: Options | None, store: Store, inline_bytes: int, owner: str,
        choices_per_prompt: int, streams: bool,
    ) -> None:  # fmt: skip
        self._native, self._options = options is not None, options or Options()
        self.streams = streams and self._native
        self.replies: Sequence[Reply] = ()
        self._num_ended = 0
        self.error: BaseException | None = None
        self.opened = asyncio.Event()
        self._store, self._inline_bytes, self._owner = store, inline_bytes, owner
        self.exchange = running(owner)
        self.exchange.timed = True
        self.exchange.closing.append(self._end)
        if self._native:
            self.exchange.expect = self._expect
        #: Expected bytes of files.
        self._to_file = 0
        self._room = MAX_INLINE_BYTES
        self._per_prompt = choices_per_prompt
        self._num_prompts = self._num_opened = 0
        #: Index of a choice -> the completion, as offline users have it.
        self._choices: dict[int, Any] = {}
        self._forget: list[Callable[[], None]] = []
        #: Ids of files that no sent part of the answer names.
        self._kept: list[str] = []
        self._abandoned = False
        #: Index of a streaming choice -> its cursor, its tokens.
        self._cursors: dict[int, Cursor] = {}
        self._tokens: dict[int, ScoredTokens] = {}
        #: (index of a choice, column) -> positions of values that were too many for their chunk.
        self._held_back: dict[tuple[int, Any], list[np.ndarray]] = {}
        #: Data waits for the end, because speculative decoding may take it back.
        self.holds = False
        #: Chunks wait for late data; False once some data was lost.
        self.waits = True

    def add_prompt(self) -> int:
        """Count a prompt before its generation starts; returns its index.

        Raises:
            SpecError: its files would replace another prompt's.
        """
        if self._num_prompts and self._options.named:
            raise SpecError(
                "a read has 'name', and there is more than one prompt: the last one's files would "
                "replace the others'. Send the prompts one by one, or leave the name out."
            )
        self._num_prompts += 1
        return self._num_prompts - 1

    def _expect(self, num_bytes: int) -> None:
        """Check the room for a generation that delivers `num_bytes` of its prompt. The bytes of
        its generated tokens are not known yet.

        Raises:
            CapacityError: they will become a file, and there is no room for it.
        """
        inline = self._inline_bytes
        in_file = self._options.tensors == "handle" and self._options.reads
        if self.streams and self._options.stream == "rows":
            inline, in_file = MAX_CHUNK_BYTES, False
        if num_bytes > inline or in_file:
            self._to_file += num_bytes
            self._store.check_room(self._to_file, self._owner)

    def open_one(self, forget: Callable[[], None] | None, sure: bool) -> None:
        """The engine has accepted one completion.

        Args:
            forget: drops its rows; None if it has none. `close` calls it, because the frames
                of a cancelled request live until the garbage collector runs.
            sure: it cannot be refused any more.
        """
        if forget is not None:
            self._forget.append(forget)
        self._num_opened += sure
        if self._num_opened == self._num_choices:
            self.opened.set()

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.opened.set()

    def close(self) -> None:
        self._choices.clear()
        while self._forget:
            self._forget.pop()()

    async def _end(self) -> None:
        self.close()

    def take(self, prompt: int, completion: Any) -> None:
        """Keep the newest state of a completion, with its `scope`."""
        number = self._number(prompt, completion)
        self._choices[number] = completion
        if self.streams and not self.holds and completion.finish_reason is None:
            self._cursor(number).look(completion.scope)

    def late(self, prompt: int, completion: Any, behind: int) -> bool:
        """Whether a stream lacks data of tokens that are `behind` or more before the last."""
        last = len(completion.scope.transcript) - 1 - behind
        return self._cursor(self._number(prompt, completion)).late(last)

    def _number(self, prompt: int, completion: Any) -> int:
        return int(prompt * self._per_prompt + completion.index)

    def _cursor(self, number: int) -> Cursor:
        if number not in self._cursors:
            self._cursors[number] = Cursor(rows=self._options.stream == "rows")
        return self._cursors[number]

    async def fill(self, response: Any) -> None:
        """Set the fields of a whole answer and of each of its choices."""
        if not self._forget:
            return  # the faces' words ask for nothing
        with self._keeping():
            for choice in response.choices:
                if self._native:
                    choice.scope = await self._whole(choice.index, self._choices[choice.index])
                for name, value in (await self._ended(choice.index)).items():
                    setattr(choice, name, value)
            for name, value in (await self._all_ended()).items():
                setattr(response, name, value)

    async def chunk(self, text: str) -> str:
        """A server-sent event, with the fields of each of its choices."""
        if not text.startswith("data: {") or not self._forget:
            return text
        body = msgspec.json.decode(text.removeprefix("data: "))
        with self._keeping():
            for choice in body.get("choices", ()):
                number, ended = choice["index"], choice.get("finish_reason") is not None
                if number not in self._choices:
                    continue
                if self._native:
                    choice["scope"] = await self._part(number, self._choices[number], ended)
                if ended:
                    choice |= await self._ended(number)
                    body |= await self._all_ended()
        return f"data: {msgspec.json.encode(body).decode()}\n\n"

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Delete the files that were kept inside if it fails: no answer names them."""
        try:
            yield
        except BaseException:
            self._abandoned = True
            while self._kept:
                self._store.delete(self._kept.pop(), self._owner)
            raise
        self._kept.clear()

    async def _ended(self, number: int) -> dict[str, Any]:
        """The faces' fields of a choice that has ended."""
        self._num_ended += 1
        fields: dict[str, Any] = {}
        for reply in self.replies:
            fields |= await asyncio.to_thread(
                reply.choice, number, self._num_choices, self._choices[number]
            )
        return fields

    async def _all_ended(self) -> dict[str, Any]:
        """The faces' fields of the response, if its last choice has ended."""
        fields: dict[str, Any] = {}
        if self._num_ended == self._num_choices:
            for reply in self.replies:
                fields |= await asyncio.to_thread(reply.whole)
        return fields

    @property
    def _num_choices(self) -> int:
        return self._num_prompts * self._per_prompt

    def keep(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Kept:
        """Keep a file for the request's key. Blocks, so it must not run on the event loop.

        Raises:
            CapacityError: there is no room, or the file cannot be written.
        """
        try:
            kept = self._store.put(tensors, metadata, self._owner)
        except OSError as error:
            # Without the path, which clients must not see.
            raise CapacityError(f"{error.strerror or type(error).__name__}.") from None
        self._kept.append(kept.id)
        self.exchange.untold.append(lambda: self._store.delete(kept.id, self._owner))
        if self._abandoned:  # while the file was written
            self._store.delete(kept.id, self._owner)
        return kept

    async def _part(self, number: int, completion: Any, ended: bool) -> dict[str, Any]:
        result: ScopeResult = completion.scope
        rows_too, cursor = self._options.stream == "rows", self._cursor(number)
        new = cursor.rest(result) if ended else cursor.take()
        scores, rows = _split(new)
        here: list[Column] = []
        for some, fit in (
            (scores, sum(len(c.positions) for c in scores) <= encode.MAX_INLINE_SCORES),
            (rows, sum(column.nbytes for column in rows) <= MAX_CHUNK_BYTES),
        ):
            some = [column for column in some if len(column.positions)]
            here += some if fit else []
            for column in some if not fit else ():
                self._held_back.setdefault((number, column.label), []).append(column.positions)
        tokens = self._told(number, completion, scores, None if ended else cursor.settled)
        if not ended:
            return encode.columns(here, True, True) | tokens
        everything = result.columns()
        filed = [c for c in everything if (number, c.label) in self._held_back]
        late = []
        for column in filed:  # held back positions and new ones, whose values the file has
            added = [c.positions for c in here if c.label == column.label]
            positions = np.concatenate([*self._held_back[number, column.label], *added])
            late.append(replace(column, positions=positions))
        here = [c for c in here if (number, c.label) not in self._held_back]
        body, told = encode.columns(here, True, True), encode.columns(late, False, False)
        body["scores"] |= told["scores"]
        rest = [] if rows_too else _split(everything)[1]
        sent = body["rows"] + told["rows"]
        return (
            encode.counts(result) | body | tokens
            | await self._rows(result, rest, sent, keep=bool(late))
        )  # fmt: skip

    def _told(
        self, number: int, completion: Any, scores: list[Column], settled: int | None
    ) -> dict[str, Any]:
        """`tokens`, if there are probes and room for the tokens."""
        result: ScopeResult = completion.scope
        if not result.scores or (self.holds and settled is not None):
            return {}
        tokens = self._tokens.setdefault(number, ScoredTokens())
        tokens.add(result, scores)
        found = tokens.take(result, completion.scope_texts, settled)
        if sum(max(1, len(each["scores"])) for each in found) > encode.MAX_INLINE_SCORES:
            return {}
        return {"tokens": found}

    async def _whole(self, number: int, completion: Any) -> dict[str, Any]:
        result: ScopeResult = completion.scope
        scores, rows = _split(result.columns())
        num_scores = sum(len(column.positions) for column in scores)
        inline = num_scores <= encode.MAX_INLINE_SCORES and self._fits(num_scores * _SCORE_BYTES)
        body = encode.counts(result) | encode.columns(scores, True, inline)
        num_generated = len(result.transcript) - result.num_prompt
        if inline and self._fits(num_generated * (_TOKEN_BYTES + len(scores) * _SCORE_BYTES)):
            body |= self._told(number, completion, scores, None)
        return body | await self._rows(result, rows, [], keep=not inline)

    def _fits(self, size: int) -> bool:
        """Take room inside the answer; False if there is not enough."""
        if size > self._room:
            return False
        self._room -= size
        return True

    async def _rows(
        self, result: ScopeResult, rows: list[Column], sent: list[Any], keep: bool = False
    ) -> dict[str, Any]:
        """`rows`, inline or described, and `result`, the file of what is not inline.

        Args:
            sent: entries of `rows` that are encoded already.
            keep: write the file even if the rows are inline.
        """
        size = sum(column.nbytes for column in rows)
        by_handle = size > 0 and (
            size > self._inline_bytes or self._options.tensors == "handle" or not self._fits(size)
        )
        body: dict[str, Any] = {
            "rows": sent + encode.columns(rows, not by_handle, False)["rows"], "result": None
        }  # fmt: skip
        if not (by_handle or keep):
            return body
        try:
            kept = await asyncio.to_thread(lambda: self.keep(*encode.tensors(result)))
        except CapacityError as error:
            return body | {"status": "failed", "error": f"The rows could not be kept: {error}"}
        body["result"] = {
            "id": kept.id,
            "url": f"/v1/scope/results/{kept.id}",
            "num_bytes": kept.num_bytes,
            "expires_in_s": kept.ttl_s,
        }
        return body


def _split(columns: Iterable[Column]) -> tuple[list[Column], list[Column]]:
    """The columns of scores, and those of rows."""
    found: tuple[list[Column], list[Column]] = ([], [])
    for column in columns:
        found[not isinstance(column.label, str)].append(column)
    return found


#: The answer of the current HTTP request; the path, if the path takes no scope; None outside of
#: HTTP requests.
current: ContextVar[Answer | str | None] = ContextVar("vllm_scope_answer", default=None)
