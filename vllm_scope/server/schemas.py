"""The bodies of the routes' requests and answers, for OpenAPI."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from vllm_scope.request.actions.base import MAX_NAME
from vllm_scope.request.actions.probing import MONITOR


class ErrorBody(BaseModel):
    """The reason why a request was refused."""

    message: str = Field(description="The given value, the allowed values, and the next step.")
    type: str = Field(description="SpecError, CapacityError, NotFound, PayloadTooLarge ...")
    param: str | None = None
    code: int = Field(description="The HTTP status.")


class Refusal(BaseModel):
    """An error, in the format of OpenAI's errors."""

    error: ErrorBody


class SiteInfo(BaseModel):
    """A site where rows can be read, probed and edited, and its layers."""

    site: str
    layers: list[int] = Field(description="The layers with a tap, counted from 0; [0] for `embed`.")


class HttpLimits(BaseModel):
    """The limits of answers and of the bodies of requests."""

    inline_bytes: int = Field(description="Largest size of a choice's rows in a JSON answer.")
    binary_bytes: int = Field(description="Largest size of a choice's rows in a binary answer.")
    results_bytes: int = Field(description="Largest size of all results that one process keeps.")
    results_ttl_s: float = Field(description="The number of seconds for which a result is kept.")
    body_bytes: int = Field(description="Largest size of the body of a completion or chat request.")
    module_bytes: int = Field(description="Largest size of an uploaded steering module.")
    sweep_cells: int = Field(description="Largest number of cells of a sweep.")


class Load(BaseModel):
    """The current load. `requests` is for the whole engine, and the other fields are for this API
    server process."""

    requests: int = Field(description="Running requests that read, probe or edit.")
    pending: int = Field(description="Requests whose rows or whose answers are not complete.")
    results: int = Field(description="Results that were not deleted yet.")
    results_bytes: int


class SumsAt(BaseModel):
    """The place and the label of some sums of rows."""

    site: str
    layer: int
    label: str


class MomentsInfo(BaseModel):
    """The sums that requests with Moments have made under one name."""

    name: str
    sums: list[SumsAt]


class ServerInfo(BaseModel):
    """The sites of this server's model, the limits, and the load."""

    version: str = Field(description="Of vllm-scope.")
    runner: str = Field(description="vLLM's model runner: V1 or V2.")
    reason: str | None = Field(description="The reason why the model cannot be tapped, or null.")
    num_layers: int
    hidden_size: int
    dtype: str = Field(description="Of rows.")
    sites: list[SiteInfo]
    attention: dict[int, dict[str, object]] = Field(
        description="Maps a layer to the options of its attention kernel, if q, k, v or z has a "
        "tap. The options are the argument `kernel` of "
        "vllm_scope.analysis.attention.attention_pattern."
    )
    limits: dict[str, object] = Field(
        description="Limits of one request in the engine: row_bytes, token_slots and tap_slots (of "
        "16 bytes), vectors, programs, ops, optimistic, states; see docs/http.md."
    )
    http: HttpLimits
    load: Load
    operator: bool = Field(description="True if modules and server-wide edits can be changed.")


class ModuleInfo(BaseModel):
    """A steering module that the engine holds."""

    name: str
    digest: str = Field(description="Digest of the content.")
    streams: list[tuple[str, int] | tuple[str, int, str]] = Field(
        description="The site and the layer of each vector. The third item is `prompt` or "
        "`generated`, if a vector is only for prompt tokens or only for generated tokens."
    )


class ModuleList(BaseModel):
    """The steering modules that the engine holds."""

    modules: list[ModuleInfo]


class EditsInfo(BaseModel):
    """The server-wide edits, which apply to every request."""

    edits: list[dict[str, object]] = Field(
        description="The edits as in a spec; empty if there are none. If the edits take more than "
        "8 MiB, long vectors have only their shape (and their dtype, if it was sent)."
    )
    digest: str | None = Field(default=None, description="Digest of the edits; null for GET.")


#: The server checks more rules than this schema contains. docs/monitors.md has all rules.
_MONITOR = {
    "type": "object",
    "description": "The fields of a probe as in a spec, without `name` and `to`.",
    "properties": {
        "threshold": {"type": "number"},
        "action": {"enum": ["flag", "stop"]},
        "after": {
            "type": ["string", "null"],
            "minLength": 1,
            "maxLength": MAX_NAME - len(MONITOR),
            "description": "The name of a monitor that must give a verdict first.",
        },
    },
    "required": ["weight", "threshold"],
}


class Monitors(BaseModel):
    """Probes that are added to every request from now on, and replace all earlier monitors."""

    monitors: dict[str, Annotated[dict[str, object], WithJsonSchema(_MONITOR)]] = Field(
        description="By name."
    )


