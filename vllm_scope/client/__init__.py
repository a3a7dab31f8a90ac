"""A client of `vllm serve` with vllm-scope: numpy and httpx, no vLLM, no torch.

    from vllm_scope import Read
    from vllm_scope.client import ScopeClient

    with ScopeClient("http://localhost:8000", api_key="...") as client:
        out = client.complete("The capital of ", Read("resid_post", layers=[5]), max_tokens=8)
        out.scope["resid_post", 5]  # float32 [positions, hidden_size]

answers.py    what comes back: Completion, Choice, Chunk, ScoredToken, ScopeData
calls.py      every call, written once: what is sent, what is made of the response
transport.py  ScopeClient and AsyncScopeClient, which carry the calls
"""

from vllm_scope.client.answers import (
    Choice,
    Chunk,
    Completion,
    ScopeData,
    ScoredToken,
    Scores,
)
from vllm_scope.client.calls import ServerError, UnreachableError
from vllm_scope.client.transport import AsyncScopeClient, ScopeClient

__all__ = [
    "AsyncScopeClient",
    "Choice",
    "Chunk",
    "Completion",
    "ScopeClient",
    "ScopeData",
    "ScoredToken",
    "Scores",
    "ServerError",
    "UnreachableError",
]
