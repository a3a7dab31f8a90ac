"""The options of a writer of captured rows.

Owns:  FileOptions, and the checks of its values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator

from vllm_scope.codecs import CODECS, make_codec
from vllm_scope.codecs.base import MAX_HIDDEN_SIZE
from vllm_scope.errors import ConfigError, shown
from vllm_scope.request.options import checked

LayoutName = Literal["per_request", "packed", "sharded", "npz"]
CodecName = Literal["none", "fp16", "fp8", "int8", "full8", "rp8", "topk8", "zstd"]


class FileOptions(BaseModel):
    """Where and how a writer writes files.

    Attributes:
        root: a folder, or a URL that fsspec supports. If the folder does not exist, the writer
            makes the folder. All files are written below the root.
        layout: `per_request` and `npz` write one file per request. `packed` writes one file for
            several requests, with separate tensors for each request. `sharded` writes large files
            whose tensors have the rows of many requests.
        codec: see docs/codecs.md.
        codec_options: options of the codec.
        fsync: if True, call fsync on each file before the file becomes visible, then call fsync on
            the folder of the file.
        file_mib: the layouts `packed` and `sharded` begin a new file when the tensors of a file
            have this size. They also begin a new file when the header of a file has about 32 MiB.
            `sharded` also begins a new file when the index of a file has 512 MiB.
        packed_requests: the layout `packed` begins a new file after this number of requests.
        mode: the permissions of local files, as an octal number, such as '640'. If a user may read
            the files, the user may also enter the folders that the writer makes. The permissions of
            an existing root do not change.
        key_folders: only for requests over HTTP, in the layouts `per_request` and `npz`. If True,
            the files of each API key are in a separate folder, whose name is `key-` and a digest.
            If False, all API keys share the folders, and a request may replace the file of another
            API key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: StrictStr = Field(min_length=1)
    layout: LayoutName = "sharded"
    codec: CodecName = "none"
    codec_options: dict[str, object] = Field(default_factory=dict)
    fsync: StrictBool = False
    file_mib: StrictInt = Field(default=256, ge=1, le=1 << 20)
    packed_requests: StrictInt = Field(default=64, ge=1)
    mode: StrictStr = "600"
    key_folders: StrictBool = True

    @field_validator("mode")
    @classmethod
    def _readable_by_its_owner(cls, mode: str) -> str:
        if not re.fullmatch(r"0?6[0246][0246]", mode):
            raise ValueError("it must be 6 and two digits, each 0, 2, 4 or 6, such as '640'")
        return mode

    @property
    def file_bytes(self) -> int:
        return self.file_mib << 20

    @property
    def file_mode(self) -> int:
        return int(self.mode, 8)

    @staticmethod
    def parse(body: object) -> FileOptions:
        """The checked options. Raises ConfigError if an option is wrong. The text of the error has
        the option, its value, and the allowed values."""
        if not isinstance(body, Mapping):
            raise ConfigError(f"the file options are {shown(body)}; they must be an object.")
        options = checked(FileOptions, body, "file option ")
        codec = CODECS[options.codec]
        own = sorted(set(codec.model_fields) - {"codec", "hidden_size", "dtype"})
        for name in options.codec_options:
            if name not in own:
                raise ConfigError(
                    f"codec_options has {shown(name)}; codec {options.codec!r} takes "
                    f"{', '.join(own) or 'no options'}."
                )
        # Check the values of the codec's options before rows arrive. The codec checks its option
        # `k` against the width of the rows. This width is not known yet, so the check uses a width
        # that allows this `k`.
        k = options.codec_options.get("k")
        width = min(k, MAX_HIDDEN_SIZE) if isinstance(k, int) and k > 0 else 1024
        make_codec(options.codec, width, torch.float32, **options.codec_options)
        if options.layout == "sharded" and not codec.rowwise:
            raise ConfigError(
                f"layout 'sharded' reads single rows, which codec {options.codec!r} cannot "
                "give; use layout 'per_request' or 'packed', or another codec."
            )
        return options
