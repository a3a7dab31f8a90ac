"""What EngineCore keeps about requests that read, probe or edit.

Owns:  Entered, and the tables that hold it for each request.
Runs:  in EngineCore: the input thread writes; the input thread and the scheduler's thread read.
From:  entry.   To: scheduler, clearing, engine.worker.faults.
"""

from __future__ import annotations

from msgspec import Struct

from vllm_scope.core.sums_room import SumsRoom
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.vllm_types import Request
from vllm_scope.program.block_keys import BlockKeys
from vllm_scope.program.held import Held
from vllm_scope.program.operations import NO_LOG, Cost, LogRange
from vllm_scope.request.actions import MEMORY
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.ticket import Recipient


class Entered(Struct, frozen=True):
    """A request, as it was when it entered.

    Attributes:
        asked: what it reads, probes and edits, with the server's edits and global sinks' reads.
        recipient: None if the request has no spec of its own.
        first_read: the first position that delivers something; None if none does.
        first_edited: the first position whose KV depends on edits; None without edits.
        keys: the keys of its KV blocks; None without edits.
        held: the programs that it holds in the workers' tables; None if it only reads.
        columns, unchecked: as in core.news.Entrant.
        logged: how much of the log of states it needs.
        reserve: the places in the workers' tables that it may take later if its policy changes
            scales, and the rows of its lenses.
        sums: the room for its sums; None without Moments.
    """

    asked: Resolved
    recipient: Recipient | None = None
    first_read: int | None = None
    first_edited: int | None = None
    keys: BlockKeys | None = None
    held: Held | None = None
    columns: tuple[bytes, ...] = ()
    unchecked: bool = False
    logged: LogRange = NO_LOG
    reserve: Cost = Cost()
    sums: SumsRoom | None = None

    @property
    def has_sinks(self) -> bool:
        """True if some rows or scores go to a sink other than `memory`."""
        return any(to != MEMORY for to in self.asked.destinations)


#: vLLM's Request -> its Entered.
_entered: Beside[Entered] = Beside()
#: vLLM's Request with edits -> the keys of its blocks.
_keys: Beside[BlockKeys] = Beside()
#: Request id -> the keys of its blocks, while vLLM makes the Request. vLLM hashes the request's
#: blocks then, before `_keys` can have the Request.
entering: dict[str, BlockKeys] = {}


def entered(request: object) -> Entered | None:
    """The Entered of a request; None for a plain request."""
    return _entered.of(request)


def any_entered() -> bool:
    """False if all requests of this process are plain."""
    return len(_entered) > 0


def keys_of(request: Request) -> BlockKeys | None:
    """The keys of a request's KV blocks; None without edits. Called for each block that vLLM
    hashes."""
    if not (entering or _keys):
        return None
    return _keys.of(request) or entering.get(request.request_id)


def keep(request: object, found: Entered) -> None:
    _entered.put(request, found)
    if found.keys is not None:
        _keys.put(request, found.keys)
