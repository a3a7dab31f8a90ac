"""The two clients: the same calls, sent by httpx with or without await.

Owns:  ScopeClient, AsyncScopeClient.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_scope.client.answers import Chunk
from vllm_scope.client.calls import Call, Calls, Events, Flow, Response, UnreachableError
from vllm_scope.errors import SpecError, shown

try:
    import httpx
except ImportError as error:
    raise ImportError("the client needs httpx: pip install 'vllm-scope[client]'.") from error

#: For an answer; a long prompt on a busy server takes a while.
TIMEOUT_S = 600.0


class _Client(Calls):
    """The server's address and keys, for both clients.

    Args:
        base_url: of the server, with or without /v1.
        api_key: as for vLLM's --api-key.
        admin_key: the server's VLLM_SCOPE_ADMIN_KEY, for calls that change the engine.
        model: one of the server's models; None: its first one.
        timeout: seconds for an answer.
        transport: an httpx transport, for tests and proxies.

    Raises:
        SpecError: base_url is not a URL.
    """

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        api_key: str | None = None,
        admin_key: str | None = None,
        model: str | None = None,
        timeout: float = TIMEOUT_S,
        transport: Any = None,
    ) -> None:
        super().__init__(model)
        self._admin_key = admin_key
        self._url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = self._open(
                base_url=self._url, headers=headers, timeout=timeout, transport=transport
            )
        except httpx.InvalidURL as error:
            raise SpecError(
                f"base_url is {shown(base_url)}; it is a URL such as http://localhost:8000 "
                f"({error})."
            ) from None

    def _open(self, **options: Any) -> Any:
        raise NotImplementedError

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raise httpx's connection errors as UnreachableError."""
        try:
            yield
        except httpx.RequestError as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise UnreachableError(f"no answer from {self._url}: {reason}.") from error

    def _request(self, call: Call) -> Any:
        headers = {}
        if call.admin and self._admin_key:
            headers["X-Scope-Admin-Key"] = self._admin_key
        return self._http.build_request(
            call.method, call.path, json=call.body, content=call.content, headers=headers
        )


def _came(response: Any, content: bytes) -> Response:
    return Response(response.status_code, content, response.headers.get("location"))


class ScopeClient(_Client):
    """A blocking client and context manager; `Calls` has its methods."""

    def _open(self, **options: Any) -> httpx.Client:
        return httpx.Client(**options)

    def _run(self, flow: Flow) -> Any:
        try:
            call = next(flow)
            while True:
                with self._reaching():
                    response = self._http.send(self._request(call))
                call = flow.send(_came(response, response.content))
        except StopIteration as done:
            return done.value

    def _iterate(self, opening: Flow) -> Iterator[Chunk]:
        call = self._run(opening)
        with self._reaching():
            response = self._http.send(self._request(call), stream=True)
        events = Events()
        try:
            with self._reaching():
                if not response.is_success:
                    _came(response, response.read()).checked()
                for data in response.iter_bytes():
                    for event in events.feed(data):
                        yield from self._run(self._chunks(event))
            events.check_done()
        finally:
            response.close()

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> ScopeClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncScopeClient(_Client):
    """The client for asyncio: answers are awaited, streams are for `async for`."""

    def _open(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(**options)

    async def _run(self, flow: Flow) -> Any:
        try:
            call = next(flow)
            while True:
                with self._reaching():
                    response = await self._http.send(self._request(call))
                call = flow.send(_came(response, response.content))
        except StopIteration as done:
            return done.value

    async def _iterate(self, opening: Flow) -> AsyncIterator[Chunk]:
        call = await self._run(opening)
        with self._reaching():
            response = await self._http.send(self._request(call), stream=True)
        events = Events()
        try:
            with self._reaching():
                if not response.is_success:
                    _came(response, await response.aread()).checked()
                async for data in response.aiter_bytes():
                    for event in events.feed(data):
                        for chunk in await self._run(self._chunks(event)):
                            yield chunk
            events.check_done()
        finally:
            await response.aclose()

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncScopeClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
