"""The ticket of a request, which travels from its front-end to EngineCore.

Owns:  Recipient, Ticket; the form of vectors that travel without a ticket (`encode_arrays`).
Runs:  made in the front-end, read in EngineCore; the Recipient goes on to the workers.
From:  packed, engine.frontend.requests.   To: engine.core.entry.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import msgspec

from vllm_scope.request.arrays import Array
from vllm_scope.request.packed import Packed
from vllm_scope.request.remembered import Remembered

#: An Array's digest, shape and data.
_Travelling = tuple[bytes, tuple[int, ...], bytes]
#: A ticket's content is compressed if it has more bytes than this. With many named probes, most of
#: the content is repeated text.
_LONG = 1 << 10
#: Bytes of each of two caches of this process: of specs as they are sent, and as they arrived.
_KEPT_BYTES = 16 << 20


class Recipient(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's rows and scores go.

    Attributes:
        key: the request's key, unique among all front-ends. Labels of the request's rows carry it.
        frontend: identity of the front-end (transport.messages.Address).
        request_id: the caller's id of the request.
        uid: the request's id at sinks, the same for all its completions.
        child: index of the completion.
        owner: digest of the API key; empty without one.
        follows: True if the caller sees outputs before the last one.
        awaits: False if workers send the front-end nothing about the request. The request then ends
            with its last token.
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
        first_position: the first position whose row an action may need; None if no action needs
            rows.
        modules: the names of the steering modules that the spec refers to; EngineCore has their
            vectors.
        spec: what the request asks for.
        arrays: the spec's Arrays, without those that EngineCore certainly holds (core.sent_ahead).
        variants: if the request stands for several variants, what each of them asks for. Each
            variant has this request's prompt and parameters. `spec` is then the first variant's,
            and `arrays` has the Arrays of all variants.
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
        """The Arrays that travelled with this ticket, by digest."""
        return _arrived(self.arrays)


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """A ticket as it travels. Many requests have the same `content`, which is kept encoded.

    Attributes:
        digest: the spec's digest.
        num_modules: how many steering modules the spec names.
        content: `modules` and `spec` of the ticket in msgpack; compressed by zlib if it is long.
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
#: Digest of a spec, and its number of modules -> its content as it is sent, and as it arrived. The
#: digest covers the names of modules, which are in the spec's body.
_sent: Remembered[tuple[bytes, int], bytes] = Remembered(_KEPT_BYTES)
_came: Remembered[tuple[bytes, int], _Content] = Remembered(_KEPT_BYTES)
#: First byte of a compressed content, in zlib's format. No array in msgpack begins with it.
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
    """Arrays in the form that a ticket has."""
    return [(array.digest, array.shape, array.data) for array in arrays]


def _arrived(arrays: list[_Travelling]) -> dict[bytes, Array]:
    return {digest: Array.known(shape, data, digest) for digest, shape, data in arrays}


def encode_arrays(arrays: Iterable[Array]) -> bytes:
    return _encode(travelling(arrays))


def decode_arrays(data: bytes) -> dict[bytes, Array]:
    """The Arrays that `encode_arrays` was given, by digest."""
    return _arrived(_decode_arrays(data))
