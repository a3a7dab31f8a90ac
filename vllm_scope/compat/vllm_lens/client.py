"""VLLMLensClient, a client of a server with the methods of vllm-lens's client. It uses httpx.

    from vllm_scope.compat.vllm_lens.client import VLLMLensClient
    client = VLLMLensClient("http://localhost:8000")
    out = client.generate("Hello", max_tokens=10, capture_layers=[15])
    out.activations["residual_stream"]

The client does not import vLLM, and imports torch only for tensors. A wrong request raises
SpecError. If the server has no room for a request, the client raises CapacityError. The client
raises ServerError for every other refusal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from vllm_scope.client.calls import Prompt
from vllm_scope.client.messages import Response
from vllm_scope.compat.vllm_lens.model import NO_HOOKS
from vllm_scope.errors import SpecError
from vllm_scope.vectors.hooks import mapping

try:
    import httpx
except ImportError as error:
    raise ImportError("the client needs httpx: pip install 'vllm-scope[client]'.") from error

if TYPE_CHECKING:
    from vllm_scope.compat.vllm_lens.steering import SteeringVector
    from vllm_scope.compat.vllm_lens.wire import Decoded


@dataclass
class GenerateOutput:
    """The answer to one request.

    Attributes:
        text: the text of the first choice.
        activations: the first choice's activations, or None if nothing was captured.
            "residual_stream" is a torch tensor [n_layers, n_positions, hidden]. With `capture_qk`,
            the activations also have attn_q, attn_k, qk_layers and qk_meta, for
            `attention_patterns`. The activations of a later choice i (from 1) are
            `decode_activations(out.raw["choices"][i], fetch_bytes=client.fetch_bytes)`.
        hook_results: None, because a server runs no hooks.
        logprobs: the first choice's log-probabilities, as in the server's JSON.
        raw: the whole JSON of the answer.
    """

    text: str
    activations: Decoded | None = None
    hook_results: None = None
    logprobs: dict[str, object] | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


class VLLMLensClient:
    """A client of `vllm serve` with vllm-scope.

    Args:
        base_url: the server's URL.
        model: the name of one of the server's models, or None for the server's first model.
        api_key: a key of the server's option --api-key.
        timeout: how many seconds the client waits for the next bytes of an answer, or None for no
            limit.
        transport: an httpx transport in place of the default, for tests and proxies.
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
        if self._model is None:
            models = json.loads(self._request("GET", "/v1/models"))
            self._model = str(models["data"][0]["id"])
        return self._model

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        hooks: Sequence[object] | None = None,
        capture_layers: Sequence[int] | bool | None = None,
        capture_qk: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector] | None = None,
        activations_transport: str | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        **fields: object,
    ) -> GenerateOutput:
        """Complete a prompt.

        Args:
            hooks: must be None or empty, because a server runs no hooks.
            capture_layers: layers of the residual stream to capture, or True for all layers.
            capture_qk: layers of queries and keys to capture, or True for all layers.
            activations_transport: with "binary", the server keeps tensors as files, and this
                method fetches the files.
            fields: other fields of the request, such as n, stop and vllm_xargs.

        Raises:
            SpecError: the request is wrong.
            CapacityError: the server has no room for the request. Send the request again later.
            ServerError: the server refused the request for another reason.
            ScopeError: the answer lacks a requested tensor, for example because rows are missing.
        """
        words = _words(hooks, capture_layers, capture_qk, steering_vectors, activations_transport)
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature,
            "logprobs": logprobs, "echo": echo, **fields,
        }  # fmt: skip
        return self._answer("/v1/completions", body, words)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        hooks: Sequence[object] | None = None,
        capture_layers: Sequence[int] | bool | None = None,
        capture_qk: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector] | None = None,
        activations_transport: str | None = None,
        **fields: object,
    ) -> GenerateOutput:
        """Let the model answer messages. Other arguments and errors are those of `generate`."""
        words = _words(hooks, capture_layers, capture_qk, steering_vectors, activations_transport)
        body = {
            "messages": list(messages), "max_tokens": max_tokens, "temperature": temperature,
            **fields,
        }  # fmt: skip
        return self._answer("/v1/chat/completions", body, words)

    def _answer(self, path: str, body: dict[str, object], words: dict[str, str]) -> GenerateOutput:
        if body.get("stream"):
            raise SpecError("this client does not stream; use vllm_scope.client.ScopeClient.")
        if words:
            own = mapping(body.get("vllm_xargs"), "vllm_xargs")
            body["vllm_xargs"] = dict[object, object](own) | words
        raw = json.loads(self._request("POST", path, {"model": self.model} | body))
        choice = raw["choices"][0]
        text = (choice.get("message") or {}).get("content") or choice.get("text") or ""
        found = None
        if raw.get("activations"):
            from vllm_scope.compat.vllm_lens.wire import decode_activations

            found = decode_activations(raw, fetch_bytes=self.fetch_bytes)
        return GenerateOutput(text, found, None, choice.get("logprobs"), raw)

    def fetch_bytes(self, handle: str) -> bytes:
        """Fetch the bytes of a handle's tensor. The server then deletes the bytes."""
        return self._request("GET", f"/v1/activations/{quote(handle, safe='')}?delete=true")

    def _request(self, method: str, path: str, body: object = None) -> bytes:
        response = self._http.request(method, f"{self.base_url}{path}", json=body)
        return Response(response.status_code, response.content).checked().content

    def register_hooks(self, *_: object, **__: object) -> NoReturn:
        """Raises SpecError, because a server runs no functions of its clients."""
        raise SpecError(NO_HOOKS)

    collect_hook_results = clear_hooks = clear_hook_results = register_hooks
    prefetch_params = clear_prefetched = register_hooks

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> VLLMLensClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _words(
    hooks: Sequence[object] | None,
    layers: Sequence[int] | bool | None,
    qk_layers: Sequence[int] | bool | None,
    vectors: Sequence[SteeringVector] | None,
    transport: str | None,
) -> dict[str, str]:
    """vllm-lens's keys for the field `vllm_xargs`, with lists and objects as JSON strings."""
    if hooks:
        raise SpecError(NO_HOOKS)
    words = {"activations_transport": transport} if transport is not None else {}
    for key, asked in (("output_residual_stream", layers), ("output_qk", qk_layers)):
        if asked is not None:
            listed = asked if isinstance(asked, bool) else [int(layer) for layer in asked]
            words[key] = json.dumps(listed)
    if vectors is not None:
        words["apply_steering_vectors"] = json.dumps([v.model_dump() for v in vectors])
    return words
