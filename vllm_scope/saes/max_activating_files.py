"""Encodes tables of strongest tokens as safetensors files, and loads such files.

Owns:  `encode_table`, `load_max_activating`.
From:  max_activating. To: sinks.max_activating; callers.

Promise: before a table is allocated, the claimed sizes are compared with the file's tensors and
with the file's size.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vllm_scope.errors import FileError, shown
from vllm_scope.saes.max_activating import COUNTS, SIZES, MaxActivating, stored_bytes
from vllm_scope.saes.strongest import LABEL_BYTES, NUM_BARS

_FORMAT = "vllm_scope.max_activating.1"
#: The names of the table's arrays that do not belong to its entries.
_ARRAYS = ("num_active", "bars", "exponents")


def encode_table(table: MaxActivating) -> bytes:
    """Encode a table as the bytes of a safetensors file. The file's tensors are the table's arrays.
    The tensor `label` is uint8 [num_features, k, LABEL_BYTES]."""
    shape = (table.num_features, table.k, LABEL_BYTES)
    tensors = table.entries | {name: getattr(table, name) for name in _ARRAYS}
    tensors["label"] = table.entries["label"].view(np.uint8).reshape(shape)
    facts = {name: getattr(table, name) for name in (*SIZES, *COUNTS, "sae")}
    return save(tensors, {"format": _FORMAT, "max_activating": json.dumps(facts)})


def load_max_activating(path: str | Path, sae: str | None = None) -> MaxActivating:
    """Load the table of a file, or merge the tables of one SAE from the files of a folder.

    Args:
        sae: the SAE's name. If None, the folder must have tables of only one SAE.

    Raises:
        FileError: the path does not exist, a file is damaged, no file has a table of the SAE, or
            `sae` is None and the folder has tables of several SAEs.
        ConfigError: the tables in the files differ in num_features, k, before or after.
    """
    path = Path(path)
    if not path.exists():
        raise FileError(
            f"{path} does not exist; give the file of a table, or a folder of such files."
        )
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    found = [_load(file) for file in files]
    names = sorted({table.sae for table in found})
    if not names:
        raise FileError(
            f"{path} has no tables; the sink writes its tables every `flush_s` seconds."
        )
    if sae not in names if sae is not None else len(names) > 1:
        there = ", ".join(map(shown, names[:8]))
        raise FileError(
            f"{path} has tables of {there}"
            f"{'' if sae is None else f', not of {shown(sae)}'}; give the name of one SAE."
        )
    tables = [table for table in found if sae in (None, table.sae)]
    first, *others = tables
    for other in others:
        first.merge(other)
    return first


def _load(path: Path) -> MaxActivating:
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise FileError(f"{path} is no table of strongest tokens of this version.")
            facts = json.loads(metadata["max_activating"])
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}
            num_features, k, before, after = (facts[name] for name in SIZES)
            context = [num_features, k, before + 1 + after]
            if (
                shapes.get("values") != context
                or shapes.get("bars") != [num_features, NUM_BARS]
                or stored_bytes(num_features, k, before, after) > path.stat().st_size
            ):
                raise FileError(f"{path}: the sizes {context} contradict the file's tensors.")
            table = MaxActivating(num_features, k, before, after, str(facts["sae"]))
            for name, array in table.entries.items():
                stored = file.get_tensor(name)
                array[:] = stored.view(array.dtype)[..., 0] if name == "label" else stored
            for name in _ARRAYS:
                getattr(table, name)[:] = file.get_tensor(name)
            for name in COUNTS:
                setattr(table, name, int(facts[name]))
            table.set_least()
            return table
    except FileError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise FileError(f"{path} cannot be read: {error}") from None