class ViewData(BaseModel):
    """The data of a view, which a page draws."""

    parts: list[dict[str, object]] = Field(description="As in vllm_scope/views/parts.py.")


class Edits(BaseModel):
    """Edits that apply to every request from now on."""

    edits: list[dict[str, object]] = Field(
        description="Edits as in a spec: kind, site, layers, tokens (all, prompt or generated), "
        "and the fields of the kind."
    )


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {"anyOf": [{"type": "string"}, _TOKEN_IDS]}
_PROMPTS = {"anyOf": [*_PROMPT["anyOf"], {"type": "array", "items": _PROMPT, "minItems": 1}]}
_TOKEN = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}
_TOKENS = {"anyOf": [*_TOKEN["anyOf"], {"type": "array", "items": _TOKEN, "minItems": 1}]}


def _only(description: str = "", **properties: object) -> dict[str, object]:
    """The JSON schema of an object that has the given fields and no other fields."""
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False, "description": description,
    }  # fmt: skip


def _named(what: str) -> dict[str, object]:
    whole = {"type": "integer"}
    several = {"type": "array", "items": whole, "minItems": 1, "uniqueItems": True}
    return {"anyOf": [{"const": "all"}, whole, several], "description": what}


_SOURCE = {
    "anyOf": [
        _only("The rows of these prompts.", prompts=_PROMPTS),
        _only("Rows, in the form of an edit's vector: {dtype, shape, data} or lists.", rows={}),
        _only("A module.", module={"type": "string", "minLength": 1, "maxLength": MAX_NAME}),
    ]
}
_METRIC = {
    "anyOf": [
        _only("", kind={"const": "logit_difference"}, a=_TOKENS, b=_TOKENS),
        _only("", kind={"const": "logprob"}, token=_TOKENS),
        _only("Over the whole vocabulary.", kind={"const": "kl"}),
    ]
}
_RECEIVER = {
    "type": "array", "prefixItems": [{"type": "string"}],
    "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 3,
}  # fmt: skip
_RECEIVERS = {
    "description": "Path patching: the site and layer of each receiver, and its head (if any).",
    "anyOf": [
        {"type": "null"}, {"const": "logits"},
        {"type": "array", "items": _RECEIVER, "minItems": 1},
    ],
}  # fmt: skip
Json = dict[str, object]


class Sweep(BaseModel):
    """The prompts and the settings of a sweep, which docs/sweeps.md describes."""

    model_config = ConfigDict(extra="forbid")
    prompts: Annotated[object, WithJsonSchema(_PROMPTS)]
    source: Annotated[Json, WithJsonSchema(_SOURCE)]
    metric: Annotated[Json, WithJsonSchema(_METRIC)]
    site: str = "resid_pre"
    layers: Annotated[object, WithJsonSchema({"anyOf": [{"type": "null"}, _named("From 0.")]})] = (
        None
    )
    positions: Annotated[object, WithJsonSchema(_named("Negative: from the prompt's end."))] = "all"
    heads: Annotated[object, WithJsonSchema({"anyOf": [{"type": "null"}, _named("From 0.")]})] = (
        None
    )
    mode: Annotated[str, WithJsonSchema({"enum": ["patch", "ablate", "add"]})] = "patch"
    scale: float = Field(1.0, description='The factor of the rows in mode "add".')
    together: bool = Field(False, description="Each cell edits all chosen positions.")
    receivers: Annotated[object, WithJsonSchema(_RECEIVERS)] = None
    stream: bool = Field(False, description="True: send each cell as an event when it arrives.")


class CellError(BaseModel):
    """The reason why a cell of a sweep has no value."""

    at: list[int] = Field(description="The cell's index in each dimension of `shape`.")
    error: str


class SweepCounts(BaseModel):
    """The number of cells of a sweep, and the number of cells that failed."""

    cells: int
    failed: int


class SweepTable(BaseModel):
    """The values of a sweep. A value is null if its cell failed, or if the prompt has no token at
    the cell's position."""

    shape: list[int] = Field(
        description="The number of prompts and of layers, then of positions and of heads if the "
        "table has these dimensions."
    )
    values: list[float | None] = Field(description="In C order.")
    plain: list[float | None] = Field(description="The metric of each prompt without an edit.")
    source: list[float | None] = Field(
        description="The metric of each source prompt; null if none."
    )
    tokens: list[list[str]] = Field(description="Texts of each prompt's tokens.")
    layers: list[int]
    positions: list[int] | None
    heads: list[int] | None
    metric: str
    site: str
    mode: str
    errors: list[CellError]
    counts: SweepCounts
