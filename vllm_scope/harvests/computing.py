"""From documents to their rows, on an engine.

Owns:  `context_size`, `rows_of`.
Runs:  in the harvesting process. Documents are read and tokenized on a thread ahead of the engine.
From:  documents, contexts, skipped.   To: job; feeds.feeder.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from vllm_scope.errors import ConfigError, ScopeError, SpecError, shown
from vllm_scope.harvests.contexts import Context, Long, contexts_of, prefetched
from vllm_scope.harvests.documents import Documents
from vllm_scope.harvests.engines import Engine, Rows
from vllm_scope.harvests.skipped import Skipped
from vllm_scope.request.actions import Read

#: Contexts that are tokenized ahead of the engine.
_AHEAD = 512


def context_size(engine: Engine, asked: int | None) -> int:
    """The most tokens of a context; None asks for what the engine takes.

    Raises:
        ConfigError: a context that is too long for the engine.
    """
    size = engine.most_tokens if asked is None else asked
    if not 1 <= size <= engine.most_tokens:
        raise ConfigError(
            f"context is {size}; it is 1 to {engine.most_tokens}, one less than the engine's "
            "max_model_len."
        )
    return size


def rows_of(
    documents: Documents,
    reads: Sequence[Read],
    engine: Engine,
    size: int,
    long: Long,
    skipped: Skipped,
    wanted: Callable[[Context], bool],
) -> Generator[tuple[Context, Rows]]:
    """Each context with its rows, in the order in which the engine ends them.

    Args:
        size: the most tokens of a context.
        skipped: counts what is passed over.
        wanted: called with every context, in order, on the thread that reads; False: not computed.

    Raises:
        ScopeError: a document with a foreign token id, rows that are missing, an engine that dies.
    """
    texts = skipped.texts(documents)
    contexts = skipped.contexts(contexts_of(texts, engine.encode, size, long, engine.end))
    asked = (_checked(context, engine) for context in contexts if wanted(context))
    with (
        closing(prefetched(asked, _AHEAD)) as ahead,
        closing(engine.compute(ahead, reads)) as computed,
    ):
        for context, rows in computed:
            if rows.status != "complete":
                raise ScopeError(
                    f"the rows of document {shown(context.name)} are {rows.status}: "
                    f"{rows.error or 'some are missing'}; run it again."
                )
            yield context, rows


def _checked(context: Context, engine: Engine) -> tuple[Context, Sequence[int]]:
    """The context and its token ids. Raises SpecError."""
    ids, above = context.token_ids, engine.vocabulary
    if not 0 <= min(ids) <= max(ids) < above:
        wrong = next(i for i in ids if not 0 <= i < above)
        raise SpecError(
            f"document {shown(context.name)} has the token id {wrong}; those of "
            f"{engine.model} are 0 to {above - 1}. Tokenize with its own tokenizer."
        )
    return context, ids
