"""Hostile requests: expensive for a server that does not check the requests.

Owns:  Hostile, and `hostile`, which returns the functions that make these requests for a model.
To:    soak, tests/server/test_neighbours.py.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.server import ADMIN_KEY

REFUSED = frozenset({400})


@dataclass(frozen=True)
class Hostile:
    """One hostile request, and the allowed answers.

    Attributes:
        statuses: HTTP statuses that are allowed in the answer.
        alike: True if the same request is also sent to a server without the plugin.
    """

    content: bytes
    statuses: frozenset[int] = REFUSED
    alike: bool = True
    method: str = "POST"
    path: str = "/v1/completions"
    headers: Mapping[str, str] | None = None

    @property
    def all_headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **(self.headers or {})}


def hostile(model: str, hidden_size: int, max_tokens: int) -> dict[str, Callable[[], Hostile]]:
    """Name -> a function that makes the request. A request can have megabytes.

    Args:
        model: the name of the served model.
        max_tokens: the largest number of tokens that a prompt and its answer have together.
    """

    def body(more: dict[str, Any]) -> bytes:
        return json.dumps({"model": model, "prompt": "x", "max_tokens": 2} | more).encode()

    def scoped(text: str, **more: Any) -> bytes:
        return body({"vllm_xargs": {"scope": text}} | more)

    def add(vector: str) -> str:
        common = '"kind":"add","site":"resid_post","layers":[1]'
        return f'{{"edits":[{{{common},"vector":[{vector}]}}]}}'

    def bit_masks(num_prompt: int) -> Hostile:
        """Edit n is at the last position, and at the positions whose number has bit n set.
        Therefore no two tokens have the same edits."""
        edits = [
            {"kind": "add", "site": "resid_post", "layers": [1],
             "vector": [1e-3 * (bit + 1)] * hidden_size,
             "tokens": [p for p in range(num_prompt) if p >> bit & 1 or p == num_prompt - 1]}
            for bit in range(num_prompt.bit_length())
        ]  # fmt: skip
        return Hostile(scoped(json.dumps({"edits": edits}), prompt=[5] * num_prompt))

    def selectors(unions: list[dict[str, Any]], **more: Any) -> Hostile:
        """Small edits, one for each selector."""
        ones = base64.b64encode(struct.pack(f"<{hidden_size}f", *[1e-3] * hidden_size)).decode()
        vector = {"dtype": "float32", "shape": [hidden_size], "data": ones}
        edits = [{"kind": "add", "layers": [1], "vector": vector, "tokens": u} for u in unions]
        return Hostile(scoped(json.dumps({"edits": edits}), **more), alike=False)

    def position_lists() -> Hostile:
        """200 edits with unions of 60 lists of positions, and a generation."""
        unions = [{"union": [[500 + i], *([i % 8 + 8 * j] for j in range(59))]} for i in range(200)]
        made = selectors(unions, prompt=[5] * 720, max_tokens=30)
        return replace(made, statuses=frozenset({200}))

    def slices() -> Hostile:
        """150 edits with unions of 30 slices."""
        return selectors(
            [{"union": [{"slice": [i, i + j, None]} for j in range(1, 31)]} for i in range(150)]
        )

    def overflow() -> Hostile:
        """An ordinary request, except that the numbers of its edit overflow."""
        edit = {"kind": "add", "site": "resid_post", "layers": [1], "scale": 3e38,
                "vector": [3e38] * hidden_size}  # fmt: skip
        return Hostile(scoped(json.dumps({"edits": [edit]}), max_tokens=30), alike=False)

    def large() -> Hostile:
        """An edit with numbers that float32 can represent and float16 cannot."""
        vector = [1.0] + [0.0] * (hidden_size - 1)
        edit = {"kind": "add", "site": "resid_post", "layers": [1], "scale": 1e5, "vector": vector}
        return Hostile(
            scoped(json.dumps({"edits": [edit]}), max_tokens=30), frozenset({200, 400}), False
        )

    def remote_call(content: bytes) -> Hostile:
        return Hostile(content, frozenset({403}), False, path="/collective_rpc")

    def server_edits(count: int, statuses: frozenset[int], **headers: str) -> Hostile:
        content = json.dumps({"edits": [[1] * count]}).encode()
        return Hostile(content, statuses, False, "PUT", "/v1/scope/edits", headers)

    def completions() -> Hostile:
        """A request with many completions, and a spec that takes long to parse."""
        text = json.dumps({"reads": [{"site": "resid_post", "layers": [1], "tokens": [0]}]})
        return Hostile(scoped(text + " " * 1_100_000, n=128, max_tokens=1), frozenset({200}))

    def surrogate() -> Hostile:
        weight = ",".join(["1"] * hidden_size)
        probe = f'{{"name":"\\ud800","layers":[1],"weight":[{weight}]}}'
        return Hostile(scoped(f'{{"probes":[{probe}]}}'))

    keys = {str(i): [1.0] for i in range(600_000)}
    rows = [{"activations": [[1]] * 1_500_000, "layer_indices": [1]}]
    with_key = {"X-Scope-Admin-Key": ADMIN_KEY}
    found: dict[str, Callable[[], Hostile]] = {
        "an edit that overflows": overflow,
        "a unit vector at scale 1e5": large,
        "a remote call without the key": lambda: remote_call(
            b'{"method": "scope_set_edits", "args": [null]}'
        ),
        "a long remote call without the key": lambda: remote_call(
            b'{"method": "scope_set_edits", "args": [' + b"[1]," * 15_000_000 + b"1]}"
        ),
        "600,000 layers of a face": lambda: Hostile(
            body({"steering_vectors": {"post_block": keys}})
        ),
        "1.5 million rows of a face": lambda: Hostile(
            body({"vllm_xargs": {"apply_steering_vectors": json.dumps(rows)}})
        ),
        "a vector of lists": lambda: Hostile(scoped(add(",".join(["[1]"] * 1_800_000)))),
        "a vector of 3.5 million": lambda: Hostile(scoped(add(",".join("1" * 3_500_000)))),
        "nested as deep as it is long": lambda: Hostile(
            scoped('{"edits":' * 400_000 + "1" + "}" * 400_000)
        ),
        "edits of the server without its key": lambda: server_edits(
            10_000_000, frozenset({401, 403})
        ),
        "30 million edits of the server": lambda: server_edits(
            30_000_000, frozenset({400, 413}), **with_key
        ),
        "a lone surrogate": surrogate,
        "4,500 slices": slices,
        "128 completions of a long spec": completions,
    }
    if max_tokens > 750:
        found["12,000 lists of positions"] = position_lists
    for count in (4000, 16_000):
        if count < max_tokens:
            found[f"{count:,} tokens of their own edits"] = partial(bit_masks, count)
    return found
