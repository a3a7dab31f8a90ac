"""Puts the results of one HTTP request into the request's answer, or into the chunks of a stream.

Owns:  Answer, `current`.
Runs:  in an API server process, on its event loop.
From:  engine.http (the engine's outputs).   To: choice (makes a `scope`), store (files), faces.

Promise: if a request has no `scope`, its answer has a `scope` only if a monitor gave a verdict. In
a stream, the last chunk of a choice has the fields that faces add to the choice. If the server has
written a file for the answer, but has not sent the file's id, the server deletes the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import msgspec
from torch import Tensor

from vllm_scope.errors import CapacityError, SpecError
from vllm_scope.server.choice import MAX_CHUNK_BYTES, ChoiceScope
from vllm_scope.server.encode import Json
from vllm_scope.server.exchange import running
from vllm_scope.server.faces import CompletionOutput, Reply
from vllm_scope.server.options import ScopeOptions
from vllm_scope.server.store import Kept, Store

#: Limit of the bytes of rows and scores inside one answer, for all choices together. The base64 and
#: the JSON of rows and scores take several times as much memory as the rows and scores.
MAX_INLINE_BYTES = 32 << 20


class _VllmChoice(Protocol):
    index: int


class VllmResponse(Protocol):
    """vLLM's response to a request that is not streamed."""

    choices: Sequence[_VllmChoice]


