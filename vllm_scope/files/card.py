"""The card of an exported data set: README.md with the front matter that Hugging Face's hub reads.

Owns:  `card_of`.
From:  export.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_scope.files.index import stream_name
from vllm_scope.request.sites import SiteLayer

if TYPE_CHECKING:
    from vllm_scope.files.captured import CapturedRequest

_CARD = """\
---
license:  # choose one; obey the licenses of the texts and of the model
pretty_name: {pretty}
tags:
- activations
- vllm-scope
configs:
- config_name: default
  data_files: "data-*.arrow"
---
# Rows of {models}

What the model computes for each token, read by vllm-scope: {num_rows:,} rows, one for each token,
of {num_requests:,} requests.

| | |
|---|---|
| model | {models} |
| sites and layers | {places} |
| dtype in the captured files | {stored} |
| dtype here | {dtype}; {exact} |

The columns are `request`, `position` (of the token in its request), `token_id`, and a list of
numbers for each site and layer.

```python
import datasets

rows = datasets.load_from_disk("FOLDER").with_format("torch")
rows[:8][{first}]  # [8, {width}]
```
"""


def card_of(
    requests: Sequence[CapturedRequest], widths: Mapping[SiteLayer, int], dtype: str, num_rows: int
) -> str:
    """The text of README.md.

    Args:
        widths: the number of values in a row of each stream.
        dtype: the dtype of the exported rows.
    """
    streams = [r.manifest.streams[stream_name(s)] for r in requests for s in widths]
    dtypes = sorted({stream.dtype for stream in streams})
    codecs = sorted({str(stream.codec["codec"]) for stream in streams} - {"none"})
    names = [stream_name(stream) for stream in widths]
    models = ", ".join(sorted({request.manifest.model for request in requests})) or "no model"
    models = _one_line(models)
    under = f", under the codec {', '.join(codecs)}" if codecs else ""
    return _CARD.format(
        pretty=json.dumps(f"Rows of {models}", ensure_ascii=False), models=_escaped(models),
        num_rows=num_rows,
        num_requests=len(requests), dtype=dtype, exact=_exact(dtypes, dtype),
        places=", ".join(f"{_marked(name)} ({width} values)" for name, width in zip(
            names, widths.values(), strict=True
        )),
        stored=(", ".join(dtypes) or "none") + under, first=json.dumps(names[0]),
        width=widths[next(iter(widths))],
    )  # fmt: skip


def _one_line(text: str) -> str:
    """The text on one line, without characters that YAML or UTF-8 does not allow."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _marked(stream: str) -> str:
    """The name of a stream, in Markdown. The name is marked as code if it has only letters, digits,
    `_`, `.` and `-`. Other names, which only features can have, are escaped text."""
    return f"`{stream}`" if re.fullmatch(r"[\w.-]+", stream) else _escaped(_one_line(stream))


def _escaped(text: str) -> str:
    """The text with a backslash before each special character, so that no character has a special
    meaning in Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]()<>#|~!&])", r"\\\1", text)


def _exact(stored: Sequence[str], dtype: str) -> str:
    """A phrase that says how far the exported numbers differ from the captured numbers."""
    if all(one == dtype for one in stored):
        return "each number has the same bits as in the captured files"
    if dtype == "float32":
        return "each number equals the captured number, which float32 can represent"
    return "each number is rounded, and finite numbers beyond ±65,504 became ±65,504"
