"""File names from the names that callers give their requests.

Owns:  the mapping from any string to a name that is safe on every file system.

Promise: a name has no separator, is not hidden, not reserved by Windows, and has at most
MAX_CHARS characters. Two different strings have different names.
"""

from __future__ import annotations

import hashlib
import re

from vllm_scope.files.index import RequestRecord

MAX_CHARS = 100
_PLAIN = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_CHARS - 1}}}")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
#: Endings that a name must not have: a folder of that name could take the place of a data file.
_OURS = (".json", ".safetensors", ".npz", ".")


def clean(text: str) -> str:
    """The string itself if it is safe; else its safe characters, `~` and a digest."""
    if _PLAIN.fullmatch(text) and not _RESERVED.fullmatch(text) and not text.endswith(_OURS):
        return text
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", text)[: MAX_CHARS - 20]
    return f"{safe}~{digest(text)}"


def digest(text: str) -> str:
    """A hash of the text, as 16 hexadecimal digits."""
    return hashlib.blake2s(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def place(record: RequestRecord) -> str:
    """The path of a request's file, below the root and without its suffix.

    A request with a name always gets the same path in the folder of its owner and tag, so a later
    request of this owner, tag and name replaces its file. The path of a request without a name has
    a digest of its uid: every engine counts its requests from zero, and a second run must not
    overwrite the first.
    """
    stem = clean(record.name) if record.name is not None else clean(record.request_id)
    if record.name is None:
        stem = f"{stem}~{digest(record.uid)}"
    if record.child:
        stem += f"~c{record.child}"
    if record.num_stages > 1:
        stem += f"~s{record.stage}of{record.num_stages}"
    folders = [] if record.tag is None else [clean(record.tag)]
    if record.owner:
        folders.insert(0, f"key-{clean(record.owner)}")
    return "/".join([*folders, stem])
