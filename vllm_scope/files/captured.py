"""One captured request, read from its files. Each pipeline stage of the model has its own file.

Owns:  CapturedRequest, Piece.
From:  reader (finds the files).   To: streams.

Promise: rows are read only when the caller accesses the rows. Each size in an index is checked
against the file before the size is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch
from msgspec import UnsetType
from torch import Tensor

from vllm_scope.codecs import Codec, codec_from
from vllm_scope.errors import ConfigError, FileError, shown
from vllm_scope.files.feature_rows import SUFFIX, features_in
from vllm_scope.files.index import (
    STATUSES,
    IndexedRequest,
    IndexedStream,
    parse_stream,
    stream_name,
)
from vllm_scope.files.streams import OpenFiles, StoredStream
from vllm_scope.request.read_features import NOT_KNOWN
from vllm_scope.request.sites import SiteLayer
from vllm_scope.results.features import SparseFeatures


@dataclass(frozen=True)
class Piece:
    """The part of a request that is in one file.

    Attributes:
        name: the name of the file, relative to the opened folder.
        prefix: the beginning of the names of the request's tensors in the file, such as "3/". If
            the layout is not `packed`, the prefix is "".
    """

    name: str
    prefix: str
    manifest: IndexedRequest


class CapturedRequest:
    """A captured request. Rows are read when the caller accesses the rows.

    Attributes:
        manifest: one manifest for all pipeline stages. `files` are relative to the opened folder.
    """

    def __init__(self, files: OpenFiles, pieces: Sequence[Piece]) -> None:
        self._files = files
        self._pieces = pieces
        self.manifest = _merge(pieces)

    @property
    def name(self) -> str | None:
        """The name that the caller gave the request, `Read(..., name=...)`, or None."""
        return self.manifest.name

    @property
    def status(self) -> str:
        """`ok`, `partial` or `error`. The reason of the status is `manifest.reason`."""
        return self.manifest.status

    @cached_property
    def _piece_of(self) -> dict[SiteLayer, Piece]:
        return {
            parse_stream(name): piece for piece in self._pieces for name in piece.manifest.streams
        }

    def keys(self) -> list[SiteLayer]:
        return sorted(self._piece_of)

    def __contains__(self, stream: object) -> bool:
        return stream in self._piece_of

    def __getitem__(self, stream: SiteLayer) -> Tensor:
        """The rows of a stream, [num_rows, hidden_size], in position order. Raises KeyError,
        FileError."""
        stored = self.stored(stream)
        return stored.rows(0, stored.num_rows)

    def positions(self, site: str, layer: int) -> Tensor:
        """int64 [num_rows]: the absolute positions of the rows."""
        return self.stored((site, layer)).positions

    def at(self, site: str, layer: int, positions: Sequence[int]) -> Tensor:
        """The rows of some positions, in the order of the argument `positions`.

        Raises:
            KeyError: the stream, or one of the positions, was not captured.
            FileError: the file is damaged.
        """
        stored = self.stored((site, layer))
        captured = stored.positions
        wanted = torch.tensor(list(positions), dtype=torch.int64)
        missing = ~torch.isin(wanted, captured)
        if bool(missing.any()):
            raise KeyError(
                f"position {int(wanted[missing][0])} of {site}.{layer} was not captured; "
                f"{len(captured)} positions were"
            )
        index = torch.searchsorted(captured, wanted).clamp(max=len(captured) - 1)
        if not torch.equal(captured[index], wanted):
            raise FileError(f"{stored.name}: positions of {stored.key} are not in order")
        return stored.take(index)

    def features(self, name: str) -> SparseFeatures:
        """The features with this name. Raises KeyError, FileError."""
        streams = [stream for stream in self.keys() if stream[0] == name + SUFFIX]
        if len(streams) != 1:
            named = [site for site, _ in self.keys() if site.endswith(SUFFIX)]
            known = ", ".join(site.removesuffix(SUFFIX) for site in named)
            raise KeyError(
                f"no features called {shown(name)} were captured; captured are {known or 'none'}"
            )
        (stream,) = streams
        indexed = self._piece_of[stream].manifest.streams[stream_name(stream)]
        read = NOT_KNOWN if isinstance(indexed.features, UnsetType) else indexed.features
        rows = self[stream]
        if rows.dtype != torch.float32 or rows.shape[1] % 2:
            raise FileError(
                f"{self._piece_of[stream].name}: rows of {stream_name(stream)} have "
                f"{rows.shape[1]} numbers of {rows.dtype}; rows of features have an even number of "
                "float32. The file is damaged."
            )
        return SparseFeatures(features_in(rows, read), self.positions(*stream))

    @property
    def token_ids(self) -> Tensor:
        """The token ids of prompt and output, int32 [num_tokens]."""
        piece = self._pieces[0]
        manifest = piece.manifest
        tokens = self._files.get(piece.name).tensor(f"{piece.prefix}token_ids")
        last = manifest.first_token + manifest.num_tokens
        counts = manifest.first_token, manifest.num_prompt_tokens, manifest.num_output_tokens
        if min(counts) < 0 or tokens.dim() != 1 or len(tokens) < last:
            raise FileError(
                f"{piece.name} has {list(tokens.shape)} token ids; its index says {last} "
                f"(first, prompt, output: {counts})"
            )
        return tokens[manifest.first_token : last]

    def tokens_at(self, positions: Tensor) -> Tensor:
        """The token ids at the positions of some rows. int32 [n]. Raises FileError if the request
        has no token at one of the positions."""
        tokens = self.token_ids
        outside = (positions < 0) | (positions >= len(tokens))
        if bool(outside.any()):
            raise FileError(
                f"{self!r} has a row at position {int(positions[outside][0])}, and it has "
                f"{len(tokens)} tokens. The file is damaged."
            )
        return tokens[positions]

    @property
    def prompt_ids(self) -> Tensor:
        return self.token_ids[: self.manifest.num_prompt_tokens]

    @property
    def output_ids(self) -> Tensor:
        return self.token_ids[self.manifest.num_prompt_tokens :]

    def stored(self, stream: SiteLayer) -> StoredStream:
        """An object from which the caller can read single rows of the stream. Raises KeyError,
        FileError."""
        if stream not in self._piece_of:
            known = ", ".join(map(stream_name, self.keys())) or "none"
            if not isinstance(stream, tuple):  # a ScopeResult accepts a site alone, such as "embed"
                raise KeyError(
                    f"{stream!r} is not a site and a layer; give both, as in ['embed', 0] (sites "
                    f"without layers have layer 0); captured are {known}"
                )
            raise KeyError(f"{stream!r} was not captured; captured are {known}")
        piece = self._piece_of[stream]
        name = stream_name(stream)
        indexed = piece.manifest.streams[name]
        codec = _codec(indexed, piece.name)
        return StoredStream(
            self._files, piece.name, piece.prefix + name, indexed.first, indexed.shape[0], codec
        )

    def __repr__(self) -> str:
        body = self.manifest
        label = body.name or body.request_id
        return (
            f"<CapturedRequest {label!r} {body.status}: {len(body.streams)} streams, "
            f"{body.delivered} of {body.expected} rows>"
        )


def _codec(stream: IndexedStream, where: str) -> Codec:
    try:
        codec = codec_from(stream.codec)
    except ConfigError as error:
        raise FileError(f"{where}: {error}") from None
    said = codec.hidden_size, codec.dtype
    if said != (stream.shape[1], stream.dtype) or min(stream.first, *stream.shape) < 0:
        raise FileError(f"{where}: its index contradicts itself: {stream}")
    return codec


def _merge(pieces: Sequence[Piece]) -> IndexedRequest:
    """One manifest for all pipeline stages of a request, with the worst of their statuses. If the
    file of a stage is missing, `partial` replaces the status `ok`."""
    first = pieces[0].manifest
    if first.num_stages == 1:
        return msgspec.structs.replace(first, files=[pieces[0].name])
    manifests = [piece.manifest for piece in pieces]
    streams: dict[str, IndexedStream] = {}
    for piece in pieces:
        for name, stream in piece.manifest.streams.items():
            if name in streams:
                raise FileError(f"{name} is in {streams[name].file} and in {piece.name}")
            streams[name] = msgspec.structs.replace(stream, file=piece.name)
    worst = max(manifests, key=lambda m: STATUSES.index(m.status))
    status, reason = worst.status, worst.reason
    missing = sorted(set(range(first.num_stages)) - {m.stage for m in manifests})
    if missing and status == "ok":
        status, reason = "partial", f"stages {missing} of {first.num_stages} are missing"
    return msgspec.structs.replace(
        first,
        status=status,
        reason=reason,
        expected=sum(m.expected for m in manifests),
        delivered=sum(m.delivered for m in manifests),
        dropped=sum(m.dropped for m in manifests),
        files=[piece.name for piece in pieces],
        streams=streams,
    )
