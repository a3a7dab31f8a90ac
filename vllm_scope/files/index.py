"""The data about requests that is stored together with the rows of the requests.

Owns:  RequestRecord (a writer's input when a request ends), IndexedRequest (the stored data,
       `request.manifest`), DocumentSpan, Index (all requests of one file), and their JSON.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from vllm_scope.errors import FileError, shown
from vllm_scope.request.read_features import ReadFeatures
from vllm_scope.request.sites import SiteLayer

#: `ok`: the file has all requested rows. `partial`: rows are missing. `error`: see `reason`.
Status = Literal["ok", "partial", "error"]
#: The statuses, from the best to the worst.
STATUSES: tuple[Status, ...] = get_args(Status)

FORMAT = 1
#: Readers refuse an index that has more bytes than this number. The index of a usual file is much
#: smaller.
MAX_INDEX_BYTES = 1 << 30
#: Readers refuse an index with a larger number of pipeline stages. Engines have fewer stages, but a
#: damaged index may contain any number.
MAX_STAGES = 1024


class DocumentSpan(msgspec.Struct, frozen=True):
    """Consecutive tokens of a document in the prompt of a harvested request.

    Attributes:
        document: the document's id.
        first: the index of the span's first token in the document.
        num_tokens: number of tokens in the span.
        total: number of tokens in the document.
    """

    document: str
    first: int
    num_tokens: int
    total: int


@dataclass(frozen=True)
class RequestRecord:
    """The data that a writer gets when a request, or one completion of a request, ends.

    Attributes:
        request_id: the engine's id of the request. Another run or replica may use the same id.
        prompt_ids, output_ids: all token ids of the prompt and of the output, including the token
            sampled last.
        model: name of the model.
        expected: number of requested rows of this pipeline stage.
        delivered: number of rows that reached the writer. Each position of a stream counts once.
        dropped: number of rows that were lost.
        status: `ok`, `partial` (rows are missing) or `error`.
        reason: None if the status is `ok`.
        tag: the name that the caller gave to a group of requests. With the layouts `per_request`
            and `npz`, the files of requests with the same tag share a folder.
        name: the name that the caller gave the request. With the layouts `per_request` and `npz`,
            the files of an earlier request with the same owner, tag and name are replaced.
        uid: an id that is unique among all requests. All stages and completions of a request have
            the same uid.
        child: index of the completion if the request has n > 1.
        stage, num_stages: index of the pipeline stage of these rows, and number of stages.
        owner: for a request over HTTP, a digest of its API key. "" for other requests, at sinks in
            `global_sinks`, and if `key_folders` is false.
        documents: the spans in the prompt of a harvested request, in order. Else empty.
        num_layers: the model's number of layers. None: not known.
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
    documents: tuple[DocumentSpan, ...] = ()
    num_layers: int | None = None

    @property
    def num_positions(self) -> int:
        """Number of processed positions. The token sampled last is not processed. Rows at the
        position of this token and at later positions belong to rejected draft tokens."""
        return len(self.prompt_ids) + max(len(self.output_ids) - 1, 0)


class IndexedStream(msgspec.Struct, frozen=True):
    """The location and format of the rows of one stream of a request.

    Attributes:
        shape: the shape of the decoded rows, (num_rows, hidden_size).
        dtype: the dtype of decoded rows.
        codec: the metadata from which `codecs.codec_from` makes the codec.
        file: the name of the file, in the folder of the index.
        first: the index of the request's first row in the file's stream.
        features: for a stream of features, which features of the SAE were read. Other streams, and
            files from earlier versions, lack this field.
    """

    shape: tuple[int, int]
    dtype: str
    codec: dict[str, object]
    file: str
    first: int = 0
    features: ReadFeatures | UnsetType = UNSET


class IndexedRequest(msgspec.Struct, frozen=True):
    """The stored data of one request.

    Attributes:
        files: names of the files, in the folder of the index. In `CapturedRequest.manifest`, the
            names are relative to the opened folder.
        streams: the request's streams, by `site.layer`.
        number: the request's index in the file.
        first_token: the index of the request's first token in the file's token ids.

    All other attributes are as in RequestRecord.
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
    streams: dict[str, IndexedStream]
    tag: str | None = None
    name: str | None = None
    child: int = 0
    stage: int = 0
    num_stages: int = 1
    number: int = 0
    first_token: int = 0
    owner: str = ""
    documents: tuple[DocumentSpan, ...] = ()
    num_layers: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def to_json(self) -> dict[str, object]:
        body: dict[str, object] = msgspec.to_builtins(self)
        return body


class Index(msgspec.Struct, frozen=True):
    """The requests of one file.

    Attributes:
        dtypes: only for the layout `npz`: maps the name of a tensor to the tensor's real dtype, if
            numpy does not have this dtype. The file has the bits of such a tensor as integers.
    """

    layout: Literal["per_request", "packed", "sharded", "npz"]
    requests: list[IndexedRequest]
    dtypes: dict[str, str] = {}
    format: int = FORMAT

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(body: bytes | str, where: str) -> Index:
        """The index of a file. Raises FileError."""
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
                    f"{MAX_STAGES}. The file is damaged."
                )
        return index


def stream_name(stream: SiteLayer) -> str:
    return f"{stream[0]}.{stream[1]}"


def parse_stream(name: str) -> SiteLayer:
    """The stream whose name is `site.layer`. Raises FileError if the name has another form."""
    site, _, layer = name.rpartition(".")
    # `int` raises ValueError for a number with thousands of digits.
    if not site or not layer.isascii() or not layer.isdigit() or len(layer) > 9:
        raise FileError(f"{shown(name)} names no stream; streams are `site.layer`.")
    return site, int(layer)
