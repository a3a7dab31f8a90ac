"""The steering fork's captures, which send a request's rows to sinks, and report the results.

    capture={"filesystem": {"request_id": "q-42", "tag": "run-7",
                            "hooks": {"post_block": [12], "pre_attn": "all"},
                            "positions": "last_prompt"}}
    output.capture_results["filesystem"].status     # pending, ok, partial_error, error
    output.capture_results["filesystem"].payload    # the paths of the files
    read_request("/data/captures/run-7/q-42")[12, "post_block"].array

A consumer is a sink that the operator has configured (`additional_config={"scope": {"sinks":
...}}`). The name of a consumer is `filesystem`, or the name of a plugin's sink.

Owns:  the translation of captures to Reads, CaptureResult, and the fork's reader of files.
Runs:  in the front-end. The reader of files runs in any process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from vllm_scope.compat.bounds import MOST, Room, few, few_fields, parsed
from vllm_scope.compat.steering_http.vectors import HOOKS
from vllm_scope.engine.frontend.translators import called, give
from vllm_scope.errors import SpecError, shown
from vllm_scope.files import open as open_files
from vllm_scope.request.actions import MEMORY, Read, action_from_json
from vllm_scope.request.sites import ALIASES, Sites
from vllm_scope.results.result import ScopeResult
from vllm_scope.sinks.options import FILESYSTEM
from vllm_scope.vectors.hooks import site_of
from vllm_scope.vectors.module import MAX_LAYER

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput

WHERE = "capture"
#: Maps the words that a capture can use for positions to selectors.
_POSITIONS = {
    "last_prompt": "last_prompt",
    "all_prompt": "prompt",
    "all_generated": "generated",
    "all": "all",
}
_FIELDS = ("request_id", "tag", "hooks", "positions")
_STATUS = {"ok": "ok", "partial": "partial_error", "error": "error"}


@dataclass
class FilesystemCaptureRequest:
    """A capture to the consumer `filesystem`. A dict with the same fields is also possible.

    Attributes:
        request_id: the name of the files.
        tag: the folder of the files, below the root.
        hooks: maps each hook to a list of layers, to "all", or to an object with the fields
            {"layers": [...], "ranges": [[first, last], ...]}.
        positions: last_prompt, all_prompt, all_generated, all, or a list of positions.
        layout: must be None, because the operator sets the layout of the files.
    """

    request_id: str
    tag: str
    hooks: dict[str, object]
    positions: str | list[int]
    layout: str | None = None


@dataclass
class CaptureResult:
    """The result of one request's capture at one consumer.

    Attributes:
        status: "pending" while the request runs, then "ok", "partial_error" or "error".
            "partial_error" means that rows are missing. The status stays "pending" if the sink does
            not answer in time.
        error: the reason for the status, if the status is not "ok".
        payload: the paths of the files, for the consumer `filesystem`. An HTTP request without the
            operator's key gets only the names of the files. For another consumer, the payload is
            the details of the sink's manifest.
    """

    status: str
    error: str | None = None
    payload: object = None

    def to_json(self) -> dict[str, object]:
        """This result in the JSON form of the fork's server, where the payload is an object."""
        payload = {"items": self.payload} if isinstance(self.payload, list) else self.payload
        return {"status": self.status, "error": self.error, "payload": payload or {}}


def reads_of(capture: object, sites: Sites, room: Room) -> list[tuple[Read, dict[str, str]]]:
    """One Read for each hook of each consumer. With each Read comes a dict for error texts, which
    maps the Read's fields to the names that the caller used.

    Args:
        room: counts the request's reads and positions.

    Raises:
        SpecError: a value has a wrong form, or the request has too many values. The engine refuses
            an unknown consumer later, when the request enters the engine.
    """
    consumers = few_fields(parsed(capture, WHERE), MOST["reads"], "consumers", WHERE)
    return [
        one
        for consumer, wanted in consumers.items()
        for one in _reads_to(consumer, wanted, f"{WHERE}[{shown(consumer)}]", sites, room)
    ]


def _reads_to(
    consumer: object, wanted: object, where: str, sites: Sites, room: Room
) -> Iterator[tuple[Read, dict[str, str]]]:
    if is_dataclass(wanted) and not isinstance(wanted, type):
        wanted = asdict(wanted)
    given = few_fields(wanted, len(_FIELDS) + 1, "fields", where)
    fields = {k: v for k, v in given.items() if v is not None}
    if consumer == MEMORY:
        raise SpecError(
            f"{WHERE} has 'memory', which is no consumer; rows come to output.scope with "
            "vllm_scope.Read."
        )
    if "layout" in fields:
        raise SpecError(
            f"{where} has the layout {shown(fields['layout'])}; only the operator sets it: "
            "additional_config['scope'].sinks.filesystem.layout. Leave it out."
        )
    if not set(fields) <= set(_FIELDS) or not fields.get("hooks"):
        raise SpecError(
            f"{where} has {shown(sorted(fields, key=str))}; its fields are {', '.join(_FIELDS)}, "
            "and hooks says what is read."
        )
    positions, at = fields.get("positions", "last_prompt"), f"{where}['positions']"
    place = f"{where}['hooks']"
    for hook, layers in few_fields(fields["hooks"], len(ALIASES), "hooks", place).items():
        room.take("reads", 1, where)
        if isinstance(positions, list | tuple):
            room.take("positions", len(positions), at)
        site, path = site_of(hook, place), f"{place}[{hook!r}]"
        words = {
            "": path, ".layers": path, ".site": path, ".tokens": at, ".to": f"{WHERE}'s consumer",
            ".tag": f"{where}['tag']", ".name": f"{where}['request_id']",
        }  # fmt: skip
        with called({f"Read{end}": word for end, word in words.items()}):
            body = {
                "site": site, "layers": layers_of(layers, path, sites.num_layers),
                "tokens": positions_of(positions, at), "to": consumer, "tag": fields.get("tag"),
                "name": fields.get("request_id"),
            }  # fmt: skip
            read = action_from_json(Read, body, "Read")
        yield read, words


