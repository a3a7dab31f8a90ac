"""Finds the documents and contexts whose rows cannot be read. A harvest skips them and continues.

Owns:  Skipped.
Runs:  on the thread that makes contexts ahead of the engine.
From:  documents, contexts.   To: job, manifest.

Promise: each run of a harvest skips the same documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vllm_scope.errors import SpecError
from vllm_scope.harvests.contexts import Context
from vllm_scope.harvests.documents import Document
from vllm_scope.request.actions import Read
from vllm_scope.request.bounded_json import is_unicode

#: The largest number of names in `reasons`. Further skipped texts and contexts are only counted.
_MOST_NAMES = 20


class Skipped:
    """Texts that are not valid Unicode, and contexts that lack a position that a read names.

    Attributes:
        count: number of skipped texts and contexts.
        num_documents: number of documents whose first token is in a skipped text or context.
        reasons: maps the names of the first _MOST_NAMES skipped texts and contexts to the reasons.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        self._reads = reads
        self.count = self.num_documents = 0
        self.reasons: dict[str, str] = {}

    def texts(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents of token ids or of valid Unicode text. Count the other documents."""
        for document in documents:
            if isinstance(document.content, str) and not is_unicode(document.content):
                self._add(document.id, "its text has half of a surrogate pair", 1)
            else:
                yield document

    def contexts(self, contexts: Iterable[Context]) -> Iterator[Context]:
        """Yield the contexts that have all positions that the reads name. Count the other
        contexts."""
        for context in contexts:
            num_tokens = len(context.token_ids)
            try:
                for i, read in enumerate(self._reads):
                    read.tokens.check(num_tokens, num_tokens - 1, f"reads[{i}].tokens")
            except SpecError as error:
                self._add(context.name, str(error), sum(s.first == 0 for s in context.spans))
            else:
                yield context

    def error(self, source: str) -> SpecError:
        """The error to raise if all documents of `source` were skipped. The error has the name of
        the first skipped text or context, and the reason."""
        name, why = next(iter(self.reasons.items()))
        return SpecError(f"no document of {source} can be read; {name}: {why}")

    def _add(self, name: str, why: str, num_documents: int) -> None:
        self.count += 1
        self.num_documents += num_documents
        if len(self.reasons) < _MOST_NAMES:
            self.reasons[name] = why
