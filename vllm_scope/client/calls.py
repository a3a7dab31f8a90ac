"""Every call of a client, written once, for both transports.

Owns:  Calls (requests, and the parsing of responses), Call, Response, ServerError,
       UnreachableError.
To:    transport, which sends a Call and returns the Response.

A flow is a generator that yields Calls, receives Responses, and returns the answer. It may need
several Calls, such as one for an answer and one for the file with its rows.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vllm_scope.client.answers import (
    Choice,
    Chunk,
    Completion,
    ScopeData,
    parse_file,
    parse_scope,
    parse_tokens,
)
from vllm_scope.errors import CapacityError, ScopeError, SpecError, shown
from vllm_scope.request.actions import Action
from vllm_scope.request.spec import scope
from vllm_scope.vectors import SteeringModule, from_bytes, load_vectors, to_bytes

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Content = bytes | bytearray | memoryview


class ServerError(ScopeError):
    """The server refused the request, or failed. `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(ScopeError):
    """The server did not answer, or stopped in the middle: no connection, a timeout, no HTTP.
    The cause is httpx's error."""


@dataclass(frozen=True)
class Call:
    """One HTTP request. `admin`: with the operator's key."""

    method: str
    path: str
    body: Any = None
    content: bytes | None = None
    admin: bool = False


@dataclass(frozen=True)
class Response:
    """A transport's response. `location`: of a redirect."""

    status: int
    content: bytes
    location: str | None = None

    def checked(self) -> Response:
        """The response itself.

        Raises:
            SpecError: status 400. CapacityError: 429. ServerError: any other that is not 2xx.
        """
        if 200 <= self.status < 300:
            return self
        if self.location is not None:
            raise ServerError(
                f"HTTP {self.status}: it is at {shown(self.location)}; give the server's own URL, "
                "as keys are not sent on.", self.status,
            )  # fmt: skip
        message = error_message(self.content)
        if self.status == 400:
            raise SpecError(message)
        if self.status == 429:
            raise CapacityError(message)
        raise ServerError(f"HTTP {self.status}: {message}", self.status)

    def json(self) -> Any:
        """The parsed content. Raises ServerError if it is not JSON, such as a proxy's page."""
        return _decoded(self.content, self.status)


def error_message(content: bytes) -> str:
    """The sentence of an error's body in any of vLLM's shapes."""
    try:
        body = json.loads(content)
        error = body.get("error", body.get("detail", body))
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, AttributeError, KeyError):
        return content[:200].decode("utf-8", "replace") or "no reason was given"


def _decoded(content: bytes | str, status: int = 200) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        raise ServerError(f"the answer is no JSON but {shown(content[:200])}.", status) from None


class Events:
    """Server-sent events from the bytes of a stream. Not by `str.splitlines`, because JSON may
    contain other line ends than LF.

    Attributes:
        done: the server has sent its last event.
    """

    def __init__(self) -> None:
        self.done = False
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> list[str]:
        """The data of the lines that are complete now."""
        if b"\n" not in data:  # part of a long line, which is joined once
            self._rest.append(data)
            return []
        *lines, rest = b"".join([*self._rest, data]).split(b"\n")
        self._rest = [rest]
        found = []
        for line in lines:
            if line.startswith(b"data:"):
                found.append(line.removeprefix(b"data:").strip().decode("utf-8", "replace"))
                self.done |= found[-1] == "[DONE]"
        return found

    def check_done(self) -> None:
        """Raises ServerError if the stream ended before the last event."""
        if not self.done:
            raise ServerError("the stream ended before the answer did; send it again.", 200)


Flow = Generator[Call, Response, Any]


class Calls:
    """Base of both clients. They implement `_run` for a flow and `_iterate` for a stream.

    Args:
        model: one of the server's models; None: its first one.
    """

    def __init__(self, model: str | None) -> None:
        self._model = model

    def _run(self, flow: Flow) -> Any:
        raise NotImplementedError

    def _iterate(self, opening: Flow) -> Any:
        raise NotImplementedError

    # Completions

    def complete(self, prompt: Prompt, *actions: Action, **options: Any) -> Any:
        """Complete a prompt, or a list of prompts.

        Args:
            prompt: text or token ids, or a list of either.
            actions: Read, Probe, Add, ...; without actions only the text comes back.
            options: other fields of the request: max_tokens, temperature, n, vllm_xargs, ...;
                and `scope_tensors="handle"`.

        Returns:
            Completion

        Raises:
            SpecError: the request is wrong. CapacityError: send it again later.
            ServerError: the server refused for another reason.
            UnreachableError: the server did not answer. Every call may raise this.
        """
        return self._run(self._answered("/v1/completions", {"prompt": prompt} | options, actions))

    def chat(self, messages: Sequence[Any], *actions: Action, **options: Any) -> Any:
        """Answer messages, as `complete`."""
        body = {"messages": list(messages)} | options
        return self._run(self._answered("/v1/chat/completions", body, actions))

    def stream(self, prompt: Any, *actions: Action, **options: Any) -> Any:
        """Complete a prompt, or a list of messages (dicts), chunk by chunk.

        Args:
            prompt, actions, options: as for `complete`. With
                `vllm_xargs={"scope_stream": "rows"}` chunks carry rows as well.

        Returns:
            An iterator of Chunks; close it to stop the request.
        """
        chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        body = {("messages" if chat else "prompt"): prompt, "stream": True} | options
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return self._iterate(self._opening(path, body, actions))

    # The server

    def info(self) -> Any:
        """The model's sites and layers, and limits: the JSON of GET /v1/scope."""
        return self._run(self._json(Call("GET", "/v1/scope")))

    def result(self, result_id: str, delete: bool = False) -> Any:
        """ScopeData of a file; its id is in the JSON of a choice, `scope.result.id`."""
        return self._run(self._fetched(result_id, delete))

    def modules(self) -> Any:
        """The steering modules that the engine holds: a list of dicts."""
        return self._run(self._json(Call("GET", "/v1/scope/modules"), "modules"))

    def put_module(self, name: str, module: SteeringModule | str | Path | Content) -> Any:
        """Register a steering module: itself, a file, or the content of a safetensors file.
        Needs the operator's key.

        Raises:
            SpecError: it is not a module. OSError: the file cannot be read.
        """
        if isinstance(module, bytes | bytearray | memoryview):
            content = bytes(module)
            from_bytes(content)  # raises SpecError before anything is sent
        else:
            found = module if isinstance(module, SteeringModule) else load_vectors(module)
            content = to_bytes(found)
        call = Call("PUT", _module_path(name), content=content, admin=True)
        return self._run(self._json(call))

    def delete_module(self, name: str) -> Any:
        """Forget a steering module. Needs the operator's key."""
        return self._run(self._done(Call("DELETE", _module_path(name), admin=True)))

    def edits(self) -> Any:
        """The edits of every request: a list of dicts."""
        return self._run(self._json(Call("GET", "/v1/scope/edits"), "edits"))

    def set_edits(self, *actions: Action) -> Any:
        """Edit every request from now on. Needs the operator's key."""
        body = {"edits": json.loads(scope(*actions)["scope"]).get("edits", [])}
        return self._run(self._json(Call("PUT", "/v1/scope/edits", body, admin=True)))

    def clear_edits(self) -> Any:
        """End all server-wide edits. Needs the operator's key."""
        return self._run(self._done(Call("DELETE", "/v1/scope/edits", admin=True)))

    # Flows

    def _opening(self, path: str, body: dict[str, Any], actions: Sequence[Action]) -> Flow:
        if self._model is None:
            self._model = (yield Call("GET", "/v1/models")).checked().json()["data"][0]["id"]
        body = {"model": self._model} | body
        xargs = dict(body.get("vllm_xargs") or {})
        if "scope_tensors" in body:
            xargs["scope_tensors"] = body.pop("scope_tensors")
        if actions:
            xargs |= scope(*actions)
        return Call("POST", path, body | ({"vllm_xargs": xargs} if xargs else {}))

    def _answered(self, path: str, body: dict[str, Any], actions: Sequence[Action]) -> Flow:
        call = yield from self._opening(path, body, actions)
        raw = (yield call).checked().json()
        choices = []
        for choice in raw["choices"]:
            found = yield from self._scope_of(choice)
            tokens = parse_tokens(choice.get("scope") or {})
            end = choice["finish_reason"]
            choices.append(Choice(choice["index"], _text(choice), end, found, tokens))
        return Completion(tuple(choices), raw)

    def _scope_of(self, choice: dict[str, Any]) -> Flow:
        body = choice.get("scope")
        if body is None:
            return None
        file = None
        if body.get("result"):
            file = (yield _result_call(body["result"]["id"], True)).checked().content
        return parse_scope(body, file)

    def _chunks(self, event: str) -> Flow:
        """The chunks of one event of a stream."""
        if not event.startswith("{"):
            return []
        body = _decoded(event)
        if "error" in body:
            error = body["error"]
            code = error.get("code") if isinstance(error, dict) else None
            status = code if isinstance(code, int) and code >= 400 else 500
            Response(status, event.encode()).checked()
        chunks = []
        for choice in body.get("choices", ()):
            found = yield from self._scope_of(choice)
            end = choice.get("finish_reason")
            tokens = parse_tokens(choice.get("scope") or {})
            chunks.append(Chunk(choice["index"], _text(choice), end, found, tokens))
        return chunks

    def _fetched(self, result_id: str, delete: bool) -> Generator[Call, Response, ScopeData]:
        return parse_file((yield _result_call(result_id, delete)).checked().content)

    def _json(self, call: Call, name: str | None = None) -> Flow:
        body = (yield call).checked().json()
        return body if name is None else body[name]

    def _done(self, call: Call) -> Flow:
        (yield call).checked()


def _result_call(result_id: str, delete: bool) -> Call:
    path = f"/v1/scope/results/{quote(result_id, safe='')}"
    return Call("GET", path + ("?delete=true" if delete else ""))


def _module_path(name: str) -> str:
    if not name:
        raise SpecError(f"a module's name is 1 character or more, not {shown(name)}.")
    if name in (".", ".."):  # quoting does not keep httpx from resolving them
        raise SpecError(f"no module over HTTP is called {shown(name)}; take another name.")
    return f"/v1/scope/modules/{quote(name, safe='')}"


def _text(choice: dict[str, Any]) -> str:
    body = choice.get("message") or choice.get("delta")
    return (body.get("content") if body is not None else choice.get("text")) or ""
