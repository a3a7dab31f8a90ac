"""The calls of both clients, in one form for the blocking client and for the asyncio client.

Owns:  Calls (requests, and the parsing of responses), SweepEvents, Method.
From:  messages.   To: transport, which sends a Call and returns the Response.

A flow is a generator that yields Calls, receives Responses, and returns the answer. Some flows need
several Calls, such as one Call for an answer, and one Call for the file with the answer's rows.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar, overload
from urllib.parse import quote

import msgspec

from vllm_scope.client import parsing
from vllm_scope.client.answers import Choice, Chunk, Completion, ScopeData
from vllm_scope.client.bodies import ResultBody
from vllm_scope.client.frames import Frame
from vllm_scope.client.messages import Call, Json, Response, decoded, event_body
from vllm_scope.client.parsing import T, converted
from vllm_scope.control.activity import Activity
from vllm_scope.errors import ScopeError, SpecError, shown
from vllm_scope.request.actions import EDITS, Action, Edit, Moments
from vllm_scope.request.read_features import ReadFeatures
from vllm_scope.request.spec import scope
from vllm_scope.sweeps import Cell, Sweep, SweepTable
from vllm_scope.sweeps.wire import AskedSweep, TableReader
from vllm_scope.vectors import SteeringModule, from_bytes, load_vectors, to_bytes

if TYPE_CHECKING:
    from vllm_scope.client.transport import AsyncScopeClient, ScopeClient

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Messages = Sequence[Mapping[str, object]]
Content = bytes | bytearray | memoryview
OnCell = Callable[[Cell], object]
#: The features that were read, by the index of a choice and by the name of a `Features`.
ReadBy = dict[int, dict[str, ReadFeatures]]
P = ParamSpec("P")
SelfT = TypeVar("SelfT")
StreamT = TypeVar("StreamT")
PartT = TypeVar("PartT", Choice, Chunk)


def sweep_call(prompts: object, sweep: Sweep) -> Call:
    """The Call that starts a sweep. Raises SpecError if `sweep` is not a Sweep, or if its source or
    its metric cannot be sent."""
    if not isinstance(sweep, Sweep):
        raise SpecError(
            f"the sweep is {shown(sweep)}; give the prompts and a Sweep, in this order."
        )
    several = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
    if several and all(isinstance(one, int) for one in several):
        several = [several]  # the token ids of one prompt
    return Call("POST", "/v1/scope/sweeps", AskedSweep(several, sweep, True).to_json())


class SweepEvents(TableReader):
    """Makes a sweep table from a stream of events."""

    def feed(self, event: Frame, on_cell: OnCell | None) -> None:
        """Add the cells of an event to the table, and call `on_cell` with each cell."""
        body = event_body(event)
        for cell in self.take(body) if body is not None else ():
            if on_cell is not None:
                on_cell(cell)

    def whole(self) -> SweepTable:
        """The table after the last event. Raises ScopeError if the server sent no table."""
        if self.table is None:
            raise ScopeError(
                "the server ended the sweep without a table, so the sweep has no result; look at "
                "the server's log, and send the sweep again."
            )
        return self.table


class _ModelBody(msgspec.Struct):
    """One of the server's models."""

    id: str


class _ChoiceBody(msgspec.Struct):
    """A choice of an answer or of a chunk, in the format of vLLM and vllm-scope."""

    index: int
    text: str | None = None
    message: Json | None = None
    delta: Json | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scope: Json | None = None


Flow = Generator[Call, Response, T]


class Method(Generic[P, T]):
    """Makes a method from a flow. The method of a ScopeClient returns the flow's result, and the
    method of an AsyncScopeClient returns an awaitable of the result."""

    def __init__(self, flow: Callable[Concatenate[SelfT, P], Flow[T]]) -> None:
        self._flow = flow

    @overload
    def __get__(self, client: ScopeClient, owner: object) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncScopeClient, owner: object) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, client: ScopeClient | AsyncScopeClient | None, owner: object) -> object:
        if client is None:
            return self._flow  # for help()
        flow = MethodType(self._flow, client)
        return wraps(flow)(lambda *args, **fields: client._run(flow(*args, **fields)))


