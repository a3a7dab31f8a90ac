"""Bytes of files in a bounded folder: of each key, and of all keys together.

Owns:  Room.
Runs:  in each API server process, under the store's lock.
From:  results.budget (what one key may have).   To: store.
"""

from __future__ import annotations

from vllm_scope.errors import CapacityError
from vllm_scope.results.budget import fits, most_of_one

#: Every file counts for at least so many bytes, which bounds the number of files.
LEAST_BYTES = 64 << 10


class Room:
    """Charged bytes of files, by key.

    Attributes:
        most_bytes: limit of all files together; `budget.fits` decides how much of it one key may
            have.
        num_bytes: charged bytes of all files.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._held: dict[str, int] = {}

    def charge(self, owner: str, more: int) -> None:
        """Count `more` bytes for a key's files; a negative number gives bytes back."""
        self.num_bytes += more
        self._held[owner] = self._held.get(owner, 0) + more
        if not self._held[owner]:
            del self._held[owner]

    def fits(self, num_bytes: int, owner: str) -> bool:
        return fits(self._held.get(owner, 0), self.num_bytes, num_bytes, self.most_bytes)

    def check(self, num_bytes: int, owner: str) -> None:
        """Raises CapacityError if so many bytes do not fit now."""
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
                f"{num_bytes:,}; a key's may be three times what is free of "
                f"{self.most_bytes:,}. Fetch them with ?delete=true, or send this again later."
            )
