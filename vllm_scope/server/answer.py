"""The results of one HTTP request, put into its answer or into its chunks.

Owns:  Answer, Options, `current`.
Runs:  in an API server process, on its event loop.
From:  engine.http, which hears of each output.   To: encode, store, faces.

Promise: a chunk carries everything new of its choice that has arrived, each value once
and in position order, and each generated token once with the scores of its own row; the
chunk that ends a choice carries the rest and the counts.
What faces add comes with the ends, and `scope` only to requests that have one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
from torch import Tensor

from vllm_scope.errors import CapacityError, SpecError, shown
from vllm_scope.request.actions import MEMORY
from vllm_scope.request.spec import Spec
from vllm_scope.results.column import Column
from vllm_scope.results.cursor import Cursor
from vllm_scope.results.result import ScopeResult
from vllm_scope.server import encode
from vllm_scope.server.exchange import running
from vllm_scope.server.faces import Reply
from vllm_scope.server.store import Kept, Store
from vllm_scope.server.tokens import ScoredTokens

#: Rows of one chunk; what is larger comes as a file in the end.
MAX_CHUNK_BYTES = 8 << 20
#: Rows and scores inside one answer, of all its choices: base64 and JSON hold a multiple
#: of it in memory, and are made on the event loop.
MAX_INLINE_BYTES = 32 << 20
#: What a score takes as JSON.
_SCORE_BYTES = 20
#: What a token takes as JSON, less its scores.
_TOKEN_BYTES = 80
_ALLOWED = {"scope_tensors": ("auto", "handle"), "scope_stream": ("scores", "rows")}


@dataclass(frozen=True)
class Options:
    """How a request wants its tensors; fields of `vllm_xargs` beside `scope`.

    Attributes:
        tensors: "auto": small ones inline; "handle": all rows as a file.
        stream: what chunks carry: "scores", or "rows" as well.
        named: a read gives its request a name, which one prompt alone can have.
        reads: some rows come back to the caller.
    """

    tensors: Literal["auto", "handle"] = "auto"
    stream: Literal["scores", "rows"] = "scores"
    named: bool = False
    reads: bool = False

    @staticmethod
    def parse(xargs: Mapping[str, Any]) -> Options | None:
        """None where a request has no field of ours.

        Raises:
            SpecError: a field or a value that is not known.
        """
        if not any(name.startswith("scope") for name in xargs):
            return None
        found: dict[str, Any] = {}
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
        spec = Spec.from_json(xargs["scope"])
        _check_answerable(spec)
        return Options(
            **found, named=any(read.name is not None for read in spec.reads),
            reads=any(read.to == MEMORY for read in spec.reads),
        )  # fmt: skip


def _check_answerable(spec: Spec) -> None:
    """Raises SpecError for rows that are not worth decoding (to do so takes an inverse of
    the whole projection, seconds of this process), and for names of scores that a file
    has for positions."""
    for i, probe in enumerate(spec.probes):
        if probe.name.endswith(encode.POSITIONS):
            raise SpecError(
                f"probes[{i}].name is {shown(probe.name)}; over HTTP no name ends in "
                f"{encode.POSITIONS!r}, where a file has the positions of scores. Take another."
            )
    for i, read in enumerate(spec.reads):
        if read.to == MEMORY and read.codec is not None and read.codec.name == "rp8":
            raise SpecError(
                f"reads[{i}].codec is 'rp8'; answers have decoded rows, and rp8 keeps the "
                "projections. Take another codec, or let the rows go to a sink."
            )


class Answer:
    """What one HTTP request's generations deliver.

    Args:
        options: None where no `scope` was asked for.
        choices_per_prompt: `n`.
        streams: the answer comes in chunks.

    Attributes:
        streams: chunks carry data as it comes.
        replies: of the faces that the request speaks to; set before it is filled.
        error: why a generation failed, once one has.
        opened: set when every generation was let in for sure, or one was not.
        exchange: the request's; with its end the answer lets go of all rows.
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
        #: What is expected to become a file.
        self._to_file = 0
        self._room = MAX_INLINE_BYTES
        self._per_prompt = choices_per_prompt
        self._num_prompts = self._num_opened = 0
        #: The choices as offline users have them, by their number.
        self._choices: dict[int, Any] = {}
        self._forget: list[Callable[[], None]] = []
        #: Files that only what is not out yet names.
        self._kept: list[str] = []
        self._abandoned = False
        #: Of each choice that streams.
        self._cursors: dict[int, Cursor] = {}
        self._tokens: dict[int, ScoredTokens] = {}
        #: Of each choice and column: positions of what was too much for its chunk.
        self._held_back: dict[tuple[int, Any], list[np.ndarray]] = {}
        #: Data waits for the end: an engine that guesses tokens may still take it back.
        self.holds = False
        #: Chunks wait for data that is late; no more once some was lost.
        self.waits = True

    def add_prompt(self) -> int:
        """A generation is about to start; its number.

        Raises:
            SpecError: its files would take the place of another prompt's.
        """
        if self._num_prompts and self._options.named:
            raise SpecError(
                "a read has 'name', and there is more than one prompt: the last one's files would "
                "replace the others'. Send the prompts one by one, or leave the name out."
            )
        self._num_prompts += 1
        return self._num_prompts - 1

    def _expect(self, num_bytes: int) -> None:
        """A generation will deliver so much of its prompt. What it delivers of generated tokens
        is not known yet: it counts where it becomes a file whatever its size.

        Raises:
            CapacityError: it will become a file, for which there is no room.
        """
        inline = self._inline_bytes
        in_file = self._options.tensors == "handle" and self._options.reads
        if self.streams and self._options.stream == "rows":
            inline, in_file = MAX_CHUNK_BYTES, False
        if num_bytes > inline or in_file:
            self._to_file += num_bytes
            self._store.check_room(self._to_file, self._owner)

    def open_one(self, forget: Callable[[], None] | None, sure: bool) -> None:
        """The engine has let in one completion.

        Args:
            forget: drops its rows. Called once the answer is out or nobody waits for it:
                a cancelled request's frames live until the garbage collector comes. None
                where nothing was asked of this one.
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
        """A completion with its `scope` as of now; it replaces the one before."""
        number = self._number(prompt, completion)
        self._choices[number] = completion
        if self.streams and not self.holds and completion.finish_reason is None:
            self._cursor(number).look(completion.scope)

    def late(self, prompt: int, completion: Any, behind: int) -> bool:
        """Data of a stream is missing, of tokens that come `behind` or more before the last."""
        last = len(completion.scope.transcript) - 1 - behind
        return self._cursor(self._number(prompt, completion)).late(last)

    def _number(self, prompt: int, completion: Any) -> int:
        return int(prompt * self._per_prompt + completion.index)

    def _cursor(self, number: int) -> Cursor:
        if number not in self._cursors:
            self._cursors[number] = Cursor(rows=self._options.stream == "rows")
        return self._cursors[number]

    async def fill(self, response: Any) -> None:
        """Put what was asked for on a whole answer and each of its choices."""
        if not self._forget:
            return  # the faces' words asked for nothing
        with self._keeping():
            for choice in response.choices:
                if self._native:
                    choice.scope = await self._whole(choice.index, self._choices[choice.index])
                for name, value in (await self._ended(choice.index)).items():
                    setattr(choice, name, value)
            for name, value in (await self._all_ended()).items():
                setattr(response, name, value)

    async def chunk(self, text: str) -> str:
        """A server-sent event, with what there is for each of its choices."""
        if not text.startswith("data: {") or not self._forget:
            return text
        with self._keeping():
            return await self._filled(msgspec.json.decode(text.removeprefix("data: ")))

    async def _filled(self, body: dict[str, Any]) -> str:
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
        """Files that are kept in here stay if it succeeds; else nobody hears of them."""
        try:
            yield
        except BaseException:
            self._abandoned = True
            while self._kept:
                self._store.delete(self._kept.pop(), self._owner)
            raise
        self._kept.clear()

    async def _ended(self, number: int) -> dict[str, Any]:
        """What faces have for a choice that has ended."""
        self._num_ended += 1
        fields: dict[str, Any] = {}
        for reply in self.replies:
            fields |= await asyncio.to_thread(
                reply.choice, number, self._num_choices, self._choices[number]
            )
        return fields

    async def _all_ended(self) -> dict[str, Any]:
        """What faces have for the response, once its last choice has ended."""
        fields: dict[str, Any] = {}
        if self._num_ended == self._num_choices:
            for reply in self.replies:
                fields |= await asyncio.to_thread(reply.whole)
        return fields

    @property
    def _num_choices(self) -> int:
        return self._num_prompts * self._per_prompt

    def keep(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Kept:
        """Keep a file for who asked, and see to its end. Blocks; not on the event loop.

        Raises:
            CapacityError: there is no room, or none on the disk.
        """
        try:
            kept = self._store.put(tensors, metadata, self._owner)
        except OSError as error:
            # Without the path, which is nobody's business.
            raise CapacityError(f"{error.strerror or type(error).__name__}.") from None
        self._kept.append(kept.id)
        self.exchange.untold.append(lambda: self._store.delete(kept.id, self._owner))
        if self._abandoned:  # while it was written
            self._store.delete(kept.id, self._owner)
        return kept

    async def _part(self, number: int, completion: Any, ended: bool) -> dict[str, Any]:
        result: ScopeResult = completion.scope
        rows_too, cursor = self._options.stream == "rows", self._cursor(number)
        new = cursor.rest(result) if ended else cursor.take()
        scores = [column for column in new if isinstance(column.label, str)]
        rows = [column for column in new if not isinstance(column.label, str)]
        here: list[Column] = []
        for some, fit in (
            (scores, sum(len(c.positions) for c in scores) <= encode.MAX_INLINE_SCORES),
            (rows, sum(column.nbytes for column in rows) <= MAX_CHUNK_BYTES),
        ):
            for column in some:
                if not len(column.positions):
                    continue
                if fit:
                    here.append(column)
                else:
                    spans = self._held_back.setdefault((number, column.label), [])
                    spans.append(column.positions)
        tokens = self._told(number, completion, scores, None if ended else cursor.settled)
        if not ended:
            return encode.columns(here, True, True) | tokens
        everything = result.columns()
        filed = [c for c in everything if (number, c.label) in self._held_back]
        late = [self._with_late(number, column, here) for column in filed]
        here = [c for c in here if (number, c.label) not in self._held_back]
        body, told = encode.columns(here, True, True), encode.columns(late, False, False)
        body["scores"] |= told["scores"]
        rest = [] if rows_too else [c for c in everything if not isinstance(c.label, str)]
        sent = body["rows"] + told["rows"]
        return (
            encode.counts(result) | body | tokens
            | await self._rows(result, rest, sent, keep=bool(late))
        )  # fmt: skip

    def _told(
        self, number: int, completion: Any, scores: list[Column], settled: int | None
    ) -> dict[str, Any]:
        """`tokens`, where there are probes and room for them."""
        result: ScopeResult = completion.scope
        if not result.scores or (self.holds and settled is not None):
            return {}
        tokens = self._tokens.setdefault(number, ScoredTokens())
        tokens.add(result, scores)
        found = tokens.take(result, completion.scope_texts, settled)
        if sum(max(1, len(each["scores"])) for each in found) > encode.MAX_INLINE_SCORES:
            return {}
        return {"tokens": found}

    def _with_late(self, number: int, column: Column, here: list[Column]) -> Column:
        """What was held back of a column, and what is new of it, for the file to have."""
        new = [c.positions for c in here if c.label == column.label]
        spans = self._held_back[number, column.label] + new
        return replace(column, positions=np.concatenate(spans))

    async def _whole(self, number: int, completion: Any) -> dict[str, Any]:
        result: ScopeResult = completion.scope
        found = result.columns()
        scores = [column for column in found if isinstance(column.label, str)]
        rows = [column for column in found if not isinstance(column.label, str)]
        num_scores = sum(len(column.positions) for column in scores)
        inline = num_scores <= encode.MAX_INLINE_SCORES and self._fits(num_scores * _SCORE_BYTES)
        body = encode.counts(result) | encode.columns(scores, True, inline)
        num_generated = len(result.transcript) - result.num_prompt
        if inline and self._fits(num_generated * (_TOKEN_BYTES + len(scores) * _SCORE_BYTES)):
            body |= self._told(number, completion, scores, None)
        return body | await self._rows(result, rows, [], keep=not inline)

    def _fits(self, size: int) -> bool:
        """Takes room inside the answer, where it is left."""
        if size > self._room:
            return False
        self._room -= size
        return True

    async def _rows(
        self, result: ScopeResult, rows: list[Column], sent: list[Any], keep: bool = False
    ) -> dict[str, Any]:
        """`rows`, inline or described, and `result`, the file of what is not inline."""
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


#: The answer that the code running now works for; a path where that path has no place
#: for a scope; None outside of HTTP requests.
current: ContextVar[Answer | str | None] = ContextVar("vllm_scope_answer", default=None)
