"""The two clients, which use httpx to send the same calls, in a blocking way or with `await`.

Owns:  ScopeClient, AsyncScopeClient, Events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from typing import Generic, TypeVar

from vllm_scope.client.answers import Chunk
from vllm_scope.client.calls import Calls, Flow, OnCell, ReadBy, StreamT, SweepEvents, sweep_call
from vllm_scope.client.frames import Frame, Frames
from vllm_scope.client.messages import Call, Response, ServerError, UnreachableError
from vllm_scope.client.parsing import T
from vllm_scope.errors import SpecError, reason_of, shown
from vllm_scope.request.media import BINARY
from vllm_scope.sweeps import Sweep, SweepTable

try:
    import httpx
except ImportError as error:
    raise ImportError("the client needs httpx: pip install 'vllm-scope[client]'.") from error

#: Seconds to wait for the next bytes. A long prompt on a busy server takes a long time.
TIMEOUT_S = 600.0
HttpT = TypeVar("HttpT", httpx.Client, httpx.AsyncClient)


class Events:
    """Makes server-sent events from the bytes of a stream. Lines end only at LF, because JSON can
    contain the other characters at which `str.splitlines` ends a line.

    Attributes:
        done: True if the server has sent its last event.
    """

    def __init__(self) -> None:
        self.done = False
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes of the stream; return the events of the lines that are complete now."""
        if b"\n" not in data:  # the parts of a long line are joined at the line's end
            self._rest.append(data)
            return []
        *lines, rest = b"".join([*self._rest, data]).split(b"\n")
        self._rest = [rest]
        found = []
        for line in lines:
            if line.startswith(b"data:"):
                found.append(Frame(line.removeprefix(b"data:").strip(), {}))
                self.done |= found[-1].answer == b"[DONE]"
        return found


def _check_done(events: Events | Frames) -> None:
    """Raises ServerError if the stream ended before the last event."""
    if not events.done:
        raise ServerError("the stream ended before the answer did; send the request again.", 200)


class _Client(Calls[StreamT], Generic[HttpT, StreamT]):
    """The common part of both clients: the server's address and keys, and the building of requests.
    The subclasses send the requests.

    Args:
        base_url: the server's URL, with or without /v1.
        api_key: the key of vLLM's --api-key.
        admin_key: the server's VLLM_SCOPE_ADMIN_KEY, for calls that need the operator's key.
        model: one of the server's models; None for the server's first model.
        timeout: how many seconds the client waits for a connection, or for the server's next bytes.
        binary: True to request binary answers. If an answer has rows, a binary answer costs the
            server only a fraction of the CPU time that a JSON answer costs.
        transport: an httpx transport, for tests and proxies.

    Raises:
        SpecError: base_url is not a URL, or a key has characters that an HTTP header cannot have.
    """

    _open: Callable[..., HttpT]

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        api_key: str | None = None,
        admin_key: str | None = None,
        model: str | None = None,
        timeout: float = TIMEOUT_S,
        transport: httpx.BaseTransport | httpx.AsyncBaseTransport | None = None,
        binary: bool = True,
    ) -> None:
        self._model, self._admin_key, self._binary = model, admin_key, binary
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise SpecError(
                f"base_url is {shown(base_url)}; it must be a URL with http:// or https://, such "
                "as http://localhost:8000."
            )
        for name, key in (("api_key", api_key), ("admin_key", admin_key)):
            _check_key(key, name)
        self._url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http: HttpT = self._open(
                base_url=self._url, headers=headers, timeout=timeout, transport=transport
            )
        except httpx.InvalidURL as error:
            raise SpecError(
                f"base_url is {shown(base_url)}; it must be a URL such as http://localhost:8000 "
                f"({error})."
            ) from None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raise httpx's connection errors as UnreachableError. httpx parses the address of a
        redirect before it returns the response. If the address is no URL, httpx's error also
        becomes an UnreachableError."""
        try:
            yield
        except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise UnreachableError(f"no answer from {self._url}: {reason}.") from error

    def _request(self, call: Call) -> httpx.Request:
        # Servers without vllm-scope, or with an older version, ignore this header.
        headers = {"Accept": f"{BINARY}, */*;q=0.5"} if call.binary else {}
        if call.admin and self._admin_key:
            headers["X-Scope-Admin-Key"] = self._admin_key
        try:
            made: httpx.Request = self._http.build_request(
                call.method, call.path, json=call.body, content=call.content, headers=headers
            )
        except ValueError as error:
            raise SpecError(
                f"the request cannot be sent as JSON: {reason_of(error)}. Texts must be Unicode "
                "without halves of surrogate pairs, and numbers must be finite."
            ) from None
        return made


def _check_key(key: object, name: str) -> None:
    """Raises SpecError if an HTTP header cannot have this key. httpx's error would show the key."""
    if key is None:
        return
    if not isinstance(key, str) or not key.isascii() or not key.isprintable() or key != key.strip():
        raise SpecError(
            f"{name} must be a string of printable ASCII characters, without a line end or a space "
            "at an end."
        )


