"""The steering fork over HTTP: its words in bodies, `capture_results` in answers, its routes.

Owns:  HTTP, the registration of this face with the server.
Runs:  in each API server process.

A response has the `capture_results` of its first choice. If there are several choices (n > 1,
or several prompts), each choice has its own too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_scope.compat import KEYS
from vllm_scope.compat.steering_http import routes
from vllm_scope.server.faces import FirstReply, HttpFace

if TYPE_CHECKING:
    from vllm import CompletionOutput


class CaptureReply(FirstReply):
    """`capture_results`: consumer -> {status, error, payload}."""

    name = "capture_results"

    def value(self, completion: CompletionOutput) -> dict[str, object] | None:
        found = getattr(completion, "capture_results", None)
        return None if found is None else {name: one.to_json() for name, one in found.items()}


_KEYS = frozenset(KEYS["steering_http"])
HTTP = HttpFace(
    "steering_http", _KEYS, _KEYS, lambda values, keep: CaptureReply(),
    (routes.reading,), (routes.changing,), bearer=True,
)  # fmt: skip
