"""Makes contexts from documents, and computes the rows of contexts with an engine.

Owns:  `context_size`, `contexts_ahead`, `rows_of`.
Runs:  in the harvesting process. `rows_of` runs in the process that has the engine. A thread reads
       and tokenizes documents before the engine needs the contexts.
From:  documents, contexts, skipped.   To: job, storing, feeds.feeder.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing

from vllm_scope.errors import ConfigError, ScopeError, SpecError, shown
from vllm_scope.harvests.contexts import Context, Long, contexts_of, prefetched
from vllm_scope.harvests.documents import Documents
from vllm_scope.harvests.engines import Engine, EngineFacts, Rows
from vllm_scope.harvests.skipped import Skipped
from vllm_scope.request.actions import Read

#: The largest number of contexts that wait for the engine. A thread makes these contexts.
_AHEAD = 512


def context_size(engine: EngineFacts, asked: int | None) -> int:
    """The largest number of tokens of a context: `asked`, or by default the engine's maximum.

    Raises:
        ConfigError: `asked` is below 1 or above the engine's maximum.
    """
    size = engine.most_tokens if asked is None else asked
    if not 1 <= size <= engine.most_tokens:
        raise ConfigError(
            f"context is {size}; it must be 1 to {engine.most_tokens}, one less than the engine's "
            "max_model_len."
        )
    return size


def contexts_ahead(
    documents: Documents,
    engine: EngineFacts,
    size: int,
    long: Long,
    skipped: Skipped,
    wanted: Callable[[Context], bool],
) -> Generator[Context]:
    """Yield the contexts that the engine must compute, in order.

    A thread makes the contexts before the engine needs them.

    Args:
        size: the largest number of tokens of a context.
        skipped: counts the documents and contexts that the harvest skips.
        wanted: a function that returns False for a context that is left out. The thread calls this
            function in order, with each context that is not skipped.

    Raises:
        SpecError: a context has a token id that is not in the model's vocabulary.
        SpecError, FileError: the errors of `documents`.
    """
    texts = skipped.texts(documents)
    contexts = skipped.contexts(contexts_of(texts, engine.encode, size, long, engine.end))
    return prefetched((_checked(one, engine) for one in contexts if wanted(one)), _AHEAD)


def rows_of(
    contexts: Iterable[Context], engine: Engine, reads: Sequence[Read]
) -> Generator[tuple[Context, Rows]]:
    """Yield each context with its rows, in the order in which the engine finishes the contexts.

    Raises:
        ScopeError: rows are missing, or the engine has died.
    """
    prompts = ((context, context.token_ids) for context in contexts)
    with closing(engine.compute(prompts, reads)) as computed:
        for context, rows in computed:
            rows.columns()  # after this call, `status` takes less time
            if rows.status != "complete":
                raise ScopeError(
                    f"the rows of document {shown(context.name)} are {rows.status}: "
                    f"{rows.error or 'some rows are missing'}; compute the rows again."
                )
            yield context, rows


def _checked(context: Context, engine: EngineFacts) -> Context:
    """Return the context. Raises SpecError if a token id is not in the model's vocabulary."""
    ids, above = context.token_ids, engine.vocabulary
    if not 0 <= min(ids) <= max(ids) < above:
        wrong = next(i for i in ids if not 0 <= i < above)
        raise SpecError(
            f"document {shown(context.name)} has the token id {wrong}; the ids of "
            f"{engine.model} are 0 to {above - 1}. Use the tokenizer of this model."
        )
    return context
