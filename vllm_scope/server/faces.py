"""Faces over HTTP: their keys in requests, and their fields in answers.

Owns:  HttpFace (the registration of a face), Reply (a face's fields of one answer), Words,
       CompletionOutput.
Runs:  in each API server process, on its event loop.
From:  compat.   To: engine.http (requests), answer (answers), routes (routers).

Promise: a key belongs to one face, and a request can have a key only one time. If no face accepts a
key over HTTP, the request is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from vllm_scope.errors import SpecError, shown
from vllm_scope.results.result import ScopeResult
from vllm_scope.server.encode import Json
from vllm_scope.server.store import Kept

if TYPE_CHECKING:
    from fastapi import APIRouter


#: Keeps tensors and metadata as a file that the request's API key can fetch. The call blocks, and
#: raises CapacityError if the store has no room.
Keep = Callable[[Mapping[str, Tensor], Mapping[str, str]], Kept]


class CompletionOutput(Protocol):
    """vLLM's CompletionOutput (offline: `output.outputs[i]`) with the attributes of this package.

    Attributes:
        scope_texts: the text that each generated token added.
    """

    index: int
    text: str
    finish_reason: str | None
    scope: ScopeResult
    scope_texts: Sequence[str]


class Reply:
    """The fields that a face adds to the answer of one request. The base class adds no fields.

    The server calls the methods in a thread, one at a time. Each method returns JSON, and is
    allowed to block. An error in a method fails the request. Therefore a method reports missing
    data as a field's value.
    """

    def choice(self, number: int, of: int, completion: CompletionOutput) -> Mapping[str, object]:
        """Fields of a choice that has ended. The Answer calls this one time for each choice, in the
        order in which the choices end.

        In a stream, the chunk with `finish_reason` has these fields.

        Args:
            number: the choice's index.
            of: number of choices in the answer: `n` for each prompt.
            completion: the completion, with the attributes that the face's decorator has set.
        """
        return {}

    def whole(self) -> Mapping[str, object]:
        """Fields of the whole response. The Answer calls this after the last call of `choice`.

        In a stream, the chunk that ends the last choice has these fields.
        """
        return {}


class FirstReply(Reply):
    """Adds one field, `name`. The response has the first choice's value. If there are several
    choices, each choice also has its own value."""

    name: str

    def __init__(self) -> None:
        self._first: Json = {}

    def value(self, completion: CompletionOutput) -> object:
        """The field's value for one completion, as JSON; None if the completion has no value."""
        raise NotImplementedError

    def choice(self, number: int, of: int, completion: CompletionOutput) -> Json:
        value = self.value(completion)
        found = {} if value is None else {self.name: value}
        if number == 0:
            self._first = found
        return found if of > 1 else {}

    def whole(self) -> Json:
        return self._first


#: (values of the face's keys, a Keep for files) -> Reply. The server calls this before the request
#: enters the engine. Raises SpecError for values that are possible offline only. The face's
#: translator refuses all other wrong values.
Begin = Callable[[Mapping[str, object], Keep], Reply]


@dataclass(frozen=True)
class HttpFace:
    """A face over HTTP: its keys, its Reply to a request, and its routes.

    Attributes:
        keys: the keys of `vllm_xargs` that the face's translator accepts. A value is a number, a
            string (also JSON text), or a list of numbers and strings.
        fields: the keys that can also be fields of the body, with any JSON as value.
        begin: makes the Reply to a request that has some of the keys.
        reading: routers for every client with the API key. Each router has its own prefix below
            /v1, where vLLM authenticates.
        changing: routers for the operator, added only if the server has an operator's key.
        bearer: True if the routes of `changing` also accept the operator's key as the bearer token.
    """

    name: str
    keys: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()
    begin: Begin = lambda values, keep: Reply()
    reading: tuple[APIRouter, ...] = ()
    changing: tuple[APIRouter, ...] = ()
    bearer: bool = False

    def __post_init__(self) -> None:
        if not self.fields <= self.keys:
            raise ValueError(f"{self.name} has fields that are not among its keys.")
        for router in (*self.reading, *self.changing):
            if not router.prefix.startswith("/v1/"):
                raise ValueError(f"{self.name} has a router at {router.prefix!r}, not below /v1/.")


_faces: dict[str, HttpFace] = {}


def register(face: HttpFace) -> None:
    """Add a face, which replaces a face of the same name. Call this before the app is created."""
    _faces[face.name] = face


def unregister(name: str) -> None:
    del _faces[name]


def registered() -> list[HttpFace]:
    return list(_faces.values())


def has_fields(body: Mapping[str, object]) -> bool:
    """True if a body has a field of a face."""
    return any(not face.fields.isdisjoint(body) for face in _faces.values())


@dataclass(frozen=True)
class Words:
    """The keys of faces in one request, and their values, by face.

    Attributes:
        fields: the keys that were fields of the request's body. The caller adds these keys to
            `vllm_xargs`.
    """

    values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    fields: Mapping[str, object] = field(default_factory=dict)

    @staticmethod
    def find(
        given: Mapping[str, object], body: Mapping[str, object] | None, foreign: Iterable[str]
    ) -> Words:
        """The keys of faces in a request.

        Args:
            given: the request's `vllm_xargs`.
            body: the fields of the request's body that vLLM does not know.
            foreign: keys that a face accepts offline.

        Raises:
            SpecError: the request has a key twice, or no face accepts a key over HTTP.
        """
        values: dict[str, Json] = {}
        fields: Json = {}
        left = given.keys() & set(foreign)
        for face in _faces.values():
            own = {key: given[key] for key in face.keys & given.keys()}
            beside = {key: body[key] for key in face.fields & body.keys()} if body else {}
            if twice := own.keys() & beside.keys():
                raise SpecError(
                    f"{shown(min(twice))} is both in vllm_xargs and in the body; leave one out."
                )
            left -= face.keys
            # Some clients send null for a field that they do not use.
            beside = {key: value for key, value in beside.items() if value is not None}
            if own or beside:
                values[face.name] = own | beside
                fields |= beside
        if left:
            raise SpecError(
                f"vllm_xargs has {shown(min(left))}, which is understood offline only; use "
                "'scope' (docs/http.md)."
            )
        return Words(values, fields)

    def begin(self, keep: Keep) -> list[Reply]:
        """The faces' Replies. Raises SpecError for values that are not possible over HTTP."""
        return [_faces[name].begin(values, keep) for name, values in self.values.items()]