def positions_of(positions: object, where: str) -> str | list[object]:
    if isinstance(positions, str):
        if positions not in _POSITIONS:
            raise SpecError(
                f"{where} is {shown(positions)}; it must be one of {', '.join(_POSITIONS)}, or a "
                "list."
            )
        return _POSITIONS[positions]
    if not isinstance(positions, list | tuple) or not positions:
        raise SpecError(
            f"{where} is {shown(positions)}; it must be a word, or a list of positions."
        )
    return list(positions)


def layers_of(layers: object, where: str, num_layers: int = MAX_LAYER + 1) -> object:
    """Translate the layers of a capture to the layers of a Read. Ranges become layer numbers.

    Args:
        num_layers: the number of layers of the model, or by default the largest possible number.
    """
    if not isinstance(layers, Mapping):
        few(layers, num_layers, "layers", where)
        return layers
    few(layers, 2, "fields", where)
    if not layers or not set(layers) <= {"layers", "ranges"}:
        raise SpecError(
            f"{where} has {shown(sorted(layers, key=str))}; its fields are layers, ranges."
        )
    for name, value in layers.items():
        few(value, num_layers, name, where)
        if value is not None and not isinstance(value, list | tuple):
            raise SpecError(f"{where}[{name!r}] is {shown(value)}; it must be a list.")
    found = list(layers.get("layers") or [])
    for pair in layers.get("ranges") or []:
        sane = isinstance(pair, list | tuple) and len(pair) == 2
        if not sane or any(type(end) is not int for end in pair) or not 0 <= pair[0] <= pair[1]:
            raise SpecError(
                f"{where} has the range {shown(pair)}; a range is [first, last], from 0."
            )
        if pair[1] >= num_layers:
            raise SpecError(
                f"{where} has the range {shown(pair)}; the last possible layer is {num_layers - 1}."
            )
        found += range(pair[0], pair[1] + 1)
    return found


def decorate(
    output: RequestOutput, completion: CompletionOutput, consumers: tuple[str, ...]
) -> None:
    give(output, completion, "capture_results", results_of(completion.scope, consumers))


class _Files(msgspec.Struct):
    """The details that the sink `filesystem` reports about a request."""

    paths: list[str] = []


def results_of(result: ScopeResult, consumers: tuple[str, ...]) -> dict[str, CaptureResult]:
    return {consumer: _result_of(consumer, result) for consumer in consumers}


def _result_of(consumer: str, result: ScopeResult) -> CaptureResult:
    manifest = result.manifests.get(consumer)
    if manifest is None:
        return CaptureResult("error" if result.error else "pending", result.error)
    payload: object = manifest.details
    if consumer == FILESYSTEM:  # an HTTP request gets paths only with the operator's key
        said = msgspec.convert(manifest.details, list[_Files])
        payload = [path for one in said for path in one.paths] or manifest.files
    return CaptureResult(_STATUS[manifest.status], manifest.reason, payload)


@dataclass
class CaptureEntry:
    """The captured rows of one layer at one hook.

    Attributes:
        array: the rows, [num_rows, hidden_size]. numpy has no bfloat16, so the bits of bfloat16
            rows are in an array of uint16.
        dtype: the name of the rows' dtype.
        positions: the rows' absolute positions.
    """

    layer: int
    hook: str
    array: np.ndarray
    dtype: str
    positions: list[int]


def read_request(path: str | Path) -> dict[tuple[int, str], CaptureEntry]:
    """Read the rows of a captured request, by layer and hook.

    Args:
        path: root/tag/request_id, for any layout of the files. If a file has only one request, the
            file's path, as in the payload, is also possible.

    Raises:
        FileError: a file cannot be read.
        KeyError: the number of requests at the path is not 1.
    """
    path = Path(path)
    if path.is_file():
        found = list(open_files(path))
    else:
        # A file that several requests share is not in the folder of a tag.
        folder = path.parent if path.parent.is_dir() else path.parent.parent
        found = open_files(folder).find(name=path.name, tag=path.parent.name)
    if len(found) != 1:
        raise KeyError(f"{len(found)} requests are at {path}; vllm_scope.open finds all.")
    entries = {}
    for site, layer in found[0].keys():
        rows = found[0][site, layer]
        bits = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
        hook = HOOKS.get(site, site)
        entries[layer, hook] = CaptureEntry(
            layer, hook, bits.numpy(), str(rows.dtype).removeprefix("torch."),
            found[0].positions(site, layer).tolist(),
        )  # fmt: skip
    return entries
