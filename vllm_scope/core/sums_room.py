"""The sums that the workers store for Moments, and the free memory for more sums.

Owns:  SumsRoom.
Runs:  in EngineCore. Requests enter on one thread. Another thread begins requests and drops sums.
From:  engine.core.entry, engine.core.scheduler (callers).   To: batch.sums (bytes of sums).

Promise: the sums in a SumsRoom fit into `moments_mib`, and all sums of one name have the same
options. A SumsRoom allocates room when a request enters. If a caller drops the sums before the
request begins, the SumsRoom allocates the room again when the request begins. In between, other
requests can have taken the room, or can have used the name with other options. The request then
still runs, and the workers count its rows as missing. Sums outlive their requests: their room is
freed only when a caller drops them.
"""

from __future__ import annotations

import logging
import threading

from vllm_scope.batch.sums import bytes_of
from vllm_scope.errors import CapacityError, ScopeError, SpecError, shown
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.request.sites import Place, Sites

logger = logging.getLogger("vllm.vllm_scope")

OPTION = "additional_config['scope'].moments_mib"


class SumsRoom:
    """The sums that requests have named, and the room that these sums use.

    Args:
        most_mib: additional_config['scope'].moments_mib.
    """

    def __init__(self, sites: Sites, most_mib: float) -> None:
        self._sites, self._most = sites, int(most_mib * 2**20)
        self._itemsize = 4 if sites.dtype == "float32" else 2
        self._lock = threading.Lock()
        #: By the name of sums: (True if the sums have a covariance, True if they have a target).
        self._kinds: dict[str, tuple[bool, bool]] = {}
        #: The bytes of each sum, by the name and then by (`Place`, label). `num_bytes` is the
        #: number of bytes of all sums.
        self._known: dict[str, dict[tuple[Place, str], int]] = {}
        self.num_bytes = 0

    def enter(self, asked: tuple[ResolvedMoments, ...]) -> None:
        """Allocate room for the sums of a request. If the request is refused, no room is allocated.

        Raises:
            SpecError: a name has sums with other options, or the request's sums alone exceed
                `moments_mib`.
            CapacityError: there is not enough free room, because of other sums.
        """
        with self._lock:
            kinds, sizes = dict[str, tuple[bool, bool]](), dict[tuple[str, Place, str], int]()
            for i, one in enumerate(asked):
                kind = one.covariance, one.target is not None
                known = self._kinds.get(one.name) or kinds.setdefault(one.name, kind)
                if known != kind:
                    raise SpecError(_differs(i, one, known))
                size = bytes_of(self._sites.row_size(one.streams[0].site), self._itemsize, *kind)
                sizes |= {(one.name, place, one.by): size for place in one.streams}
            new = {k: n for k, n in sizes.items() if k[1:] not in self._known.get(k[0], {})}
            self._check(sum(sizes.values()), sum(new.values()))
            self._kinds.update(kinds)
            for (name, place, label), size in new.items():
                self._known.setdefault(name, {})[place, label] = size
            self.num_bytes += sum(new.values())

    def enter_again(self, asked: tuple[ResolvedMoments, ...]) -> None:
        """Call `enter` again when a request begins, because its sums can have been dropped since it
        entered. Errors are logged, and not raised."""
        try:
            self.enter(asked)
        except ScopeError as error:
            logger.warning("vllm-scope: rows of a request will be missing: %s", error)

    def _check(self, whole: int, more: int) -> None:
        if whole > self._most:
            raise SpecError(
                f"the request's Moments take {whole / 2**20:,.1f} MiB of the device; this engine "
                f"has {self._most / 2**20:,.1f} ({OPTION}). Name fewer layers, set covariance "
                "to false, or start the engine with more."
            )
        if self.num_bytes + more > self._most:
            raise CapacityError(
                f"new sums of the request take {more / 2**20:,.1f} MiB of the device, and the sums "
                f"of {', '.join(map(shown, list(self._known)[:8]))} take "
                f"{self.num_bytes / 2**20:,.1f} of {self._most / 2**20:,.1f} ({OPTION}). Drop some "
                "of them (vllm_scope.drop_moments), or start the engine with more."
            )

    def drop(self, name: str) -> bool:
        """Free the room of a name's sums. Returns False if there are no sums with this name."""
        with self._lock:
            self._kinds.pop(name, None)
            gone = self._known.pop(name, None)
            self.num_bytes -= sum((gone or {}).values())
            return gone is not None


def _differs(i: int, one: ResolvedMoments, known: tuple[bool, bool]) -> str:
    covariance, targets = known
    return (
        f"moments[{i}] is called {shown(one.name)}, and the sums of that name have covariance "
        f"{'true' if covariance else 'false'} and {'a' if targets else 'no'} target; take the "
        "same options, or another name."
    )
