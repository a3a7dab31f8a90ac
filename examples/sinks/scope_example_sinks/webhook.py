"""A sink that sends the scores of a request's probes, in one POST when the request ends.

    "sinks": {"webhook": {"url": "https://monitor.example/scores", "patience_s": 5}}
    Probe(direction, layer=12, name="deception", to="webhook")

The operator sets the URL. A request cannot name a URL.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from vllm_scope.sinks import Block, Ending, Report


class Webhook:
    live = False

    def __init__(self, url: str, timeout_s: float = 3.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}; it must begin with http:// or https://")
        self._url, self._timeout_s = url, timeout_s
        self._scores: dict[int, dict[str, Any]] = {}

    def write(self, block: Block) -> None:
        if block.probe is None:
            raise ValueError("rows are too large for a webhook; send scores of probes")
        self._scores.setdefault(block.request.key, {})[block.probe] = {
            "positions": block.positions.tolist(),
            "scores": block.rows.tolist(),
        }

    def finish(self, ending: Ending) -> Report:
        body = {
            "request_id": ending.request.request_id,
            "finish_reason": ending.finish_reason,
            "status": ending.status,
            "probes": self._scores.pop(ending.request.key, {}),
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        # urlopen raises for an HTTP error. The manifest then has the reason.
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
            return Report(details={"answered": answer.status})

    def flush(self) -> None: ...

    def close(self) -> None: ...
