"""What is said about a captured request, beside its rows.

Owns:  RequestRecord (what a writer is told when a request ends), Manifest (what is
       stored and returned), Index (the manifests of one file), and their JSON.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from vllm_scope.errors import FileError, shown
from vllm_scope.request.sites import SiteLayer

Status = Literal["ok", "partial", "error"]

FORMAT = 1
#: More than any index that a writer makes; checked before one is read.
MAX_INDEX_BYTES = 1 << 30
#: More pipeline stages than any engine has; the stages of an index are counted up to it.
MAX_STAGES = 1024


@dataclass(frozen=True)
class RequestRecord:
    """A request at its end, or one completion of it.

    Attributes:
        request_id: the engine's; may repeat between runs and replicas.
        prompt_ids, output_ids: all tokens, the last sampled one included.
        model: name of the model.
        expected, delivered, dropped: rows of this stage that were asked for, that
            reached the writer (one per position), and that were lost.
        status: `ok`, `partial` (rows are missing) or `error`.
        reason: why not `ok`.
        tag: a folder for requests that belong together.
        name: the caller's, unique within its tag; a later request replaces an earlier
            one of the same tag and name, and owner.
        uid: unique among all requests; the same for all stages and completions of one.
        child: which completion of a request with n > 1.
        stage, num_stages: which pipeline stage these rows are from.
        owner: whose request it was, where several share a root: letters and digits.
    """

    request_id: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    model: str
    expected: int
    delivered: int
    dropped: int = 0
    status: Status = "ok"
    reason: str | None = None
    tag: str | None = None
    name: str | None = None
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    child: int = 0
    stage: int = 0
    num_stages: int = 1
    owner: str = ""

    @property
    def num_positions(self) -> int:
        """Positions that were processed: the token sampled last never was, and rows at
        or past its place are of rejected drafts."""
        return len(self.prompt_ids) + max(len(self.output_ids) - 1, 0)


class StreamEntry(msgspec.Struct, frozen=True):
    """Where the rows of one stream of a request are.

    Attributes:
        shape: (num_rows, hidden_size), decoded.
        dtype: decoded.
        codec: metadata for `codecs.codec_from`.
        file: name, in the folder of the manifest.
        first: the request's first row in the file's stream.
    """

    shape: tuple[int, int]
    dtype: str
    codec: dict[str, Any]
    file: str
    first: int = 0


class Manifest(msgspec.Struct, frozen=True):
    """One request as stored.

    Attributes:
        files: names, in the folder of the manifest.
        streams: by `site.layer`.
        number: which request of its file this is.
        first_token: the request's first token in the file's token ids.

    The others are those of RequestRecord.
    """

    request_id: str
    uid: str
    model: str
    status: Status
    reason: str | None
    expected: int
    delivered: int
    dropped: int
    num_prompt_tokens: int
    num_output_tokens: int
    files: list[str]
    streams: dict[str, StreamEntry]
    tag: str | None = None
    name: str | None = None
    child: int = 0
    stage: int = 0
    num_stages: int = 1
    number: int = 0
    first_token: int = 0
    owner: str = ""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = msgspec.to_builtins(self)
        return body


class Index(msgspec.Struct, frozen=True):
    """What one file holds.

    Attributes:
        dtypes: of tensors that the file holds as bits of another (npz).
    """

    layout: Literal["per_request", "packed", "sharded", "npz"]
    requests: list[Manifest]
    dtypes: dict[str, str] = {}
    format: int = FORMAT

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(body: bytes | str, where: str) -> Index:
        """Raises FileError."""
        try:
            index = msgspec.json.decode(body, type=Index)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FileError(f"{where}: its index cannot be read: {error}") from None
        if index.format != FORMAT:
            raise FileError(
                f"{where} is of format {index.format}; this version reads format {FORMAT}."
            )
        for manifest in index.requests:
            if not 0 <= manifest.stage < manifest.num_stages <= MAX_STAGES:
                raise FileError(
                    f"{where}: its index says stage {shown(manifest.stage)} of "
                    f"{shown(manifest.num_stages)}; stages count from 0, and there are at most "
                    f"{MAX_STAGES}. It is damaged."
                )
        return index


def stream_name(stream: SiteLayer) -> str:
    return f"{stream[0]}.{stream[1]}"


def parse_stream(name: str) -> SiteLayer:
    """Raises FileError for what is not `site.layer`."""
    site, _, layer = name.rpartition(".")
    # Python refuses to make an integer of thousands of digits.
    if not site or not layer.isascii() or not layer.isdigit() or len(layer) > 9:
        raise FileError(f"{shown(name)} names no stream; streams are `site.layer`.")
    return site, int(layer)
