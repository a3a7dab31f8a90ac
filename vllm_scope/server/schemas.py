"""The bodies of requests to the routes, and of their answers, for OpenAPI."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, WithJsonSchema

from vllm_scope.request.actions.base import MAX_NAME
from vllm_scope.request.actions.probing import MONITOR


class ErrorBody(BaseModel):
    """Why a request was refused."""

    message: str = Field(description="What came, what is allowed, and what to do next.")
    type: str = Field(description="SpecError, CapacityError, NotFound, PayloadTooLarge ...")
    param: str | None = None
    code: int = Field(description="The HTTP status.")


class Refusal(BaseModel):
    """An error, in the shape of OpenAI's."""

    error: ErrorBody


class SiteInfo(BaseModel):
    """Where rows can be read, probed and edited."""

    site: str
    layers: list[int] = Field(description="Layers with a tap, from 0; [0] for `embed`.")


class HttpLimits(BaseModel):
    """Bounds of answers and bodies."""

    inline_bytes: int = Field(description="Rows of a choice up to this are in a JSON answer.")
    binary_bytes: int = Field(description="Rows of a choice up to this are in a binary answer.")
    results_bytes: int = Field(description="Results that wait to be fetched, of a process.")
    results_ttl_s: float = Field(description="How long a result is kept.")
    body_bytes: int = Field(description="Of a request to complete or to chat.")
    module_bytes: int = Field(description="Of an uploaded steering module.")


class Load(BaseModel):
    """What this API server process holds now; `requests` is of the whole engine."""

    requests: int = Field(description="Running requests that read, probe or edit.")
    pending: int = Field(description="Requests whose rows are awaited, or not yet answered.")
    results: int = Field(description="Results that wait to be fetched.")
    results_bytes: int


class SumsAt(BaseModel):
    """Where there are sums of rows, and with which label."""

    site: str
    layer: int
    label: str


class MomentsInfo(BaseModel):
    """The sums that requests with Moments have made under one name."""

    name: str
    sums: list[SumsAt]


class ServerInfo(BaseModel):
    """What this server's model can be asked."""

    version: str = Field(description="Of vllm-scope.")
    runner: str = Field(description="vLLM's model runner: V1 or V2.")
    reason: str | None = Field(description="Why the model cannot be tapped; null where it can.")
    num_layers: int
    hidden_size: int
    dtype: str = Field(description="Of rows.")
    sites: list[SiteInfo]
    limits: dict[str, object] = Field(
        description="Of one request, in the engine: row_bytes, token_slots and tap_slots (of 16 "
        "bytes), vectors, programs, ops, optimistic, states. docs/http.md says what they are."
    )
    http: HttpLimits
    load: Load
    operator: bool = Field(description="Modules and server-wide edits can be changed over HTTP.")


class ModuleInfo(BaseModel):
    """A steering module that the engine holds."""

    name: str
    digest: str = Field(description="Of its content.")
    streams: list[tuple[str, int] | tuple[str, int, str]] = Field(
        description="(site, layer) of its vectors, and `prompt` or `generated` where they are for "
        "those tokens alone."
    )


class ModuleList(BaseModel):
    """The steering modules that the engine holds."""

    modules: list[ModuleInfo]


class EditsInfo(BaseModel):
    """The edits of every request."""

    edits: list[dict[str, object]] = Field(
        description="As in a spec; empty where none hold. Where they take more than 8 MiB, vectors "
        "are dtype and shape alone."
    )
    digest: str | None = Field(default=None, description="Of what was set just now.")


#: What is checked of it is more: docs/probes.md.
_MONITOR = {
    "type": "object",
    "description": "The fields of a probe, as in a spec, without name and to.",
    "properties": {
        "threshold": {"type": "number"},
        "action": {"enum": ["flag", "stop"]},
        "after": {
            "type": ["string", "null"],
            "minLength": 1,
            "maxLength": MAX_NAME - len(MONITOR),
            "description": "Another monitor: this one scores after its verdict.",
        },
    },
    "required": ["weight", "threshold"],
}


class Monitors(BaseModel):
    """Probes on every request from now on."""

    monitors: dict[str, Annotated[dict[str, object], WithJsonSchema(_MONITOR)]] = Field(
        description="By name."
    )


class Edits(BaseModel):
    """Edits for every request from now on."""

    edits: list[dict[str, object]] = Field(
        description="As in a spec: kind, site, layers, tokens (all, prompt or generated), and "
        "the fields of their kind."
    )
