"""Makes the `scope` of one choice, for a whole answer or for each chunk of a stream.

Owns:  ChoiceScope.
Runs:  in an API server process, on its event loop.
From:  answer.   To: encode (makes JSON), tokens (scored tokens), body (sends tensors).

Promise: a chunk carries the values of its choice that have arrived since the last chunk, in
position order. No value is sent twice. If the caller has probes, each generated token is in one
chunk, with the scores of the token's own row. If the tokens of a chunk have too many scores, these
tokens are in no chunk. The last chunk carries the remaining values and the counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

import numpy as np

from vllm_scope.codecs.packed import EncodedRows
from vllm_scope.errors import CapacityError
from vllm_scope.results.column import Column
from vllm_scope.results.cursor import Cursor
from vllm_scope.results.result import ScopeResult
from vllm_scope.server import encode
from vllm_scope.server.body import Body
from vllm_scope.server.encode import Json, Label, Spans
from vllm_scope.server.faces import CompletionOutput, Keep
from vllm_scope.server.options import ScopeOptions
from vllm_scope.server.tokens import ScoredTokens

#: Limit of the bytes of rows in one chunk. If the new rows take more bytes than this limit, the
#: chunk has no rows, and the last chunk names a file that has these rows.
MAX_CHUNK_BYTES = 8 << 20
#: Work on this many bytes or more runs in a thread. Work on fewer bytes takes less time than the
#: start of a thread.
THREAD_BYTES = 128 << 10
#: Estimated JSON bytes of one score, and of one token without scores.
_SCORE_BYTES, _TOKEN_BYTES = 20, 80
T = TypeVar("T")


class ChoiceScope:
    """Makes the `scope` of one choice, for the whole answer or for one chunk after another.

    Args:
        inline_bytes: limit of the bytes of a choice's rows inside the answer.
        take_room: a function that reserves a number of bytes inside the answer. The function
            returns False if fewer bytes than this number are free.
        body: the answer's Body, which receives the values of rows. A BinaryBody also receives the
            values of features and lenses.
        number: the choice's index.

    Attributes:
        completion: the choice's newest state.
        cursor: finds the new values for a stream's next chunk.
    """

    def __init__(
        self, completion: CompletionOutput, options: ScopeOptions, inline_bytes: int,
        take_room: Callable[[int], bool], keep: Keep, body: Body, number: int,
    ) -> None:  # fmt: skip
        self.completion, self.cursor = completion, Cursor(rows=options.stream == "rows")
        self._options, self._inline_bytes = options, inline_bytes
        self._take_room, self._keep = take_room, keep
        self._binary, self._values = body.binary, partial(body.values, number)
        self._sparse_values = self._values if body.binary else None
        self._tokens = ScoredTokens()
        #: Maps the label of a column to the positions of the values that did not fit into their
        #: chunk.
        self._held_back: dict[Label, list[np.ndarray]] = {}
        #: Labels of the columns that were in earlier chunks.
        self._said: set[Label] = set()

    def flags(self) -> Json:
        """The field `scope` of a choice whose request has no scope. The field contains the verdicts
        of monitors, and is absent if no monitor has given a verdict."""
        result = self.completion.scope
        found = {} if result is None else encode.verdicts(result.verdicts, result.begun)
        return {"scope": found} if found else {}

    async def whole(self) -> Json:
        """The `scope` of the choice in a whole answer."""
        result = self.completion.scope
        scores, rows = await _aside(_is_large(result), lambda: _split(result.columns()))
        num_numbers = encode.num_numbers(scores)
        size = num_numbers * _SCORE_BYTES
        inline = num_numbers <= encode.MAX_INLINE_SCORES and self._take_room(size)
        values = self._sparse_values
        if inline:
            told = encode.told(scores, values=values)
        else:
            wide = await asyncio.to_thread(encode.wide_spans, scores, scores)
            told = encode.told((), scores, wide=wide)
        body = encode.counts(result) | {"rows": []} | told
        body |= encode.verdicts(result.verdicts, result.begun)
        body |= encode.decisions(result.decisions)
        num_generated = len(result.transcript) - result.num_prompt
        token_bytes = _TOKEN_BYTES + len(scores) * _SCORE_BYTES
        if inline and self._take_room(num_generated * token_bytes):
            body |= self._told(scores, None)
        return body | await self._rows(rows, [], keep=not inline)

    async def part(self, ended: bool, holds: bool) -> Json:
        """The `scope` of the choice in its next chunk.

        Args:
            ended: True if the chunk is the choice's last chunk.
            holds: True if only the last chunk has the choice's data.
        """
        result, cursor = self.completion.scope, self.cursor
        if ended:  # join the columns here: `cursor.rest` then uses the joined columns
            await _aside(_is_large(result), result.columns)
        scores, rows = _split(cursor.rest(result) if ended else cursor.take())
        tokens: Json = {}
        if ended or not holds:
            tokens = self._told(scores, None if ended else cursor.settled)
        scores = self._fitting(scores, encode.num_numbers(scores) <= encode.MAX_INLINE_SCORES)
        rows = self._fitting(rows, sum(column.nbytes for column in rows) <= MAX_CHUNK_BYTES)
        if not ended:
            told = self._new(scores)
            told |= {"rows": await self._with_values(rows)}
            return told | tokens | encode.verdicts(cursor.verdicts(), cursor.begun())
        # If an earlier chunk has left out values of a column, this chunk has no values of the
        # column, because the file has all values of the column.
        everything, here = encode.for_callers(result.columns()), [*scores, *rows]
        late, wide = await _aside(bool(self._held_back), lambda: self._late(everything, here))
        scores, rows = _split(c for c in here if c.label not in self._held_back)
        late_scores, late_rows = _split(late)
        told = self._new(scores, late_scores, wide)
        sent = await self._with_values(rows) + encode.rows(late_rows, None, wide)
        rest = [] if self._options.stream == "rows" else _split(everything)[1]
        return (
            encode.counts(result) | {"rows": []} | told | tokens
            | encode.verdicts(result.verdicts, result.begun)
            | encode.decisions(result.decisions)
            | await self._rows(rest, sent, keep=bool(late))
        )  # fmt: skip

    def _late(
        self, everything: Sequence[Column], here: Sequence[Column]
    ) -> tuple[list[Column], dict[Label, Spans]]:
        """Returns the columns whose values are only in the file, each with the positions that no
        chunk has carried. Also returns the result of `encode.wide_spans` for these columns."""
        new = {column.label: [column.positions] for column in here}
        late = []
        for column in everything:
            if column.label in self._held_back:
                parts = [*self._held_back[column.label], *new.get(column.label, ())]
                late.append(replace(column, positions=np.concatenate(parts)))
        return late, encode.wide_spans(late, everything)

    def _new(
        self, scores: list[Column], late: Sequence[Column] = (),
        wide: Mapping[Label, Spans] = encode.NO_SPANS,
    ) -> Json:  # fmt: skip
        """A chunk's fields for scores, features and lenses. Only the first chunk with values of a
        `Features` names the features that were read (`asked`, up to 256 indices)."""
        told = encode.told(scores, late, self._sparse_values, self._said, wide)
        self._said.update(column.label for column in (*scores, *late))
        return told

    def _fitting(self, columns: Iterable[Column], fit: bool) -> list[Column]:
        """The columns that have values. `fit` says whether the values are few enough for one chunk.
        If `fit` is False, the list is empty, and the columns' positions are stored for the last
        chunk."""
        found = [column for column in columns if len(column.positions)]
        if fit:
            return found
        for column in found:
            self._held_back.setdefault(column.label, []).append(column.positions)
        return []

    def _told(self, scores: Sequence[Column], settled: int | None) -> Json:
        """A mapping with the field `tokens`. The mapping is empty if the caller's request has no
        probes, or if the tokens have too many scores."""
        result = self.completion.scope
        if not result.own_probes:
            return {}
        most, texts = encode.MAX_INLINE_SCORES, self.completion.scope_texts
        found = self._tokens.take(result, scores, texts, settled, most)
        return {} if found is None else {"tokens": found}

    async def _rows(self, rows: list[Column], sent: list[Json], keep: bool) -> Json:
        """The fields `rows` and `result`. The items of `rows` have values only if the rows are
        inside the answer. `result` describes the file with the rows, or is None.

        Args:
            sent: encoded items that come first in the field `rows`, before the items of the
                parameter `rows`.
            keep: True to write the file even if the rows are inside the answer.
        """
        size = sum(column.nbytes for column in rows)
        in_file = size > 0 and (
            size > self._inline_bytes
            or self._options.tensors == "handle"
            or not self._take_room(size)
        )
        if in_file:
            items = encode.rows(rows, None, await asyncio.to_thread(encode.wide_spans, rows, rows))
        else:
            items = await self._with_values(rows)
        body: Json = {"rows": sent + items, "result": None}
        if not (in_file or keep):
            return body
        result = self.completion.scope
        try:
            kept = await asyncio.to_thread(lambda: self._keep(*encode.tensors(result)))
        except CapacityError as error:
            return body | {"status": "failed", "error": f"The rows could not be kept: {error}"}
        body["result"] = {
            "id": kept.id,
            "url": f"/v1/scope/results/{kept.id}",
            "num_bytes": kept.num_bytes,
            "expires_in_s": kept.ttl_s,
        }
        return body

    async def _with_values(self, rows: list[Column]) -> list[Json]:
        """The items of the field `rows`, with the values of the rows. If THREAD_BYTES bytes or more
        must be encoded as base64 or decoded, a thread makes the items. The event loop then does not
        wait."""
        works = not self._binary or any(isinstance(c.source, EncodedRows) for c in rows)
        large = works and sum(column.nbytes for column in rows) >= THREAD_BYTES
        return await _aside(large, lambda: encode.rows(rows, self._values))


async def _aside(large: bool, call: Callable[[], T]) -> T:
    """The result of `call`, which runs in a thread if `large` is True."""
    return await asyncio.to_thread(call) if large else call()


def _is_large(result: ScopeResult) -> bool:
    """True if THREAD_BYTES bytes or more of a result have arrived."""
    arrived = (p.rows.nbytes for source in result.sources() for p in result.parts_of(source))
    return any(total >= THREAD_BYTES for total in accumulate(arrived))


def _split(columns: Iterable[Column]) -> tuple[list[Column], list[Column]]:
    """Returns two lists. The first list has the columns of scores, features and lenses, and the
    second list has the columns of rows. Columns of the operator's monitors are left out."""
    found: tuple[list[Column], list[Column]] = ([], [])
    for column in encode.for_callers(columns):
        found[not isinstance(column.label, str)].append(column)
    return found
