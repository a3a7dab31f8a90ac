"""The keys of faces in HTTP requests, and the fields of faces in HTTP answers.

Owns:  HttpFace (the registration of a face), Reply (a face's fields of one answer), Words (the keys
       of faces in one request), CompletionOutput.
Runs:  in each API server process, on its event loop.
From:  compat.   To: engine.http (requests), answer (answers), routes (routers).

Promise: a key belongs to one face, and a request can have a key only one time. If the `vllm_xargs`
of a request have a key that faces accept only offline, the request is refused.
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


#: A function that keeps tensors and metadata as a file. Requests with the same API key can fetch
#: the file. The function blocks, and raises CapacityError if the store has no room.
Keep = Callable[[Mapping[str, Tensor], Mapping[str, str]], Kept]


class CompletionOutput(Protocol):
    """The CompletionOutput of vLLM, with the attributes that this package adds. Offline,
    `output.outputs[i]` is a CompletionOutput.

    Attributes:
        scope_texts: for each generated token, the text that the token added to `text`.
    """

    index: int
    text: str
    finish_reason: str | None
    scope: ScopeResult
    scope_texts: Sequence[str]


class Reply:
    """The fields that a face adds to the answer of one request. The methods of this base class add
    no fields.

    The server calls the methods in a thread, one at a time. Each method returns JSON, and is
    allowed to block. If a method raises an error, the whole request fails. Therefore a method does
    not raise an error for missing data, but reports the missing data as the value of a field.
    """

    def choice(self, number: int, of: int, completion: CompletionOutput) -> Mapping[str, object]:
        """Fields of a choice that has ended. The Answer calls this method one time for each choice,
        in the order in which the choices end.

        In a stream, the returned fields are in the chunk that has `finish_reason`.

        Args:
            number: the choice's index.
            of: number of choices in the answer, which is `n` times the number of prompts.
            completion: the completion, with the attributes that the decorator of the face's
                Translation (engine.frontend.translators) has set.
        """
        return {}

    def whole(self) -> Mapping[str, object]:
        """Fields of the whole response. The Answer calls this method after the last call of
        `choice`.

        In a stream, the returned fields are in the chunk that ends the last choice.
        """
        return {}


class FirstReply(Reply):
    """Adds one field, whose name is `name`. In the response, the field has the first choice's
    value. If there are several choices, each choice also has the field, with its own value."""

    name: str

    def __init__(self) -> None:
        self._first: Json = {}

    def value(self, completion: CompletionOutput) -> object:
        """The field's value for one completion, as JSON. If None, the field is left out."""
        raise NotImplementedError

    def choice(self, number: int, of: int, completion: CompletionOutput) -> Json:
        value = self.value(completion)
        found = {} if value is None else {self.name: value}
        if number == 0:
            self._first = found
        return found if of > 1 else {}

    def whole(self) -> Json:
        return self._first


#: A function that makes a Reply from the values of the face's keys and a Keep for files. The server
#: calls the function before the request enters the engine. The function raises SpecError for values
#: that are possible only offline. The face's translator refuses all other wrong values.
Begin = Callable[[Mapping[str, object], Keep], Reply]


@dataclass(frozen=True)
class HttpFace:
    """The keys of a face over HTTP, the face's Reply to a request, and the face's routes.

    Attributes:
        keys: the keys of `vllm_xargs` that the face's translator accepts. The value of a key is a
            number, a string (also JSON text), or a list of numbers and strings.
        fields: the keys that can also be fields of the request's body, with any JSON as value.
        begin: a function that makes the Reply to a request that has some of the keys.
        reading: routers of routes for every client that has the API key. Each router has its own
            prefix below /v1, where vLLM checks the API key.
        changing: routers of routes for the operator. The routes exist only if the server has an
            operator's key.
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
    """Add a face, which replaces a face of the same name. Call `register` before the app is
    created."""
    _faces[face.name] = face


def unregister(name: str) -> None:
    del _faces[name]


def registered() -> list[HttpFace]:
    return list(_faces.values())


def has_fields(body: Mapping[str, object]) -> bool:
    """True if the body of a request has a field that belongs to a face."""
    return any(not face.fields.isdisjoint(body) for face in _faces.values())


@dataclass(frozen=True)
class Words:
    """The keys of faces in one request, with the values of the keys, grouped by face.

    Attributes:
        fields: the keys that were fields of the request's body. The caller of `find` adds the keys
            in `fields` to `vllm_xargs`.
    """

    values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    fields: Mapping[str, object] = field(default_factory=dict)

    @staticmethod
    def find(
        given: Mapping[str, object], body: Mapping[str, object] | None, foreign: Iterable[str]
    ) -> Words:
        """Find the keys of faces in a request.

        Args:
            given: the request's `vllm_xargs`.
            body: the fields of the request's body that vLLM does not know.
            foreign: keys that faces accept offline.

        Raises:
            SpecError: the request has a key twice, or a key that faces accept only offline.
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
