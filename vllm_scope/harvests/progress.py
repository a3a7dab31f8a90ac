"""The progress line of a harvest, with the finished documents, their rate, and the time left."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from tqdm import tqdm  # vLLM installs tqdm

from vllm_scope.harvests.contexts import Context


class Progress(AbstractContextManager["Progress"]):
    """A line on standard error that shows the progress of a harvest.

    Args:
        total: number of documents in the data set.
        begun: number of documents that earlier runs have finished.
        shown: whether the line is shown.
    """

    def __init__(self, total: int, begun: int, shown: bool) -> None:
        self._bar = tqdm(
            total=total, initial=begun, disable=not shown, desc="Harvest", unit="doc",
            unit_scale=True, dynamic_ncols=True,
        )  # fmt: skip
        self._total, self._done = total, begun
        self._started, self._num_tokens = time.monotonic(), 0

    def add(self, context: Context, skipped: int) -> None:
        """Count a computed context.

        A document counts as finished after the context with the document's first token was
        computed.

        Args:
            skipped: number of documents that the harvest has skipped so far. Skipped documents also
                count as finished.
        """
        self._num_tokens += len(context.token_ids)
        per_s = self._num_tokens / max(time.monotonic() - self._started, 1e-3)
        self._bar.set_postfix_str(f"{per_s:,.0f} tokens/s", refresh=False)
        self._done += sum(span.first == 0 for span in context.spans)
        self._show(self._done + skipped)

    def finish(self) -> None:
        """Count all documents as finished.

        `add` does not count the documents without tokens, because they are in no context.
        """
        self._show(self._total)

    def _show(self, done: int) -> None:
        self._bar.update(min(done, self._total) - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
