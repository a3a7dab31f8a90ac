"""Makes prompts from documents, by one of three rules.

    truncate   A context has the first tokens of a document. The other tokens are left out.
    split      All tokens of a document are divided among consecutive contexts. The last context of
               the document can be shorter.
    pack       All documents are joined in order, and cut into contexts of equal length. Only the
               last context can be shorter. Each text ends with the end-of-text token, if there is
               one. A token also attends to tokens of earlier documents in its context.

Owns:  Context, `contexts_of`, `prefetched`.
Runs:  on the thread that `prefetched` starts. This thread reads and tokenizes documents while the
       engine computes.
From:  documents.   To: computing.

Promise: the contexts depend only on the documents, the tokenizer, the size and the rule.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeVar

from vllm_scope.files.index import DocumentSpan
from vllm_scope.harvests.documents import Document, digest_of

Long = Literal["truncate", "split", "pack"]
#: A function from texts to the token ids of each text.
Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
T = TypeVar("T")

#: The largest number of documents that are tokenized in one call.
_BATCH = 64


@dataclass(frozen=True)
class Context:
    """A prompt of a harvest.

    Attributes:
        token_ids: the ids of the prompt's tokens, of which there is at least one.
        spans: the parts of documents that form the prompt, in order and without gaps.
    """

    token_ids: Sequence[int]
    spans: tuple[DocumentSpan, ...]

    @property
    def name(self) -> str:
        """The first document's id. If the context does not begin at the document's first token, the
        name is ID:INDEX, with the index of the context's first token in the document."""
        first = self.spans[0]
        return first.document if first.first == 0 else f"{first.document}:{first.first}"

    @property
    def key(self) -> bytes:
        return key_of(self.spans)


def key_of(spans: Sequence[DocumentSpan]) -> bytes:
    """16 bytes that identify a context in its data set. Two contexts never begin at the same token
    of the same document."""
    return digest_of(f"{spans[0].first}:{spans[0].document}")


def contexts_of(
    documents: Iterable[Document], encode: Encode, size: int, long: Long, end: int | None
) -> Iterator[Context]:
    """Yield the contexts of documents. A document without tokens gives no context.

    Args:
        size: the largest number of tokens of a context.
        end: the token id that is added to the end of each packed text. None: no token is added.
    """
    tokenized = _tokenized(documents, encode, end if long == "pack" else None)
    return _packed(tokenized, size) if long == "pack" else _single(tokenized, size, long)


def _tokenized(
    documents: Iterable[Document], encode: Encode, end: int | None
) -> Iterator[tuple[str, Sequence[int]]]:
    source = iter(documents)
    while some := list(islice(source, _BATCH)):
        texts = [one.content for one in some if isinstance(one.content, str)]
        encoded = iter(encode(texts) if texts else ())
        for one in some:
            if not isinstance(one.content, str):
                yield one.id, one.content
                continue
            ids = next(encoded)
            yield one.id, [*ids, end] if end is not None and ids else ids


def _single(
    tokenized: Iterable[tuple[str, Sequence[int]]], size: int, long: Long
) -> Iterator[Context]:
    for document, ids in tokenized:
        stop = size if long == "truncate" else len(ids)
        for first in range(0, min(stop, len(ids)), size):
            some = ids[first : first + size]
            yield Context(some, (DocumentSpan(document, first, len(some), len(ids)),))


def _packed(tokenized: Iterable[tuple[str, Sequence[int]]], size: int) -> Iterator[Context]:
    together: list[int] = []
    spans: list[DocumentSpan] = []
    for document, ids in tokenized:
        first = 0
        while first < len(ids):
            some = ids[first : first + size - len(together)]
            together += some
            spans.append(DocumentSpan(document, first, len(some), len(ids)))
            first += len(some)
            if len(together) == size:
                yield Context(together, tuple(spans))
                together, spans = [], []
    if together:
        yield Context(together, tuple(spans))


def prefetched(items: Iterable[T], most: int) -> Generator[T]:
    """Yield items that another thread makes ahead of the caller. At most `most` items wait in the
    queue. Raises the error that `items` raises on the other thread."""
    waiting: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(most)
    ended = threading.Event()

    def put(item: T | None, error: BaseException | None = None) -> None:
        while not ended.is_set():
            with suppress(queue.Full):
                waiting.put((item, error), timeout=0.1)
                return

    def run() -> None:
        try:
            for item in items:
                put(item)
                if ended.is_set():
                    return
            put(None)
        except BaseException as error:
            put(None, error)

    threading.Thread(target=run, name="vllm-scope-documents", daemon=True).start()
    try:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        ended.set()
