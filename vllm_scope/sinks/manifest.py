"""How one request ended at one sink.

Owns:  Manifest.
From:  reports.   To: results (`result.manifests`), server.encode.
"""

from __future__ import annotations

import re

import msgspec

from vllm_scope.files.index import STATUSES, Status

#: A relative file name. The pattern refuses URLs, absolute paths, Windows paths and `..`.
_RELATIVE = re.compile(r"(?![/~])(?!(?:.*/)?\.\.(?:/|$))[^\\:]+", re.DOTALL)


class Manifest(msgspec.Struct, frozen=True):
    """How one request ended at one sink: `result.manifests[sink]`.

    Attributes:
        expected, delivered, dropped: number of expected, of delivered and of dropped rows and
            scores.
        files: the names of the files that have the rows and scores.
        streams: shape, dtype, codec and file of each stream, by `site.layer`. For the scores of a
            probe, the key is the probe's name.
        details: `Report.details` of each pipeline stage.
        said: True if the reason or the streams have text that a plugin wrote.
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
        """The manifest for senders who are not the operator. This manifest has no texts of
        exceptions, and no texts of a plugin whose report is not `public`, because such texts may
        contain paths. `files` has only relative names."""
        reason, streams = self.reason, self.streams
        if self.status == "error":
            reason = f"sink {sink!r} failed; the server's log says why"
        elif self.said and reason is not None:
            reason = f"sink {sink!r} has a reason that only the server's operator can see"
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
        """One manifest for all pipeline stages of this manifest and of `other`."""
        worse = max(self, other, key=lambda m: STATUSES.index(m.status))
        return Manifest(
            worse.status, worse.reason,
            self.expected + other.expected, self.delivered + other.delivered,
            self.dropped + other.dropped, [*self.files, *other.files],
            self.streams | other.streams, [*self.details, *other.details],
            self.said or other.said,
        )  # fmt: skip
