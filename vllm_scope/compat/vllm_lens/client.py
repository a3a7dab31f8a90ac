"""VLLMLensClient: vllm-lens's client of a server, on httpx.

    from vllm_scope.compat.vllm_lens.client import VLLMLensClient
    client = VLLMLensClient("http://localhost:8000")
    out = client.generate("Hello", max_tokens=10, capture_layers=[15])
    out.activations["residual_stream"]

Needs no vLLM, and torch only for tensors. What the server refuses is raised as what it is:
SpecError for a wrong request, and any other error as a ServerError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from vllm_scope.client.calls import Response
from vllm_scope.compat.vllm_lens.model import NO_HOOKS
from vllm_scope.errors import SpecError

try:
    import httpx
except ImportError as error:
    raise ImportError("the client needs httpx: pip install 'vllm-scope[client]'.") from error

if TYPE_CHECKING:
    from vllm_scope.compat.vllm_lens.steering import SteeringVector


@dataclass
class GenerateOutput:
    """What one request gave.

    Attributes:
        text: of the first choice.
        activations: {"residual_stream": [n_layers, n_positions, hidden]} of the first
            choice, a torch tensor, and with `capture_qk` attn_q, attn_k, qk_layers and
            qk_meta, for `attention_patterns`; None where nothing was captured. Others' are
            in `raw`: `decode_activations(out.raw["choices"][i], fetch_bytes=client.fetch_bytes)`.
        hook_results: None; there are no hooks over HTTP.
        logprobs: as the server's JSON has them.
        raw: the whole JSON.
    """

    text: str
    activations: dict[str, Any] | None = None
    hook_results: dict[str, dict[str, Any]] | None = None
    logprobs: dict[str, Any] | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


class VLLMLensClient:
    """A client of `vllm serve` with vllm-scope.

    Args:
        base_url: of the server.
        model: as the server knows it; None takes its first one.
        api_key: as for vLLM's --api-key.
        timeout: seconds for an answer.
        transport: an httpx transport, for tests and proxies.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=transport)

    @property
    def model(self) -> str:
        """As the server knows it."""
        if self._model is None:
            models = json.loads(self._request("GET", "/v1/models"))
            self._model = str(models["data"][0]["id"])
        return self._model

    def generate(
        self,
        prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        hooks: Sequence[Any] | None = None,
        capture_layers: Sequence[int] | bool | None = None,
        capture_qk: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector] | None = None,
        activations_transport: str | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        **kwargs: Any,
    ) -> GenerateOutput:
        """Complete a prompt.

        Args:
            capture_layers: layers whose residual stream is wanted, or True for all.
            activations_transport: "binary": tensors as files, which are fetched here.
            capture_qk: layers whose queries and keys are wanted, or True for all.
            hooks: refused.
            kwargs: other fields of the request: n, stop, vllm_xargs, ...

        Raises:
            SpecError: the request is wrong. CapacityError: send it again later.
            ServerError: the server refused for another reason.
            ScopeError: rows that were asked for are missing.
        """
        body: dict[str, Any] = {"prompt": prompt} | kwargs
        if logprobs is not None:
            body["logprobs"] = logprobs
        if echo:
            body["echo"] = True
        words = _words(hooks, capture_layers, capture_qk, steering_vectors, activations_transport)
        return self._answer("/v1/completions", max_tokens, temperature, body, words)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        hooks: Sequence[Any] | None = None,
        capture_layers: Sequence[int] | bool | None = None,
        capture_qk: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector] | None = None,
        activations_transport: str | None = None,
        **kwargs: Any,
    ) -> GenerateOutput:
        """Answer messages, as `generate`."""
        body: dict[str, Any] = {"messages": list(messages)} | kwargs
        words = _words(hooks, capture_layers, capture_qk, steering_vectors, activations_transport)
        return self._answer("/v1/chat/completions", max_tokens, temperature, body, words)

    def _answer(
        self, path: str, max_tokens: int, temperature: float,
        body: dict[str, Any], words: dict[str, str],
    ) -> GenerateOutput:  # fmt: skip
        if body.get("stream"):
            raise SpecError("this client does not stream; use vllm_scope.client.ScopeClient.")
        options = {"model": self.model, "max_tokens": max_tokens, "temperature": temperature}
        if words:
            body["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), **words}
        raw = json.loads(self._request("POST", path, options | body))
        choice = raw["choices"][0]
        text = (choice.get("message") or {}).get("content") or choice.get("text") or ""
        found = None
        if raw.get("activations"):
            from vllm_scope.compat.vllm_lens.wire import decode_activations

            found = decode_activations(raw, fetch_bytes=self.fetch_bytes) or None
        return GenerateOutput(text, found, None, choice.get("logprobs"), raw)

    def fetch_bytes(self, handle: str) -> bytes:
        """The bytes that a handle stands for, once: the server then forgets them."""
        return self._request("GET", f"/v1/activations/{quote(handle, safe='')}?delete=true")

    def _request(self, method: str, path: str, body: Any = None) -> bytes:
        response = self._http.request(method, f"{self.base_url}{path}", json=body)
        return Response(response.status_code, response.content).checked().content

    # What was for hooks

    def register_hooks(
        self, hooks: Sequence[Any], prefetch_params: Sequence[str] | None = None
    ) -> NoReturn:
        """Raises SpecError, as the methods below: a server runs no functions."""
        raise SpecError(NO_HOOKS)

    def collect_hook_results(self) -> NoReturn:
        raise SpecError(NO_HOOKS)

    def clear_hooks(self) -> NoReturn:
        raise SpecError(NO_HOOKS)

    def clear_hook_results(self) -> NoReturn:
        raise SpecError(NO_HOOKS)

    def prefetch_params(self, names: Sequence[str]) -> NoReturn:
        raise SpecError(NO_HOOKS)

    def clear_prefetched(self) -> NoReturn:
        raise SpecError(NO_HOOKS)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> VLLMLensClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _words(
    hooks: Sequence[Any] | None,
    capture_layers: Sequence[int] | bool | None,
    capture_qk: Sequence[int] | bool | None,
    steering_vectors: Sequence[SteeringVector] | None,
    activations_transport: str | None,
) -> dict[str, str]:
    """The fields of `vllm_xargs`, JSON where they are more than a word."""
    if hooks:
        raise SpecError(NO_HOOKS)
    found = {}
    if capture_layers is not None:
        found["output_residual_stream"] = json.dumps(_listed(capture_layers))
    if capture_qk is not None:
        found["output_qk"] = json.dumps(_listed(capture_qk))
    if steering_vectors is not None:
        found["apply_steering_vectors"] = json.dumps([v.model_dump() for v in steering_vectors])
    if activations_transport is not None:
        found["activations_transport"] = activations_transport
    return found


def _listed(asked: Sequence[int] | bool) -> list[int] | bool:
    return asked if isinstance(asked, bool) else [int(layer) for layer in asked]
