"""What travels with a request from its front-end to EngineCore.

Owns:  Recipient, Ticket.
Runs:  made in the front-end, read in EngineCore; the Recipient goes on to the workers.
From:  packed, engine.frontend.requests.   To: engine.core.entry.
"""

from __future__ import annotations

import msgspec

from vllm_scope.request.arrays import Array
from vllm_scope.request.packed import Packed


class Recipient(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's rows and scores go.

    Attributes:
        key: the request's key, unique among all front-ends. Labels of the request's rows carry it.
        frontend: identity of the front-end (transport.messages.Address).
        request_id: the caller's.
        uid: the request's id at sinks, the same for all its completions.
        child: index of the completion.
        owner: digest of the API key; empty without one.
        follows: True if the caller sees outputs before the last one.
    """

    key: int
    frontend: str
    request_id: str = ""
    uid: str = ""
    child: int = 0
    owner: str = ""
    follows: bool = True


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A request that has passed its front-end's check.

    Attributes:
        first_position: the first position that delivers something; None if none does.
        modules: the names of steering modules that it refers to; EngineCore has their vectors.
        spec: what it asks for.
        arrays: (shape, data) of the spec's Arrays, in the order of `spec.arrays`.
    """

    recipient: Recipient
    first_position: int | None
    modules: tuple[str, ...]
    spec: Packed
    arrays: list[tuple[tuple[int, ...], bytes]]

    @staticmethod
    def decode(data: bytes) -> Ticket:
        return _decode(data)

    def encode(self) -> bytes:
        return _encode(self)

    def held_arrays(self) -> dict[bytes, Array]:
        """The Arrays by digest."""
        known = zip(self.spec.arrays, self.arrays, strict=True)
        return {digest: Array.known(*content, digest) for digest, content in known}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ticket).decode
