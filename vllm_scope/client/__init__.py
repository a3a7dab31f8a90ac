"""HTTP clients of `vllm serve` with vllm-scope, which need numpy and httpx only.

    from vllm_scope import Read
    from vllm_scope.client import ScopeClient

    with ScopeClient("http://localhost:8000", api_key="...") as client:
        out = client.complete("The capital of ", Read("resid_post", layers=[5]), max_tokens=8)
        out.scope["resid_post", 5]  # float32 [positions, hidden_size]

answers.py    the answers: Completion, Choice, Chunk, ScoredToken, ScopeData, Verdict
parsing.py    makes answers from the server's JSON, files and binary answers
bodies.py     the fields of the JSON
features.py   the features in answers: SparseFeatures
lens.py       the tokens of lenses in answers: TopTokens
frames.py     binary answers: their JSON and their tensors
messages.py   one HTTP request and its response, an event of a stream, errors of the server
calls.py      the calls of both clients: their requests, and the parsing of the responses
transport.py  ScopeClient and AsyncScopeClient, which send the calls
"""

from vllm_scope.client.answers import (
    Choice,
    Chunk,
    Completion,
    ScopeData,
    ScoredToken,
    Scores,
    Verdict,
)
from vllm_scope.client.features import SparseFeatures
from vllm_scope.client.lens import TopTokens
from vllm_scope.client.messages import ServerError, UnreachableError
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
    "SparseFeatures",
    "TopTokens",
    "UnreachableError",
    "Verdict",
]
