"""How one request ended at one sink.

Owns:  Manifest.
From:  reports.   To: results (`result.manifests`), server.encode.
"""

from __future__ import annotations

import re

import msgspec

from vllm_scope.files.index import STATUSES, Status

#: A relative name of a file: no URL, no absolute path, no `..`, no path of another system.
_RELATIVE = re.compile(r"(?![/~])(?!(?:.*/)?\.\.(?:/|$))[^\\:]+", re.DOTALL)


class Manifest(msgspec.Struct, frozen=True):
    """How one request ended at one sink: `result.manifests[sink]`.

    Attributes:
        expected, delivered, dropped: numbers of rows and scores.
        files: the files that have these rows and scores.
        streams: `site.layer` (or a probe's name) -> shape, dtype, codec, file.
        details: `Report.details` of each stage.
        said: True if the reason or the streams contain a plugin's own text.
    """

    status: Status
    reason: str | None
    expected: int
    delivered: int
    dropped: int
    files: list[str] = []
    streams: dict[str, dict[str, object]] = {}
    details: list[dict[str, object]] = []
    said: bool = False

    def public(self, sink: str) -> Manifest:
        """The manifest for API keys other than the operator's: without paths, and without texts
        of exceptions and plugins, which may contain paths. `files` keeps only relative names."""
        reason, streams = self.reason, self.streams
        if self.status == "error":
            reason = f"sink {sink!r} failed; the server's log says why"
        elif self.said and reason is not None:
            reason = f"sink {sink!r} gives a reason, which the server's operator is told"
        if self.said:
            known = ("shape", "dtype", "codec")
            streams = {
                name: {key: facts[key] for key in known if key in facts}
                for name, facts in streams.items()
            }
        return msgspec.structs.replace(
            self, reason=reason, streams=streams, details=[],
            files=[file for file in self.files if _RELATIVE.fullmatch(file)],
        )  # fmt: skip

    def joined(self, other: Manifest) -> Manifest:
        """One manifest for two stages: this stage and the stage of `other`."""
        worse = max(self, other, key=lambda m: STATUSES.index(m.status))
        return Manifest(
            worse.status, worse.reason,
            self.expected + other.expected, self.delivered + other.delivered,
            self.dropped + other.dropped, [*self.files, *other.files],
            self.streams | other.streams, [*self.details, *other.details],
            self.said or other.said,
        )  # fmt: skip
