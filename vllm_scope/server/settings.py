"""Limits of the HTTP side and the operator's key, from the environment.

They do not come from `additional_config`, because it is part of the key of vLLM's compile cache and
is logged.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_scope.errors import ConfigError, shown
from vllm_scope.results.allocator import memory_bytes
from vllm_scope.vectors.containers import MAX_BYTES

#: The header that has the operator's key.
ADMIN_KEY = "X-Scope-Admin-Key"
#: The largest number of bytes of a body below /v1/scope: a module, and the header that safetensors
#: adds.
MAX_OPERATOR_BYTES = MAX_BYTES + (1 << 20)


@dataclass(frozen=True)
class ServerSettings:
    """The limits of results, bodies and sweeps, and the operator's key.

    Attributes:
        admin_key: VLLM_SCOPE_ADMIN_KEY; if None, nothing can be changed over HTTP.
        inline_bytes: VLLM_SCOPE_INLINE_KIB: if the rows of a choice take at most this many bytes,
            they are inside the answer, else in a file.
        binary_bytes: the same limit for binary answers: also VLLM_SCOPE_INLINE_KIB, but 8 MiB if
            the variable is not set.
        rows_bytes: VLLM_SCOPE_ROWS_MIB: rows and scores of the running requests of an API
            server process; None: the processes share a quarter of the memory. One key may take
            three times what is free. A request whose prompt does not fit is refused; one whose
            generated tokens do not fit loses its rows.
        results_bytes: VLLM_SCOPE_RESULTS_MIB: files of an API server process. One key may take
            three times what is free. A request whose file does not fit is refused.
        results_ttl_s: VLLM_SCOPE_RESULTS_TTL_S: how long a file is kept.
        results_dir: VLLM_SCOPE_RESULTS_DIR: where the folder of files is made.
        body_bytes: VLLM_SCOPE_MAX_BODY_MIB: of a completion or chat request.
        write_timeout_s: VLLM_SCOPE_WRITE_TIMEOUT_S: if a client reads nothing of an answer with a
            scope for so long, the client is disconnected.
        sweep_cells: VLLM_SCOPE_SWEEP_CELLS: most cells of one sweep.
        sweep_share: VLLM_SCOPE_SWEEP_SHARE: the part of a step's sequences and tokens that the
            cells of all sweeps may take together, above 0 and at most 1. While the engine has other
            requests, it runs cells for `sweep_share / 5` of the time: a tenth with 0.5.
    """

    admin_key: str | None
    inline_bytes: int
    binary_bytes: int
    rows_bytes: int | None
    results_bytes: int
    results_ttl_s: float
    results_dir: Path
    body_bytes: int
    write_timeout_s: float
    sweep_cells: int
    sweep_share: float

    @staticmethod
    def from_environment(environ: Mapping[str, str] = os.environ) -> ServerSettings:
        """The settings in `environ`. Raises ConfigError for a limit that is not a number above 0,
        or for a sweep_share above 1."""
        rows = environ.get("VLLM_SCOPE_ROWS_MIB") and _number(environ, "VLLM_SCOPE_ROWS_MIB", 0)
        return ServerSettings(
            environ.get("VLLM_SCOPE_ADMIN_KEY") or None,
            int(_number(environ, "VLLM_SCOPE_INLINE_KIB", 256) * 1024),
            int(_number(environ, "VLLM_SCOPE_INLINE_KIB", 8192) * 1024),
            int(rows * 2**20) if rows else None,
            int(_number(environ, "VLLM_SCOPE_RESULTS_MIB", 8192) * 2**20),
            _number(environ, "VLLM_SCOPE_RESULTS_TTL_S", 600),
            Path(environ.get("VLLM_SCOPE_RESULTS_DIR") or tempfile.gettempdir()),
            int(_number(environ, "VLLM_SCOPE_MAX_BODY_MIB", 256) * 2**20),
            _number(environ, "VLLM_SCOPE_WRITE_TIMEOUT_S", 60),
            math.ceil(_number(environ, "VLLM_SCOPE_SWEEP_CELLS", 1 << 16)),
            _share(environ, "VLLM_SCOPE_SWEEP_SHARE", 0.5),
        )

    def is_operators(self, key: str) -> bool:
        """True if `key` is the operator's key; always False if the server has no such key."""
        # Digests are compared, so that the time does not depend on the key's length either.
        expected = hashlib.sha256((self.admin_key or "").encode()).digest()
        given = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        return secrets.compare_digest(given, expected) and self.admin_key is not None

    def rows_of(self, num_processes: int) -> int:
        """Bytes that each of a server's API server processes may hold for rows and scores."""
        return self.rows_bytes or memory_bytes() // (4 * max(1, num_processes))


def _share(environ: Mapping[str, str], name: str, default: float) -> float:
    value = _number(environ, name, default)
    if value > 1:
        raise ConfigError(f"{name} is {value:g}; it must be a number above 0 and at most 1.")
    return value


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise ConfigError(f"{name} is {shown(text)}; it must be a number above 0.")
    return value
