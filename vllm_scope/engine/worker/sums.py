"""The remote calls about one worker's sums of Moments.

Owns:  SumsCalls.
Runs:  in workers, on the worker's thread.
From:  attach (registers the calls), engine.moments (makes the calls).   To: worker.summing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vllm_scope.engine.worker.worker import ScopeWorker
from vllm_scope.request.sites import Place


class SumsCalls:
    """Reads and drops the sums of one worker."""

    def __init__(self, scope: ScopeWorker) -> None:
        self._scope = scope

    def by_name(self) -> dict[str, Callable[..., object]]:
        """The functions that answer the remote calls, by the name of the call."""
        return {
            "scope_names_of_moments": self.names,
            "scope_held_moments": self.held,
            "scope_moments": self.read,
            "scope_drop_moments": self.drop,
        }

    def names(self, name: str) -> list[tuple[str, int, str]]:
        """The site, the layer and the label of all sums of a name on this worker."""
        none: list[tuple[Place, str]] = []
        found = self._scope.of_sums(lambda sums: sums.names(name), none)
        return [(place.site, place.layer, label) for place, label in found]

    def held(self) -> list[str]:
        """The names of the sums on this worker."""
        none: list[str] = []
        return self._scope.of_sums(lambda sums: sums.held(), none)

    def read(self, name: str, site: str, layer: int, label: str) -> dict[str, object] | None:
        """The current sums, as the fields of batch.sums.Packed; None if this worker does not have
        these sums."""
        found = self._scope.of_sums(lambda sums: sums.read(name, Place(site, layer), label), None)
        return None if found is None else msgspec.structs.asdict(found)

    def drop(self, name: str) -> bool:
        """Drop the sums of a name. Returns False if this worker has no such sums."""
        return self._scope.of_sums(lambda sums: sums.drop(name), False)
