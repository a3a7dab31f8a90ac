"""Reads the limits of the HTTP side and the operator's key from environment variables.

The settings are not in `additional_config`, because vLLM logs `additional_config` and makes it part
of the compile cache's key.
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

#: Name of the HTTP header that contains the operator's key.
ADMIN_KEY = "X-Scope-Admin-Key"
#: The largest body, in bytes, of a request to a route of this package. The body can contain a
#: steering module of the largest size. 1 MiB is for the module's header.
MAX_OPERATOR_BYTES = MAX_BYTES + (1 << 20)


@dataclass(frozen=True)
class ServerSettings:
    """The limits of results, bodies and sweeps, and the operator's key.

    Attributes:
        admin_key: the operator's key (VLLM_SCOPE_ADMIN_KEY). If None, modules, monitors, sums and
            server-wide edits cannot be changed over HTTP.
        inline_bytes: limit of the bytes of a choice's rows inside a JSON answer
            (VLLM_SCOPE_INLINE_KIB). If the rows take more bytes, the rows go into a file.
        binary_bytes: limit of the bytes of a choice's rows inside a binary answer, from the same
            variable VLLM_SCOPE_INLINE_KIB. If VLLM_SCOPE_INLINE_KIB is not set, the limit is 8 MiB.
        rows_bytes: limit of the bytes of rows and scores of running requests in one API server
            process (VLLM_SCOPE_ROWS_MIB). If `rows_bytes` is None, the API server processes share a
            quarter of the machine's memory. The requests of one API key can take at most three
            times the bytes that are then still free: without other keys, three quarters of the
            limit. If the rows of a request's prompt do not fit, the request is refused. If the rows
            of a request's generated tokens do not fit, the request loses its rows.
        results_bytes: limit of the bytes of the files of one API server process
            (VLLM_SCOPE_RESULTS_MIB). The files of one API key can take at most three times the
            bytes that are then still free. If the file of a request's prompt rows does not fit, the
            request is refused. If the file of its generated tokens does not fit, the rows are lost.
        results_ttl_s: the number of seconds for which a file is kept (VLLM_SCOPE_RESULTS_TTL_S).
        results_dir: the folder in which the folder of files is created (VLLM_SCOPE_RESULTS_DIR).
        body_bytes: limit of the body of a completion or chat request (VLLM_SCOPE_MAX_BODY_MIB).
        write_timeout_s: if a client does not read a piece of an answer within this number of
            seconds, the server disconnects the client (VLLM_SCOPE_WRITE_TIMEOUT_S). This applies to
            answers with a scope, and to the answers of this package's routes.
        sweep_cells: the largest number of cells of one sweep (VLLM_SCOPE_SWEEP_CELLS).
        sweep_share: the part of a step's sequences and tokens that the cells of all sweeps can take
            together, above 0 and at most 1 (VLLM_SCOPE_SWEEP_SHARE). While the engine has other
            requests, the engine runs cells for `sweep_share / 5` of the time.
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
        """The settings in `environ`. Raises ConfigError for a limit that is not a number above 0
        and below 1e9, or for a sweep_share above 1."""
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
        """True if `key` is the operator's key. Always False if the server has no operator's key."""
        # The digests of the two keys are compared, so that the time of the comparison does not
        # depend on a key's length.
        expected = hashlib.sha256((self.admin_key or "").encode()).digest()
        given = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        return secrets.compare_digest(given, expected) and self.admin_key is not None

    def rows_of(self, num_processes: int) -> int:
        """Limit of the bytes of rows and scores in each API server process of a server."""
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
        raise ConfigError(f"{name} is {shown(text)}; it must be a number above 0 and below 1e9.")
    return value
