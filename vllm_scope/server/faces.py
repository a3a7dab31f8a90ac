"""Faces over HTTP: which words of a request are theirs, and what its answer gains.

Owns:  HttpFace (what a face registers), Reply (what it does for one answer), Words.
Runs:  in each API server process, on its event loop.
From:  faces.   To: engine.http (requests), answer (answers), routes (routers).

Promise: a word belongs to one face. A request says it once, and gets what it asks for or
a refusal: a word that no face answers for over HTTP is never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vllm_scope.errors import SpecError, shown
from vllm_scope.server.store import Kept

if TYPE_CHECKING:
    from fastapi import APIRouter

#: Keeps tensors and metadata as a file that the asker can fetch; blocks. Raises
#: CapacityError where there is no room.
Keep = Callable[[Mapping[str, Tensor], Mapping[str, str]], Kept]


class Reply:
    """What a face adds to the answer of one request; this one adds nothing.

    The methods run in a thread, one at a time, and may block. What they return is JSON.
    An error in them fails the request, so what could not be delivered is a field's value.
    """

    def choice(self, number: int, of: int, completion: Any) -> Mapping[str, Any]:
        """Fields of a choice that has ended. Called once for each, in the order of ends.

        In a stream they come with the chunk that has `finish_reason`.

        Args:
            number: the choice's index.
            of: how many choices the answer has: n for each prompt.
            completion: what offline users have as `output.outputs[i]`: its `scope` is the
                ScopeResult, and what the face's decorator gave it is there too.
        """
        return {}

    def whole(self) -> Mapping[str, Any]:
        """Fields of the whole response, after the last choice's.

        In a stream they come with the chunk that ends the last choice.
        """
        return {}


#: (values of the face's words, how to keep files) -> Reply. Called before the engine is
#: asked; raises SpecError for values that only HTTP cannot give. All else is refused by
#: the face's translator, as it is offline.
Begin = Callable[[Mapping[str, Any], Keep], Reply]


@dataclass(frozen=True)
class HttpFace:
    """What a face does over HTTP.

    Attributes:
        keys: of `vllm_xargs`, which its translator understands; numbers, strings (of
            JSON, say) and lists of them.
        fields: those of the keys that may be fields of the body instead, of any JSON.
        begin: makes the Reply to a request that has some of the keys.
        reading: routers for everyone with the API key. Below /v1, as vLLM's
            authentication is there, and each with a prefix of its own.
        changing: routers for the operator; they do not exist without the operator's key.
        bearer: the operator's key may also come as the bearer, to `changing` alone.
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
    """Before the app is made; the same name again replaces it."""
    _faces[face.name] = face


def unregister(name: str) -> None:
    del _faces[name]


def registered() -> list[HttpFace]:
    return list(_faces.values())


def has_fields(body: Mapping[str, Any]) -> bool:
    """Whether some of a body's fields are a face's."""
    return any(not face.fields.isdisjoint(body) for face in _faces.values())


@dataclass(frozen=True)
class Words:
    """The faces' words in one request, by face.

    Attributes:
        fields: those that stood beside `vllm_xargs`; they are to be moved into it.
    """

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def find(
        given: Mapping[str, Any], body: Mapping[str, Any] | None, foreign: Iterable[str]
    ) -> Words:
        """The words of a request.

        Args:
            given: its `vllm_xargs`.
            body: its fields that vLLM does not know.
            foreign: keys that some face understands offline.

        Raises:
            SpecError: a word is said twice, or is not understood over HTTP.
        """
        values: dict[str, dict[str, Any]] = {}
        fields: dict[str, Any] = {}
        left = given.keys() & set(foreign)
        for face in _faces.values():
            own = {key: given[key] for key in face.keys & given.keys()}
            beside = {key: body[key] for key in face.fields & body.keys()} if body else {}
            if twice := own.keys() & beside.keys():
                raise SpecError(
                    f"{shown(min(twice))} is both in vllm_xargs and beside it; say it once."
                )
            left -= face.keys
            # What clients send for "not asked".
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
        """Raises SpecError for what cannot be over HTTP."""
        return [_faces[name].begin(values, keep) for name, values in self.values.items()]
