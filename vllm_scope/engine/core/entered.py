"""EngineCore's data about requests that read, probe or edit.

Owns:  Entered, and two tables: one has the Entered of each request, and one has the keys of the KV
       blocks of each edited request.
Runs:  in EngineCore. The input thread writes the tables. The input thread and the scheduler's
       thread read the tables.
From:  entry.   To: scheduler, scores, variants, outputs, clearing.
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
    """EngineCore's data about one request. The data does not change after the request has entered.

    Attributes:
        asked: the request's actions, the server's edits and the reads of global sinks.
        recipient: None if the request has no spec of its own.
        first_read: a lower bound of the positions whose rows are needed; None if no row is needed.
        first_edited: a lower bound of the positions whose KV depends on edits; None if there are no
            edits.
        keys: the keys of the request's KV blocks; None if the request has no edits.
        held: the request's programs in the workers' tables; None if all actions of the request are
            reads and Moments.
        columns: a column says which actions apply to one token, as bytes. From the distinct columns
            of all tokens, each worker can build all programs of the request.
        unchecked: True if the request can deliver more bytes in one step than its front-end has
            checked.
        logged: the range that the request needs in the log of states. Its `start` is not set yet.
        reserve: a Cost with two parts: the table entries that the request can need when its policy
            changes scales, and the number of rows to which the request's lenses are applied.
        sums: the object that reserves room for the request's sums; None if there are no Moments.
        num_prompt: number of tokens of the prompt, or of the first piece of streamed input.
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
    num_prompt: int = 0

    @property
    def has_sinks(self) -> bool:
        """True if some rows or scores go to a sink other than `memory`."""
        return any(to != MEMORY for to in self.asked.destinations)


#: Maps vLLM's Request to the request's Entered.
_entered: Beside[Entered] = Beside()
#: Maps vLLM's Request, if the request has edits, to the keys of the request's KV blocks.
_keys: Beside[BlockKeys] = Beside()
#: Maps a request id to the keys of the request's KV blocks, while vLLM makes its Request object.
#: During this time vLLM already hashes the blocks, and `_keys` has no entry for the Request yet.
entering: dict[str, BlockKeys] = {}


def entered(request: object) -> Entered | None:
    """The Entered of a request; None for a request without taps."""
    return _entered.of(request)


def any_entered() -> bool:
    """False if no request of this process has an Entered."""
    return len(_entered) > 0


def keys_of(request: Request) -> BlockKeys | None:
    """The keys of a request's KV blocks; None if the request has no edits. This function runs for
    each block that vLLM hashes."""
    if not (entering or _keys):
        return None
    return _keys.of(request) or entering.get(request.request_id)


def keep(request: object, found: Entered) -> None:
    _entered.put(request, found)
    if found.keys is not None:
        _keys.put(request, found.keys)
