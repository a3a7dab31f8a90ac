"""VLLMLensClient: vllm-lens's client of a server, on httpx.

    from vllm_scope.compat.vllm_lens.client import VLLMLensClient
    client = VLLMLensClient("http://localhost:8000")
    out = client.generate("Hello", max_tokens=10, capture_layers=[15])
    out.activations["residual_stream"]

Needs no vLLM, and torch only for tensors. A wrong request raises SpecError; every other refusal
raises ServerError.
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
    """The answer to one request.

    Attributes:
        text: of the first choice.
        activations: {"residual_stream": [n_layers, n_positions, hidden]} of the first
            choice, a torch tensor, and with `capture_qk` attn_q, attn_k, qk_layers and
            qk_meta, for `attention_patterns`; None if nothing was captured. Of other choices:
            `decode_activations(out.raw["choices"][i], fetch_bytes=client.fetch_bytes)`.
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
        model: one of the server's models; None: its first one.
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
        """The model's name on the server."""
        if self._model is None:
            models = json.loads(self._request("GET", "/v1/models"))
            self._model = str(models["data"][0]["id"])
        return self._model

    def generate(
        self, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], **options: Any
    ) -> GenerateOutput:
        """Complete a prompt.

        Args:
            max_tokens: 16 by default.
            temperature: 0.0 by default.
            capture_layers: layers whose residual stream is wanted, or True for all.
            capture_qk: layers whose queries and keys are wanted, or True for all.
            steering_vectors: a list of SteeringVector.
            activations_transport: "binary": tensors are files, which are fetched here.
            hooks: refused.
            options: other fields of the request: n, stop, logprobs, echo, vllm_xargs, ...

        Raises:
            SpecError: the request is wrong. CapacityError: send it again later.
            ServerError: the server refused for another reason.
            ScopeError: rows that were asked for are missing.
        """
        return self._answer("/v1/completions", {"prompt": prompt}, **options)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> GenerateOutput:
        """Answer messages, as `generate`."""
        return self._answer("/v1/chat/completions", {"messages": list(messages)}, **options)

    def _answer(
        self,
        path: str,
        body: dict[str, Any],
        *,
        hooks: Sequence[Any] | None = None,
        capture_layers: Sequence[int] | bool | None = None,
        capture_qk: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector] | None = None,
        activations_transport: str | None = None,
        **fields: Any,
    ) -> GenerateOutput:
        if hooks:
            raise SpecError(NO_HOOKS)
        if fields.get("stream"):
            raise SpecError("this client does not stream; use vllm_scope.client.ScopeClient.")
        # In `vllm_xargs` what is more than a word is JSON.
        words = {}
        if capture_layers is not None:
            words["output_residual_stream"] = json.dumps(_listed(capture_layers))
        if capture_qk is not None:
            words["output_qk"] = json.dumps(_listed(capture_qk))
        if steering_vectors is not None:
            words["apply_steering_vectors"] = json.dumps([v.model_dump() for v in steering_vectors])
        if activations_transport is not None:
            words["activations_transport"] = activations_transport
        if words:
            fields["vllm_xargs"] = {**(fields.get("vllm_xargs") or {}), **words}
        defaults = {"model": self.model, "max_tokens": 16, "temperature": 0.0}
        raw = json.loads(self._request("POST", path, defaults | body | fields))
        choice = raw["choices"][0]
        text = (choice.get("message") or {}).get("content") or choice.get("text") or ""
        found = None
        if raw.get("activations"):
            from vllm_scope.compat.vllm_lens.wire import decode_activations

            found = decode_activations(raw, fetch_bytes=self.fetch_bytes) or None
        return GenerateOutput(text, found, None, choice.get("logprobs"), raw)

    def fetch_bytes(self, handle: str) -> bytes:
        """The bytes of a handle. The server deletes them, so a second call fails."""
        return self._request("GET", f"/v1/activations/{quote(handle, safe='')}?delete=true")

    def _request(self, method: str, path: str, body: Any = None) -> bytes:
        response = self._http.request(method, f"{self.base_url}{path}", json=body)
        return Response(response.status_code, response.content).checked().content

    def register_hooks(self, *_: Any, **__: Any) -> NoReturn:
        """Raises SpecError: a server runs no functions."""
        raise SpecError(NO_HOOKS)

    collect_hook_results = clear_hooks = clear_hook_results = register_hooks
    prefetch_params = clear_prefetched = register_hooks

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> VLLMLensClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _listed(asked: Sequence[int] | bool) -> list[int] | bool:
    return asked if isinstance(asked, bool) else [int(layer) for layer in asked]
