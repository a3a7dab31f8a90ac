"""The vLLM Activation Capture System writes each request's residual stream to small .npz files.

    VLLM_ACT_CAPTURE=1 VLLM_ACT_MODE=rp8 VLLM_ACT_OUTDIR=acts python serve.py

The option `worker_cls="vllm_scope.compat.act_capture.WorkerCapture"` also turns capture on. Each
completion that has ended has a folder with manifest.json and one .npz file per layer.

    output.activation_manifest                  a dict, or None until the completion has ended
    load_manifest("acts/0~4f.../manifest.json").load(12)    # [num_positions, hidden]

VLLM_ACT_CAPTURE   The value 1, true, on or yes turns capture on.
VLLM_ACT_MODE      The codec of the rows, which is rp8 (the default), full8 or topk8.
VLLM_ACT_RP_K      How many numbers rp8 keeps for a row (docs/codecs.md has the default).
VLLM_ACT_RP_SEED   The seed of the random projection of rp8, by default 0.
VLLM_ACT_TOPK_K    How many values of a row topk8 keeps, by default 64.
VLLM_ACT_RETURN    The value sharded (the default) or gathered, which is written to the manifest.
                   The files are the same for both values, because each rank has the whole stream.
VLLM_ACT_OUTDIR    The root of the completions' folders, by default the folder activations.

The front-end runs this code, and writes the files when a completion ends. If no row is missing, row
p of a file is the row of position p. The model never processes the token that was sampled last.
Therefore no file has a row of this token. docs/codecs.md describes the precision of each mode.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NotRequired, TypedDict
from zipfile import ZipFile

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm_scope.codecs import Codec, codec_from, make_codec
from vllm_scope.engine.frontend.translators import Translation, give, named
from vllm_scope.errors import ConfigError, FileError, ScopeError, SpecError, shown
from vllm_scope.files.names import clean, digest
from vllm_scope.files.publish import LocalPublisher, write_bytes
from vllm_scope.request.actions import Read
from vllm_scope.request.sites import Sites
from vllm_scope.results.result import ScopeResult
from vllm_scope.vectors.containers import check_compression

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput
    from vllm.v1.worker.worker_base import WorkerBase

logger = logging.getLogger("vllm.vllm_scope")

SITE = "resid_post"
#: Maps each mode, which is a codec's name, to the variables that set the options of the codec.
MODES = {
    "rp8": {"k": "VLLM_ACT_RP_K", "seed": "VLLM_ACT_RP_SEED"},
    "full8": {},
    "topk8": {"k": "VLLM_ACT_TOPK_K"},
}
RETURNS = ("sharded", "gathered")
#: The name of an array in each .npz file. The array has the codec's metadata, as bytes of JSON.
METADATA = "codec"


@dataclass(frozen=True)
class Settings:
    """The checked values of the environment variables.

    Raises:
        ConfigError: a variable has a value that is not allowed.
    """

    mode: str
    options: Mapping[str, int]
    returned: str
    folder: str

    @staticmethod
    def read(environment: Mapping[str, str]) -> Settings:
        mode = _word(environment, "VLLM_ACT_MODE", tuple(MODES))
        options = {
            option: _number(environment[name], name)
            for option, name in MODES[mode].items()
            if name in environment
        }
        returned = _word(environment, "VLLM_ACT_RETURN", RETURNS)
        return Settings(mode, options, returned, environment.get("VLLM_ACT_OUTDIR", "activations"))


def _word(environment: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = environment.get(name, allowed[0])
    if value not in allowed:
        raise ConfigError(f"{name} is {shown(value)}; it must be one of {', '.join(allowed)}.")
    return value


def _number(value: str, name: str) -> int:
    if not value.isdecimal():
        raise ConfigError(f"{name} is {shown(value)}; it must be a whole number.")
    return int(value)


class LayerFile(TypedDict):
    """The .npz file of one layer.

    Attributes:
        path: the path of the file, relative to VLLM_ACT_OUTDIR.
        bytes: the number of bytes in the codec's arrays.
    """

    path: str
    shape: list[int]
    dtype: str
    bytes: int


#: The fields of manifest.json.
Body = TypedDict(
    "Body",
    {
        "request_id": str, "sequence": int, "status": str, "mode": str, "return": str, "site": str,
        "compression": Mapping[str, object], "num_prompt_tokens": int, "token_ids": list[int],
        "layers": dict[str, LayerFile], "path": NotRequired[str], "error": NotRequired[str],
    },
)  # fmt: skip


def translate(values: Mapping[str, object], sites: Sites) -> Translation:
    """A Read of every layer, and a function that writes the files when a completion ends.

    Raises:
        SpecError: an environment variable has a wrong value.
    """
    try:
        settings = Settings.read(os.environ)
        dtype = getattr(torch, sites.dtype)
        codec = make_codec(settings.mode, sites.hidden_size, dtype, **settings.options)
    except ConfigError as error:
        raise SpecError(str(error)) from None

    def decorate(output: RequestOutput, completion: CompletionOutput) -> None:
        ended = completion.finish_reason is not None
        manifest = _write(settings, codec, output.request_id, completion) if ended else None
        give(output, completion, "activation_manifest", manifest)
        if output.metrics is not None:
            output.metrics.extras = {"activation_manifest": output.activation_manifest}

    read = Read(SITE, layers="all")
    words = dict.fromkeys(("", ".site"), "the stream that VLLM_ACT_CAPTURE reads")
    return Translation((read,), decorate, paths=named([(read, words)]))


def _write(settings: Settings, codec: Codec, request_id: str, completion: CompletionOutput) -> Body:
    """Write the files of a completion, and return the completion's manifest. If a write fails, the
    manifest has the error."""
    result: ScopeResult = completion.scope
    # Every engine counts its requests from 0, so a second run has the same request ids. The second
    # run must not replace the files of the first run.
    unique = digest(f"{request_id} {secrets.token_hex(8)}")
    folder = f"{clean(str(request_id))}~{unique}"
    manifest: Body = {
        "request_id": request_id, "sequence": completion.index, "status": result.status,
        "mode": settings.mode, "return": settings.returned, "site": SITE,
        "compression": codec.metadata(), "num_prompt_tokens": result.num_prompt,
        "token_ids": result.token_ids, "layers": {},
    }  # fmt: skip
    try:
        publisher = _publisher(settings.folder)
        for layer in (layer for site, layer in result.keys() if site == SITE):
            rows, positions = result[SITE, layer], result.positions(SITE, layer).numpy()
            name = f"{folder}/sequence_{completion.index}_layer_{layer:03d}.npz"
            parts = {k: v.numpy() for k, v in codec.encode(rows.contiguous()).items()}
            publisher.publish({name: partial(_save, parts, positions, codec)})
            manifest["layers"][str(layer)] = {
                "path": name,
                "shape": list(rows.shape),
                "dtype": str(rows.dtype).removeprefix("torch."),
                "bytes": sum(part.nbytes for part in parts.values()),
            }
        path = f"{folder}/manifest.json"
        body = json.dumps(manifest, indent=2).encode()
        publisher.publish({path: partial(write_bytes, body=body)})
    except (ScopeError, OSError) as error:
        logger.error("vllm-scope: request %s was not written: %s", request_id, error)
        return {**manifest, "status": "error", "error": str(error)}
    return {**manifest, "path": str(Path(settings.folder) / path)}


@cache
def _publisher(folder: str) -> LocalPublisher:
    """Return the publisher that this process uses for all files of a folder."""
    return LocalPublisher(Path(folder))


def _save(
    parts: Mapping[str, np.ndarray], positions: np.ndarray, codec: Codec, file: BinaryIO
) -> None:
    metadata = np.frombuffer(json.dumps(codec.metadata()).encode(), np.uint8)
    np.savez(file, allow_pickle=False, **parts, positions=positions, **{METADATA: metadata})


def load_npz(path: str | Path) -> tuple[Tensor, Tensor]:
    """The rows of one file, and the positions of the rows.

    The rows have the shape [num_positions, hidden_size] and the model's dtype.

    Raises:
        FileError: the file was not written by this module, or is damaged.
    """
    try:
        with ZipFile(path) as archive:
            check_compression(archive)
        with np.load(path, allow_pickle=False) as arrays:
            codec = codec_from(json.loads(arrays[METADATA].tobytes()))
            positions = torch.from_numpy(arrays["positions"])
            parts = {name: torch.from_numpy(arrays[name]) for name in codec.part_names}
        return codec.decode(parts, len(positions)), positions
    except Exception as error:  # zipfile and numpy's parser raise many types of errors
        raise FileError(f"{path} is not a capture that can be read: {error}.") from None


@dataclass(frozen=True)
class Manifest:
    """The manifest of one completion, as read from disk.

    Attributes:
        path: the path of manifest.json.
        body: the content of manifest.json. `output.activation_manifest` also has the field `path`.
    """

    path: Path
    body: Body

    @property
    def layers(self) -> list[int]:
        return sorted(int(layer) for layer in self.body["layers"])

    def load(self, layer: int) -> Tensor:
        """The rows of a layer, [num_positions, hidden_size].

        Raises:
            KeyError: the layer was not captured.
            FileError: the layer's file is damaged.
        """
        if layer not in self.layers:
            raise KeyError(f"layer {layer} was not captured; there are {self.layers}.")
        name = Path(self.body["layers"][str(layer)]["path"]).name
        return load_npz(self.path.parent / name)[0]


def load_manifest(path: str | Path) -> Manifest:
    """Read the manifest of one completion. Raises FileError if the file is not a manifest."""
    try:
        return Manifest(Path(path), msgspec.json.decode(Path(path).read_bytes(), type=Body))
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise FileError(f"{path} is not a manifest of captured layers: {error!r}.") from None


def __getattr__(name: str) -> type[WorkerBase]:
    """vLLM's worker class for this platform, under the name `WorkerCapture`. If the option
    `worker_cls` has this name, capture is on."""
    if name != "WorkerCapture":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker
    found: type[WorkerBase] = Worker
    return found