class Answer:
    """Adds the results of one HTTP request to vLLM's response or chunks.

    Args:
        options: None if the request has no `scope`.
        choices_per_prompt: the number of choices for each prompt, which is the request's `n`.
        streams: True if the answer comes in chunks.

    Attributes:
        streams: True if the answer comes in chunks, and each choice has a `scope`.
        num_prompts: number of prompts. The server calls `add_prompt` for every prompt before the
            first generation starts.
        replies: one Reply for each face whose keys the request has. The caller sets `replies`
            before the first call of `fill` or `chunk`.
        error: the error of the first generation that failed.
        opened: an event. The server sets it when the engine has accepted all generations of the
            request, when a generation has failed, or before the first chunk of a stream is sent.
        exchange: the request's Exchange. When the Exchange closes, the answer releases all rows.
    """

    def __init__(
        self, options: ScopeOptions | None, store: Store, inline_bytes: int, owner: str,
        choices_per_prompt: int, streams: bool,
    ) -> None:  # fmt: skip
        self._native, self._options = options is not None, options or ScopeOptions()
        self.streams = streams and self._native
        self.replies: Sequence[Reply] = ()
        self._num_ended = 0
        self.error: BaseException | None = None
        self.opened = asyncio.Event()
        self._store, self._inline_bytes, self._owner = store, inline_bytes, owner
        self.exchange = running(owner)
        self.exchange.timed = True
        if self._native:
            self.exchange.body.begin()
        self.exchange.closing.append(self._end)
        if self._native:
            self.exchange.expect = self._expect
        #: The expected number of bytes that this answer puts into files.
        self._to_file = 0
        self._room = MAX_INLINE_BYTES
        self._per_prompt = choices_per_prompt
        self.num_prompts = self._num_opened = 0
        #: Maps the index of a choice to the choice's ChoiceScope.
        self._choices: dict[int, ChoiceScope] = {}
        self._forget: list[Callable[[], None]] = []
        #: Ids of the files that were kept for the part of the answer that is being built now.
        self._kept: list[str] = []
        self._abandoned = False
        #: True if only the last chunk of a choice has data, because speculative decoding can reject
        #: tokens.
        self.holds = False
        #: True if a chunk waits for data that is late (see `late`). False after a chunk has waited
        #: in vain. Later chunks do not wait.
        self.waits = True

    def add_prompt(self) -> int:
        """Count a prompt before its generation starts, and return the prompt's index.

        Raises:
            SpecError: the prompt's files would replace the files of another prompt.
        """
        if self.num_prompts and self._options.named:
            raise SpecError(
                "a read has 'name', and there is more than one prompt: the files of the last "
                "prompt would replace all others. Send one prompt in each request, or leave the "
                "name out."
            )
        self.num_prompts += 1
        return self.num_prompts - 1

    def _expect(self, num_bytes: int) -> None:
        """Check that the store has room for the `num_bytes` that a generation's prompt delivers.
        The bytes that the generated tokens will deliver are not known yet.

        Raises:
            CapacityError: the bytes will go into a file, and the store has no room for the file.
        """
        inline = self._inline_bytes
        in_file = self._options.tensors == "handle" and self._options.reads
        if self.streams and self._options.stream == "rows":
            inline, in_file = MAX_CHUNK_BYTES, False
        if num_bytes > inline or in_file:
            self._to_file += num_bytes
            self._store.check_room(self._to_file, self._owner)

    def open_one(self, forget: Callable[[], None] | None, sure: bool) -> None:
        """Record that the engine has accepted one completion.

        Args:
            forget: a function that releases the completion's rows; None if the completion has no
                rows. `close` calls `forget`. If `close` did not call `forget`, the stack frames of
                a cancelled request would keep the rows until the garbage collector runs.
            sure: True if the engine can no longer refuse the completion.
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

    def take(self, prompt: int, completion: CompletionOutput) -> None:
        """Store the newest state of a completion, which includes the completion's `scope`."""
        choice = self._choice(prompt, completion)
        choice.completion = completion
        if self.streams and not self.holds and completion.finish_reason is None:
            choice.cursor.look(completion.scope)

    def late(self, prompt: int, completion: CompletionOutput, behind: int) -> bool:
        """True if the data of some token is missing, and the token is `behind` or more tokens
        before the last token."""
        last = len(completion.scope.transcript) - 1 - behind
        return self._choice(prompt, completion).cursor.late(last)

    def _choice(self, prompt: int, completion: CompletionOutput) -> ChoiceScope:
        number = prompt * self._per_prompt + completion.index
        if number not in self._choices:
            self._choices[number] = ChoiceScope(
                completion, self._options, self._inline_bytes, self._take_room, self.keep,
                self.exchange.body, number,
            )  # fmt: skip
        return self._choices[number]

    def _take_room(self, size: int) -> bool:
        if size > self._room:
            return False
        self._room -= size
        return True

    async def fill(self, response: VllmResponse) -> None:
        """Set the fields of a whole answer and of each of its choices."""
        if not self._forget:
            return  # no completion has rows, because the request's faces read no rows
        with self._keeping():
            for choice in response.choices:
                if not self._native and choice.index not in self._choices:
                    continue  # the operator ended the monitors before this prompt entered
                known = self._choices[choice.index]
                fields: Json = {"scope": await known.whole()} if self._native else known.flags()
                own, whole = await self._ended(choice.index)
                for name, value in (fields | own).items():
                    setattr(choice, name, value)
                for name, value in whole.items():
                    setattr(response, name, value)

    async def chunk(self, text: str) -> str:
        """Add this package's fields to each choice in `text`, a server-sent event of vLLM."""
        if not text.startswith("data: {") or not self._forget:
            return text
        body = msgspec.json.decode(text.removeprefix("data: "))
        with self._keeping():
            for choice in body.get("choices", ()):
                number, ended = choice["index"], choice.get("finish_reason") is not None
                if number not in self._choices:
                    if self._native:  # the engine has made no output of this choice yet
                        choice["scope"] = {"rows": [], "scores": {}}
                    continue
                if self._native:
                    choice["scope"] = await self._choices[number].part(ended, self.holds)
                elif ended:
                    choice |= self._choices[number].flags()
                if ended:
                    own, whole = await self._ended(number)
                    choice |= own
                    body |= whole
        return f"data: {msgspec.json.encode(body).decode()}\n\n"

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """If the `with` block fails, delete the files that the block has kept, because no answer
        names these files."""
        try:
            yield
        except BaseException:
            self._abandoned = True
            while self._kept:
                self._store.delete(self._kept.pop(), self._owner)
            raise
        self._kept.clear()

    async def _ended(self, number: int) -> tuple[Json, Json]:
        """Returns two mappings. The first mapping has the faces' fields of a choice that has ended.
        The second mapping has the faces' fields of the whole response, and is empty until the last
        choice has ended."""
        self._num_ended += 1
        own: Json = {}
        whole: Json = {}
        completion = self._choices[number].completion
        for reply in self.replies:
            own |= await asyncio.to_thread(reply.choice, number, self._num_choices, completion)
        for reply in self.replies if self._num_ended == self._num_choices else ():
            whole |= await asyncio.to_thread(reply.whole)
        return own, whole

    @property
    def _num_choices(self) -> int:
        return self.num_prompts * self._per_prompt

    def keep(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Kept:
        """Keep tensors and metadata as a file that requests with the same API key can fetch. The
        method blocks, and must not be called on the event loop.

        Raises:
            CapacityError: the store has no room, or the file cannot be written.
        """
        try:
            kept = self._store.put(tensors, metadata, self._owner)
        except OSError as error:
            # The message leaves out the path, because clients must not see paths.
            raise CapacityError(f"{error.strerror or type(error).__name__}.") from None
        self._kept.append(kept.id)
        self.exchange.untold.append(lambda: self._store.delete(kept.id, self._owner))
        if self._abandoned:  # the answer failed while the file was written
            self._store.delete(kept.id, self._owner)
        return kept


#: The Answer of the current HTTP request, or the request's path if the answer has no scope and no
#: fields of faces. None outside of HTTP requests.
current: ContextVar[Answer | str | None] = ContextVar("vllm_scope_answer", default=None)
