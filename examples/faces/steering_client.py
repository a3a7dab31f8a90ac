"""The steering fork over HTTP: capture, steer one request, steer all requests.

VLLM_SCOPE_ADMIN_KEY=operator vllm serve toyworld/model --max-model-len 256 \
    --additional-config.scope.sinks.filesystem.root captures \
    --additional-config.scope.sinks.filesystem.layout per_request
python -m examples.faces.steering_client http://localhost:8000 operator
"""

import base64
import sys

import httpx
import numpy as np
import torch

from toyworld.world import polarity, review_openings, sentiment_prompts
from vllm_scope.compat.steering_http import read_request

LAYER = 2


def complete(
    http: httpx.Client, model: str, prompt: str, max_tokens: int, headers=None, **fields
) -> dict:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | fields
    return http.post("/v1/completions", json=body, headers=headers).raise_for_status().json()


def direction(http: httpx.Client, model: str, operator: dict[str, str]) -> np.ndarray:
    """The difference of the mean rows of positive and negative reviews, from the server's files.

    An answer to the operator has the files' paths. Other answers have only the files' names.
    """
    prompts = sentiment_prompts(40)
    total = 0.0
    for i, prompt in enumerate(prompts):
        wanted = {
            "request_id": f"review-{i}",
            "tag": "over-http",
            "hooks": {"post_block": [LAYER]},
            "positions": "last_prompt",
        }
        answer = complete(http, model, prompt.text, 1, operator, capture={"filesystem": wanted})
        result = answer["capture_results"]["filesystem"]
        assert result["status"] == "ok", result["error"]
        entry = read_request(result["payload"]["items"][0])[LAYER, "post_block"]
        row = torch.from_numpy(entry.array).view(getattr(torch, entry.dtype))[0].float().numpy()
        total = total + (row if prompt.label else -row)
    return total / (len(prompts) / 2)


def run(http: httpx.Client, model: str, operator: dict[str, str]) -> dict[str, float]:
    """Way of steering -> the share of negative reviews that continue in a positive tone."""
    rows = direction(http, model, operator)[None].astype(np.float32)
    hook = {
        "dtype": str(rows.dtype),
        "shape": list(rows.shape),
        "layer_indices": [LAYER],
        "data": base64.b64encode(rows.tobytes()).decode("ascii"),
        "scales": [0.75],
    }
    openings = [p.text for p in review_openings(20) if not p.label]

    def turned(**fields) -> float:
        texts = [complete(http, model, o, 24, **fields)["choices"][0]["text"] for o in openings]
        return sum(polarity(text) > 0 for text in texts) / len(openings)

    def change(path: str, body: dict) -> None:
        http.post(f"/v1/steering/{path}", json=body, headers=operator).raise_for_status()

    found = {"not at all": turned()}
    found["one request"] = turned(steering_vectors={"post_block": hook})
    change("modules/register", {"name": "positive", "vectors": {"post_block": hook}})
    found["by name"] = turned(steering_name="positive")
    change("modules/unregister", {"name": "positive"})
    change("set", {"vectors": {"post_block": hook}})
    found["every request"] = turned()
    change("clear", {})
    return found


if __name__ == "__main__":
    url, key = sys.argv[1:]
    with httpx.Client(base_url=url, timeout=60) as client:
        served = client.get("/v1/models").json()["data"][0]["id"]
        for name, share in run(client, served, {"X-Scope-Admin-Key": key}).items():
            print(f"{share:4.0%} of negative reviews go on in a positive tone; steered: {name}")
