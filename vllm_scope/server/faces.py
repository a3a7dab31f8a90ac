"""Faces over HTTP: the words of requests that a face takes, and the fields of answers that it adds.

Owns:  HttpFace (what a face registers), Reply (its fields of one answer), Words,
       CompletionOutput.
Runs:  in each API server process, on its event loop.
From:  compat.   To: engine.http (requests), answer (answers), routes (routers).

Promise: a word belongs to one face, and a request may have it once. A word that no face
understands over HTTP is refused, never ignored.
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


#: Keeps tensors and metadata as a file that the request's key can fetch. Blocks. Raises
#: CapacityError if there is no room.
Keep = Callable[[Mapping[str, Tensor], Mapping[str, str]], Kept]


class CompletionOutput(Protocol):
    """vLLM's CompletionOutput, as offline users have it: `output.outputs[i]`.

    Attributes:
        scope_texts: the text that each generated token added.
    """

    index: int
    text: str
    finish_reason: str | None
    scope: ScopeResult
    scope_texts: Sequence[str]


class Reply:
    """The fields that a face adds to the answer of one request; the base class adds none.

    The methods run in a thread, one at a time, and may block. They return JSON. An error in
    a method fails the request, so a method reports missing data as a field's value.
    """

    def choice(self, number: int, of: int, completion: CompletionOutput) -> Mapping[str, object]:
        """Fields of a choice that has ended. Called once for each choice, in the order in which
        they end.

        In a stream they come with the chunk that has `finish_reason`.

        Args:
            number: the choice's index.
            of: how many choices the answer has: n for each prompt.
            completion: with the attributes that the decorator of the face's translation has set.
        """
        return {}

    def whole(self) -> Mapping[str, object]:
        """Fields of the whole response. Called after `choice` was called for the last choice.

        In a stream they come with the chunk that ends the last choice.
        """
        return {}


class FirstReply(Reply):
    """Adds one field, `name`. The response has the value of its first choice. If there are several
    choices, each choice also has its own value."""

    name: str

    def __init__(self) -> None:
        self._first: Json = {}

    def value(self, completion: CompletionOutput) -> object:
        """The field of one completion as JSON; None if the completion has none."""
        raise NotImplementedError

    def choice(self, number: int, of: int, completion: CompletionOutput) -> Json:
        value = self.value(completion)
        found = {} if value is None else {self.name: value}
        if number == 0:
            self._first = found
        return found if of > 1 else {}

    def whole(self) -> Json:
        return self._first


#: (values of the face's words, a Keep for files) -> Reply. Called before the request enters the
#: engine. Raises SpecError for values that are possible offline only; the face's translator
#: refuses all other wrong values.
Begin = Callable[[Mapping[str, object], Keep], Reply]


@dataclass(frozen=True)
class HttpFace:
    """A face over HTTP: its keys, its Reply to a request, and its routes.

    Attributes:
        keys: the keys of `vllm_xargs` that the face's translator understands. Their values are
            numbers, strings (also JSON text) and lists of these.
        fields: keys that may also be fields of the body, with any JSON as value.
        begin: makes the Reply to a request that has some of the keys.
        reading: routers for everyone with the API key. Each has a prefix of its own below /v1,
            where vLLM authenticates.
        changing: routers for the operator; they exist only if there is an operator's key.
        bearer: True if the operator's key for `changing` may also be the bearer token.
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
    """Add a face, which replaces a face of the same name. Called before the app is made."""
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
    """The faces' words in one request, by face.

    Attributes:
        fields: the words that stood beside `vllm_xargs`; the caller adds them to `vllm_xargs`.
    """

    values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    fields: Mapping[str, object] = field(default_factory=dict)

    @staticmethod
    def find(
        given: Mapping[str, object], body: Mapping[str, object] | None, foreign: Iterable[str]
    ) -> Words:
        """The words of a request.

        Args:
            given: the request's `vllm_xargs`.
            body: the fields of the request's body that vLLM does not know.
            foreign: keys that some face understands offline.

        Raises:
            SpecError: a word comes twice, or is not understood over HTTP.
        """
        values: dict[str, Json] = {}
        fields: Json = {}
        left = given.keys() & set(foreign)
        for face in _faces.values():
            own = {key: given[key] for key in face.keys & given.keys()}
            beside = {key: body[key] for key in face.fields & body.keys()} if body else {}
            if twice := own.keys() & beside.keys():
                raise SpecError(
                    f"{shown(min(twice))} is both in vllm_xargs and beside it; say it once."
                )
            left -= face.keys
            # Clients send null for "not asked".
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
