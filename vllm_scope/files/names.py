"""Makes file names from the names that callers give their requests.

Owns:  `clean` (turns any string into a name that is safe on every file system), `digest`, `place`.

Promise: a name from `clean` has no path separator and at most MAX_CHARS characters. The name does
not begin with a dot, and is not a name that Windows reserves. Two different strings get different
names.
"""

from __future__ import annotations

import hashlib
import re

from vllm_scope.files.index import RequestRecord

MAX_CHARS = 100
_PLAIN = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_CHARS - 1}}}")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
#: Endings that a name from `clean` must not have. A folder with the name `x.npz`, for example,
#: could have the same path as the data file of a request with the name `x`.
_OURS = (".json", ".safetensors", ".npz", ".")


def clean(text: str) -> str:
    """Returns a safe string unchanged. For any other string, returns the beginning of the string
    with `_` instead of unsafe characters, then `~` and a digest of the whole string."""
    if _PLAIN.fullmatch(text) and not _RESERVED.fullmatch(text) and not text.endswith(_OURS):
        return text
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", text)[: MAX_CHARS - 20]
    return f"{safe}~{digest(text)}"


def digest(text: str) -> str:
    """A hash of the text, as 16 hexadecimal digits."""
    return hashlib.blake2s(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def place(record: RequestRecord) -> str:
    """The path of a request's file, below the root and without its suffix.

    If the request has a name, the path depends only on owner, tag, name, completion and pipeline
    stage. A later request with the same owner, tag and name replaces the file. If the request has
    no name, the path has a digest of the uid. Every engine counts request ids from zero. Without
    the digest, a second run would overwrite earlier files.
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