class Calls(Generic[StreamT]):
    """The calls of both clients. A client implements `_run` for a flow and `_iterate` for a
    stream."""

    _model: str | None
    _binary: bool

    def _iterate(self, opening: Flow[Call]) -> StreamT:
        raise NotImplementedError

    # Completions

    @Method
    def complete(self, /, prompt: Prompt, *actions: Action, **fields: object) -> Flow[Completion]:
        """Complete a prompt, or a list of prompts.

        Args:
            prompt: a text or the token ids of one prompt, or a list of such prompts.
            actions: the request's actions, such as Read, Probe and Add. Without actions, the answer
                has only the text.
            fields: other fields of the request, such as max_tokens, temperature, n and vllm_xargs.
                Fields whose names begin with `scope_`, such as `scope_tensors="handle"`, are sent
                within `vllm_xargs`.

        Raises:
            SpecError: the request is wrong. CapacityError: the server has no room now.
            ServerError: the server refused the request for another reason, or failed.
            UnreachableError: the server did not answer. Every method can raise an UnreachableError.
        """
        if not isinstance(prompt, str | list | tuple):
            raise SpecError(
                f"the prompt is {shown(prompt)}; it must be a text or token ids, or a list of "
                "these."
            )
        return self._answered(prompt, actions, fields)

    @Method
    def chat(self, /, messages: Messages, *actions: Action, **fields: object) -> Flow[Completion]:
        """Answer a chat's messages. Arguments and errors are those of `complete`."""
        return self._answered(list(messages), actions, fields, chat=True)

    def stream(self, prompt: Prompt | Messages, *actions: Action, **fields: object) -> StreamT:
        """Complete a prompt, or a list of messages (dicts), chunk by chunk.

        Args:
            prompt, actions, fields: as for `complete`. With `scope_stream="rows"`, chunks also
                carry rows.

        Returns:
            An iterator of Chunks. If the iterator is closed, the request stops.
        """
        chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        return self._iterate(self._opening(prompt, actions, {"stream": True} | fields, chat))

    # The server

    @Method
    def info(self) -> Flow[Json]:
        """The JSON of GET /v1/scope, which has the model's sites and layers, and the limits."""
        return self._json(Call("GET", "/v1/scope"))

    @Method
    def result(self, result_id: str, delete: bool = False) -> Flow[ScopeData]:
        """The content of a result's file. The id is `scope.result.id` in the JSON of a choice."""
        return parsing.parse_file((yield _result_call(result_id, delete)).checked().content)

    @Method
    def modules(self) -> Flow[list[Json]]:
        """The steering modules that the engine holds."""
        return self._listed(Call("GET", "/v1/scope/modules"), "modules")

    @Method
    def put_module(self, name: str, module: SteeringModule | str | Path | Content) -> Flow[Json]:
        """Register a steering module. `module` is a SteeringModule, the path of a file, or the
        content of a safetensors file. The call needs the operator's key.

        Raises:
            SpecError: `module` is not a steering module. OSError: the file cannot be read.
        """
        if isinstance(module, bytes | bytearray | memoryview):
            content = bytes(module)
            from_bytes(content)  # raises SpecError before anything is sent
        else:
            found = module if isinstance(module, SteeringModule) else load_vectors(module)
            content = to_bytes(found)
        return self._json(Call("PUT", _module_path(name), content=content, admin=True))

    @Method
    def delete_module(self, name: str) -> Flow[None]:
        """Delete a steering module from the server. The call needs the operator's key."""
        return self._done(Call("DELETE", _module_path(name), admin=True))

    @Method
    def edits(self) -> Flow[list[Json]]:
        """The server-wide edits, which apply to every request."""
        return self._listed(Call("GET", "/v1/scope/edits"), "edits")

    @Method
    def set_edits(self, *actions: Action) -> Flow[Json]:
        """Replace the server-wide edits, for requests that enter from now on. The call
        needs the operator's key.

        Raises:
            SpecError: there is no action, or an action is not an edit.
        """
        for action in actions:
            if not isinstance(action, Edit):
                kinds = ", ".join(edit.__name__ for edit in EDITS.values())
                raise SpecError(
                    f"set_edits has {shown(action)}; each argument must be an edit ({kinds}). "
                    "Send other actions with a request."
                )
        if not actions:
            raise SpecError("set_edits has no edit; give at least one, or call clear_edits().")
        body = {"edits": json.loads(scope(*actions)["scope"])["edits"]}
        return self._json(Call("PUT", "/v1/scope/edits", body, admin=True))

    @Method
    def clear_edits(self) -> Flow[None]:
        """End all server-wide edits. The call needs the operator's key."""
        return self._done(Call("DELETE", "/v1/scope/edits", admin=True))

    @Method
    def monitors(self) -> Flow[Json]:
        """The monitors, by name. The call needs the operator's key."""
        return self._json(Call("GET", "/v1/scope/monitors", admin=True))

    @Method
    def set_monitors(self, monitors: Mapping[str, object]) -> Flow[Json]:
        """Replace all monitors. {} ends all monitors. The call needs the operator's key.

        Raises:
            SpecError: `monitors` is not a map from name to monitor, a name is not a text, or a
                monitor cannot be sent as JSON.
        """
        if not isinstance(monitors, Mapping):
            raise SpecError(
                f"monitors is {shown(monitors)}; it must be a dict from the name of each monitor "
                "to the monitor, such as {'risky': {'weight': [...], 'layers': [2], 'threshold': "
                "0.8}}."
            )
        bodies = dict(monitors)
        for name, monitor in bodies.items():
            if not isinstance(name, str):
                raise SpecError(f"monitors has the name {shown(name)}; it must be a text.")
            try:
                json.dumps(monitor, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise SpecError(
                    f"monitors[{name!r}] cannot be sent as JSON: {error}. Give a dict of numbers, "
                    "texts and lists; for an array or a tensor give weight.tolist()."
                ) from None
        return self._json(Call("PUT", "/v1/scope/monitors", {"monitors": bodies}, admin=True))

    @Method
    def activity(self) -> Flow[Activity]:
        """The findings of each monitor since the monitor was set, and the plugin's use of memory
        and files. The call needs the operator's key."""
        told = yield from self._json(Call("GET", "/v1/scope/monitors/activity", admin=True))
        return converted(told, Activity, "activity of monitors")

    # Flows

    def _opening(
        self, prompt: object, actions: Sequence[Action], fields: Json, chat: bool
    ) -> Flow[Call]:
        if self._model is None:
            models = yield from self._listed(Call("GET", "/v1/models"), "data")
            first = models[0] if models else None
            self._model = converted(first, _ModelBody, "list of models").id
        path, name = "/v1/completions", "prompt"
        if chat:
            path, name = "/v1/chat/completions", "messages"
        body = {"model": self._model, name: prompt} | fields
        xargs = msgspec.convert(body.pop("vllm_xargs", None) or {}, Json)
        for name in [name for name in body if name.startswith("scope_")]:
            # Also unknown names. The server finds a misspelt `scope_...` only in `vllm_xargs`.
            xargs[name] = body.pop(name)
        if actions:
            xargs |= scope(*actions)
        admin = any(isinstance(one, Moments) for one in actions)
        body |= {"vllm_xargs": xargs} if xargs else {}
        return Call("POST", path, body, admin=admin, binary=self._binary and bool(xargs))

    def _answered(
        self, prompt: object, actions: Sequence[Action], fields: Json, chat: bool = False
    ) -> Flow[Completion]:
        call = yield from self._opening(prompt, actions, fields, chat)
        response = (yield call).checked()
        frame = response.frame
        body = decoded(frame.answer or b"", response.status)
        return Completion(tuple((yield from self._parts(body, Choice, frame, {}))), body)

    def _chunks(self, event: Frame, read: ReadBy) -> Flow[list[Chunk]]:
        """The chunks of one event of a stream.

        Args:
            read: the features that were read (ReadBy), as far as earlier events have named them.
                The caller passes the same dict for all events of a stream, and `_chunks` adds the
                features that this event names.
        """
        body = event_body(event)
        return [] if body is None else (yield from self._parts(body, Chunk, event, read))

    def _parts(
        self, body: Json, kind: type[PartT], frame: Frame, read: ReadBy
    ) -> Flow[list[PartT]]:
        parts = []
        for choice in converted(body.get("choices", []), list[_ChoiceBody], "answer"):
            found, told = None, choice.scope or {}
            if choice.scope is not None:
                file = None
                if (result := told.get("result")) is not None:
                    result_id = converted(result, ResultBody, "scope").id
                    file = (yield _result_call(result_id, True)).checked().content
                of_choice, known = frame.of_choice(choice.index), read.setdefault(choice.index, {})
                if choice.finish_reason is not None:
                    # A request without actions has no rows that can be missing. Its scope has only
                    # verdicts of monitors, and no status.
                    done = "aborted" if choice.finish_reason == "abort" else "complete"
                    told = {"status": done} | told
                found = parsing.parse_scope(told, file, of_choice, known)
            said = choice.message or choice.delta
            text = str((choice.text if said is None else said.get("content")) or "")
            end, tokens = choice.finish_reason, parsing.parse_tokens(told)
            parts.append(kind(choice.index, text, end, found, tokens, choice.stop_reason))
        return parts

    def _json(self, call: Call) -> Flow[Json]:
        return (yield call).checked().json()

    def _listed(self, call: Call, name: str) -> Flow[list[Json]]:
        body = (yield call).checked().json()
        return converted(body.get(name), list[Json], "answer")

    def _done(self, call: Call) -> Flow[None]:
        (yield call).checked()


def _result_call(result_id: str, delete: bool) -> Call:
    path = f"/v1/scope/results/{quote(result_id, safe='')}"
    return Call("GET", path + ("?delete=true" if delete else ""))


def _module_path(name: str) -> str:
    if not name:
        raise SpecError(f"a module's name is 1 character or more, not {shown(name)}.")
    if name in (".", ".."):  # httpx resolves both names even if they are quoted
        raise SpecError(f"no module over HTTP is called {shown(name)}; take another name.")
    return f"/v1/scope/modules/{quote(name, safe='')}"