def _came(response: httpx.Response, content: bytes) -> Response:
    location = response.headers.get("location")
    return Response(response.status_code, content, location, _kind(response))


def _kind(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


def _events(response: httpx.Response) -> Events | Frames:
    return Frames() if _kind(response) == BINARY else Events()


class ScopeClient(_Client[httpx.Client, Iterator[Chunk]]):
    """A blocking client, which is also a context manager. The class `Calls` has most of the
    client's methods."""

    _open = httpx.Client

    def _run(self, flow: Flow[T]) -> T:
        try:
            call = next(flow)
            while True:
                with self._reaching():
                    response = self._http.send(self._request(call))
                call = flow.send(_came(response, response.content))
        except StopIteration as done:
            value: T = done.value
            return value

    def _iterate(self, opening: Flow[Call]) -> Iterator[Chunk]:
        read: ReadBy = {}
        with closing(self._events(self._run(opening))) as events:
            for event in events:
                yield from self._run(self._chunks(event, read))

    def sweep(self, prompts: object, sweep: Sweep, *, on_cell: OnCell | None = None) -> SweepTable:
        """Run a sweep on the server; returns the same table as `vllm_scope.sweep`.

        Args:
            prompts: a text or the token ids of one prompt, or a list of such prompts.
            on_cell: a function that the client calls with each Cell when the Cell arrives. If the
                function raises an error, the server ends the sweep.

        Raises:
            SpecError: the sweep is not possible on the server. CapacityError: the server has no
                room for the sweep now.
        """
        found = SweepEvents()
        with closing(self._events(sweep_call(prompts, sweep))) as events:
            for event in events:
                found.feed(event, on_cell)
        return found.whole()

    def _events(self, call: Call) -> Generator[Frame, None, None]:
        """The events of a stream. If the generator is closed before its end, the request ends."""
        with self._reaching():
            response = self._http.send(self._request(call), stream=True)
        events = _events(response)
        try:
            with self._reaching():
                if not response.is_success:
                    _came(response, response.read()).checked()
                for data in response.iter_bytes():
                    yield from events.feed(data)
            _check_done(events)
        finally:
            response.close()

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> ScopeClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncScopeClient(_Client[httpx.AsyncClient, AsyncIterator[Chunk]]):
    """The client for asyncio: calls are awaited, and streams are read with `async for`."""

    _open = httpx.AsyncClient

    async def _run(self, flow: Flow[T]) -> T:
        try:
            call = next(flow)
            while True:
                with self._reaching():
                    response = await self._http.send(self._request(call))
                call = flow.send(_came(response, response.content))
        except StopIteration as done:
            value: T = done.value
            return value

    async def _iterate(self, opening: Flow[Call]) -> AsyncIterator[Chunk]:
        read: ReadBy = {}
        async with aclosing(self._events(await self._run(opening))) as events:
            async for event in events:
                for chunk in await self._run(self._chunks(event, read)):
                    yield chunk

    async def sweep(
        self, prompts: object, sweep: Sweep, *, on_cell: OnCell | None = None
    ) -> SweepTable:
        """As ScopeClient.sweep."""
        found = SweepEvents()
        async with aclosing(self._events(sweep_call(prompts, sweep))) as events:
            async for event in events:
                found.feed(event, on_cell)
        return found.whole()

    async def _events(self, call: Call) -> AsyncGenerator[Frame, None]:
        """As ScopeClient._events."""
        with self._reaching():
            response = await self._http.send(self._request(call), stream=True)
        events = _events(response)
        try:
            with self._reaching():
                if not response.is_success:
                    _came(response, await response.aread()).checked()
                async for data in response.aiter_bytes():
                    for event in events.feed(data):
                        yield event
            _check_done(events)
        finally:
            await response.aclose()

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncScopeClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
