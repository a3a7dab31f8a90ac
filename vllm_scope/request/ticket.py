"""The ticket of a request, which the request's front-end sends to EngineCore.

Owns:  Recipient, Ticket, and the form of vectors that are sent without a ticket (`encode_arrays`).
Runs:  the front-end makes a Ticket. EngineCore reads the Ticket, and sends the Recipient to the
       workers.
From:  packed, engine.frontend.requests.   To: engine.core.entry.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import msgspec

from vllm_scope.request.arrays import Array
from vllm_scope.request.packed import Packed
from vllm_scope.request.remembered import Remembered

#: An Array in the form in which it is sent: (digest, shape, data).
_Travelling = tuple[bytes, tuple[int, ...], bytes]
#: A content of more bytes than this is compressed. With many named probes, most of the content is
#: repeated text.
_LONG = 1 << 10
#: The limit of each of two caches, in bytes: of sent specs, and of received specs.
_KEPT_BYTES = 16 << 20


class Recipient(msgspec.Struct, frozen=True, array_like=True):
    """The destination of the rows and scores of a request.

    Attributes:
        key: the request's key, unique among all front-ends. Labels of rows contain the key.
        frontend: identity of the front-end (transport.messages.Address).
        request_id: the caller's id of the request.
        uid: the request's id at sinks. All completions of the request have the same uid.
        child: index of the completion among the request's completions.
        owner: the same as Asker.owner: a digest of the API key, or an empty string offline.
        follows: True if the caller sees outputs while the request runs.
        awaits: True if the workers send something about the request to the front-end. If False, the
            front-end does not wait after the last token.
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
        first_position: no row before this position is needed. None if no rows are needed.
        modules: the names of the spec's steering modules, whose vectors EngineCore has.
        spec: the actions of the request.
        arrays: the spec's Arrays, except the Arrays that the front-end has sent ahead
            (core.sent_ahead).
        variants: for a sweep, one request can stand for several variants. Each variant has this
            request's prompt and parameters, and its own spec. Then `variants` has the specs of all
            variants, `spec` is the first of these specs, and `arrays` has the Arrays of all specs.
            For any other request, `variants` is empty.
    """

    recipient: Recipient
    first_position: int | None
    modules: tuple[str, ...]
    spec: Packed
    arrays: list[_Travelling]
    variants: list[Packed] = []

    @staticmethod
    def decode(data: bytes) -> Ticket:
        came = _decode(data)
        modules, spec = _content_of(came)
        return Ticket(
            came.recipient, came.first_position, modules, spec, came.arrays, came.variants
        )

    def encode(self) -> bytes:
        key = self.spec.digest, len(self.modules)
        content = _sent.get(key)
        if content is None:
            content = _encode((self.modules, self.spec))
            if len(content) > _LONG:
                content = zlib.compress(content, 1)
            _sent.put(key, content, len(content))
        parts = self.recipient, self.first_position, *key, content, self.arrays, self.variants
        return _encode(_Wire(*parts))

    def of_variants(self) -> list[Ticket]:
        """A ticket for each variant."""
        arrays = {one[0]: one for one in self.arrays}
        return [
            Ticket(self.recipient, self.first_position, self.modules, one,
                   [arrays[digest] for digest in one.arrays if digest in arrays])
            for one in self.variants
        ]  # fmt: skip

    def own_arrays(self) -> dict[bytes, Array]:
        """The Arrays in this ticket, by digest."""
        return _arrived(self.arrays)


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """A ticket in the form in which it is sent. `content` is cached, because many requests have the
    same content.

    Attributes:
        digest: the spec's digest.
        num_modules: number of steering modules that the spec names.
        content: `modules` and `spec` of the ticket in msgpack. zlib compresses a long content.
    """

    recipient: Recipient
    first_position: int | None
    digest: bytes
    num_modules: int
    content: bytes
    arrays: list[_Travelling]
    variants: list[Packed]


_Content = tuple[tuple[str, ...], Packed]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Wire).decode
_decode_content = msgspec.msgpack.Decoder(_Content).decode
#: `_sent` keeps the encoded contents of tickets that this process has sent. `_came` keeps the
#: decoded contents of tickets that have arrived. A key of either cache is a pair: the digest of a
#: spec, and the number of the spec's modules. The digest covers the names of the modules.
_sent: Remembered[tuple[bytes, int], bytes] = Remembered(_KEPT_BYTES)
_came: Remembered[tuple[bytes, int], _Content] = Remembered(_KEPT_BYTES)
#: The first byte of a content that zlib has compressed. No msgpack array begins with this byte.
_ZLIB = 0x78


def _content_of(came: _Wire) -> _Content:
    key = came.digest, came.num_modules
    found = _came.get(key)
    if found is None:
        content = came.content
        if content[0] == _ZLIB:
            content = zlib.decompress(content)
        found = _decode_content(content)
        _came.put(key, found, len(content))
    return found


_decode_arrays = msgspec.msgpack.Decoder(list[_Travelling]).decode


def travelling(arrays: Iterable[Array]) -> list[_Travelling]:
    """Arrays in the form that a ticket contains."""
    return [(array.digest, array.shape, array.data) for array in arrays]


def _arrived(arrays: list[_Travelling]) -> dict[bytes, Array]:
    return {digest: Array.known(shape, data, digest) for digest, shape, data in arrays}


def encode_arrays(arrays: Iterable[Array]) -> bytes:
    return _encode(travelling(arrays))


def decode_arrays(data: bytes) -> dict[bytes, Array]:
    """The Arrays that `encode_arrays` has encoded, by digest."""
    return _arrived(_decode_arrays(data))
