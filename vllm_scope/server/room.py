"""Counts the bytes of files for each API key and for all keys together, and checks the limits.

Owns:  Room.
Runs:  in each API server process. The store holds its lock when it calls `charge`.
From:  results.budget (the limit of one key).   To: store.
"""

from __future__ import annotations

from vllm_scope.errors import CapacityError
from vllm_scope.results.budget import fits, most_of_one

#: A file counts as at least this many bytes. In this way, the limit of the bytes also limits the
#: number of files.
LEAST_BYTES = 64 << 10


class Room:
    """The bytes that are counted for files, by API key.

    Attributes:
        most_bytes: limit of the bytes of all files. `budget.fits` decides which part of the limit
            one API key can use.
        num_bytes: the bytes that are counted for all files together.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._held: dict[str, int] = {}

    def charge(self, owner: str, more: int) -> None:
        """Add `more` bytes to the count of a key's files. If `more` is negative, bytes are
        freed."""
        self.num_bytes += more
        self._held[owner] = self._held.get(owner, 0) + more
        if not self._held[owner]:
            del self._held[owner]

    def fits(self, num_bytes: int, owner: str) -> bool:
        return fits(self._held.get(owner, 0), self.num_bytes, num_bytes, self.most_bytes)

    def check(self, num_bytes: int, owner: str) -> None:
        """Raises CapacityError if a key has no room for a file of `num_bytes` bytes now."""
        most = most_of_one(self.most_bytes)
        if num_bytes > most:
            raise CapacityError(
                f"the result takes {num_bytes:,} bytes; this server keeps at most {most:,} of one "
                "key (3/4 of VLLM_SCOPE_RESULTS_MIB). Read fewer tokens or layers."
            )
        if not self.fits(num_bytes, owner):
            own = self._held.get(owner, 0)
            raise CapacityError(
                f"results of {own:,} bytes of this key wait to be fetched, and one more takes "
                f"{num_bytes:,} bytes; the results of a key may take at most three times the bytes "
                f"that are free, of {self.most_bytes:,} in all. Fetch results with ?delete=true, "
                "or try again later."
            )
