"""What travels with a request from its front-end to EngineCore.

Owns:  Recipient, Ticket; vectors as they travel beside it (`encode_arrays`).
Runs:  made in the front-end, read in EngineCore; the Recipient goes on to the workers.
From:  packed, engine.frontend.requests.   To: engine.core.entry.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from vllm_scope.request.arrays import Array
from vllm_scope.request.packed import Packed

#: An Array's digest, shape and data.
_Travelling = tuple[bytes, tuple[int, ...], bytes]


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
        awaits: False if workers tell the front-end nothing of the request, which is over with its
            last token.
    """

    key: int
    frontend: str
    request_id: str = ""
    uid: str = ""
    child: int = 0
    owner: str = ""
    follows: bool = True
    awaits: bool = True


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A request that has passed its front-end's check.

    Attributes:
        first_position: the first position that delivers something; None if none does.
        modules: the names of steering modules that it refers to; EngineCore has their vectors.
        spec: what it asks for.
        arrays: of the spec's Arrays, those that EngineCore may not hold (core.sent_ahead).
    """

    recipient: Recipient
    first_position: int | None
    modules: tuple[str, ...]
    spec: Packed
    arrays: list[_Travelling]

    @staticmethod
    def decode(data: bytes) -> Ticket:
        return _decode(data)

    def encode(self) -> bytes:
        return _encode(self)

    def own_arrays(self) -> dict[bytes, Array]:
        """The Arrays that travelled with it, by digest."""
        return _arrived(self.arrays)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ticket).decode
_decode_arrays = msgspec.msgpack.Decoder(list[_Travelling]).decode


def travelling(arrays: Iterable[Array]) -> list[_Travelling]:
    """Arrays as a ticket has them."""
    return [(array.digest, array.shape, array.data) for array in arrays]


def _arrived(arrays: list[_Travelling]) -> dict[bytes, Array]:
    return {digest: Array.known(shape, data, digest) for digest, shape, data in arrays}


def encode_arrays(arrays: Iterable[Array]) -> bytes:
    return _encode(travelling(arrays))


def decode_arrays(data: bytes) -> dict[bytes, Array]:
    """By digest."""
    return _arrived(_decode_arrays(data))
