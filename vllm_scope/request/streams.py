"""Iteration over the streams of a result, in the front-end and in a client.

Owns:  OverStreams.
Runs:  in front-ends and in clients. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_scope.request.sites import SiteLayer


class OverStreams:
    """Iteration, `len` and `in` for an object with streams. Iteration gives the pairs (site, layer)
    of the streams. In a condition, the object always counts as true, also without streams.
    Therefore `if output.scope` tests whether a result exists."""

    def keys(self) -> list[SiteLayer]:
        """The pair (site, layer) of each stream."""
        raise NotImplementedError

    def _at(self, stream: object) -> object:
        """The key or the rows of a stream. `stream` can have any form that the object accepts in
        `[...]`.

        Raises:
            KeyError: the object has no such stream. TypeError: `stream` has a wrong form.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[SiteLayer]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __bool__(self) -> bool:
        return True

    def __contains__(self, stream: object) -> bool:
        try:
            return bool(self._at(stream))
        except (KeyError, TypeError):
            return False
