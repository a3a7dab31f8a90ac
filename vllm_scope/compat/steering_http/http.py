"""The steering fork over HTTP: its words in bodies, `capture_results` in answers, its routes.

Owns:  HTTP, what the server is told of this face.
Runs:  in each API server process.

A response has `capture_results`, of its first choice. Where there are several choices (n > 1,
several prompts), each has its own too.
"""

from __future__ import annotations

from typing import Any

from vllm_scope.compat import KEYS
from vllm_scope.compat.steering_http import routes
from vllm_scope.server.faces import HttpFace, Reply


class CaptureReply(Reply):
    """`capture_results`: consumer -> {status, error, payload}."""

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}

    def choice(self, number: int, of: int, completion: Any) -> dict[str, Any]:
        results = getattr(completion, "capture_results", None)
        if results is None:
            return {}
        found = {"capture_results": {name: one.to_json() for name, one in results.items()}}
        if number == 0:
            self._first = found
        return found if of > 1 else {}

    def whole(self) -> dict[str, Any]:
        return self._first


_KEYS = frozenset(KEYS["steering_http"])
HTTP = HttpFace(
    "steering_http", _KEYS, _KEYS, lambda values, keep: CaptureReply(),
    (routes.reading,), (routes.changing,), bearer=True,
)  # fmt: skip
