"""The sink `to="max_activating"`: features into tables of their strongest tokens.

    "sinks": {"max_activating": {"root": "strongest", "k": 20, "before": 16, "after": 8}}
    Features("toy", top_k=64, to="max_activating")

Owns:  MaxActivatingSink and its options.
Runs:  on its sink thread. Several instances, and several engines, may write into one root.
To:    saes.max_activating (the table), files with one table each.

Each accepted token counts once, however often it was computed, because the rows come when the
request has ended. A request that failed is left out. Of a request that was aborted, the tokens
before the abort count. Requests with edits are refused, because edits change the features.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from vllm_scope.errors import ConfigError, shown
from vllm_scope.files.names import clean
from vllm_scope.files.publish import LocalPublisher, write_bytes
from vllm_scope.request.options import checked
from vllm_scope.saes.max_activating import MaxActivating, table_bytes
from vllm_scope.saes.max_activating_files import encode_table
from vllm_scope.saes.strongest import Ints
from vllm_scope.sinks import Block, Ending, Report


class MaxActivatingOptions(BaseModel):
    """The sink's own options.

    Attributes:
        root: the folder of the tables.
        k: number of tokens that are kept for each feature.
        before, after: numbers of tokens of the context before and after a strongest token.
        tables_mib: limit of all tables of an instance. The size of a table is `table_bytes`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: StrictStr = Field(min_length=1)
    k: StrictInt = Field(default=20, ge=1, le=1000)
    before: StrictInt = Field(default=16, ge=0, le=1000)
    after: StrictInt = Field(default=8, ge=0, le=1000)
    tables_mib: StrictInt = Field(default=1024, ge=1)

    @staticmethod
    def parse(own: Mapping[str, object]) -> MaxActivatingOptions:
        """The checked options. Raises ConfigError, which names the option, what came and what is
        allowed."""
        return checked(MaxActivatingOptions, own, "")


#: Largest number of places (tokens x top_k) of one request. This many places take some seconds.
MAX_PLACES: Final = 1 << 23

#: The SAE's name, positions [n], indices [n, places] and values [n, places] of one request.
_Waiting = tuple[str, Ints, NDArray[np.int32], NDArray[np.float32]]


class MaxActivatingSink:
    live: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False
    takes_scores: ClassVar[bool] = False
    takes_features: ClassVar[bool] = True
    takes_edited: ClassVar[bool] = False
    takes_some_features: ClassVar[bool] = False

    def __init__(self, options: MaxActivatingOptions) -> None:
        self._options = options
        self._publisher = LocalPublisher(Path(options.root))
        self._identity = secrets.token_hex(8)
        #: By the SAE's name.
        self._tables: dict[str, MaxActivating] = {}
        self._unsaved: set[str] = set()
        #: By the key of the request.
        self._waiting: dict[int, list[_Waiting]] = {}

    def write(self, block: Block) -> None:
        if block.sae is None or block.indices is None or block.num_features is None:
            raise ConfigError(
                f"{shown(block.probe)} are not all features of an SAE; to the sink max_activating "
                "go features of an SAE that the engine holds, without indices and threshold."
            )
        self._make(block.sae, block.num_features)
        some = self._waiting.setdefault(block.request.key, [])
        if all(sae != block.sae for sae, *_ in some):  # an SAE once, however often it was asked for
            places = block.indices.numel() + sum(indices.size for _, _, indices, _ in some)
            if places > MAX_PLACES:
                raise ConfigError(
                    f"the features of the request take {places:,} places (tokens x top_k); the "
                    f"sink max_activating takes {MAX_PLACES:,} at most. Lower top_k, or ask for "
                    "fewer tokens."
                )
            rows = block.indices.numpy().copy(), block.rows.numpy().copy()
            some.append((block.sae, block.positions.copy(), *rows))

    def _make(self, sae: str, num_features: int) -> None:
        own = self._options
        if sae in self._tables:
            return
        size = (num_features, own.k, own.before, own.after)
        needed = sum(table.nbytes for table in self._tables.values()) + table_bytes(*size)
        if needed > own.tables_mib << 20:
            raise ConfigError(
                f"tables_mib is {own.tables_mib}; with the SAE {shown(sae)} the tables take "
                f"{needed / 2**20:,.1f} MiB. Raise it, or lower k, before or after."
            )
        self._tables[sae] = MaxActivating(*size, sae=sae)

    def finish(self, ending: Ending) -> Report | None:
        waiting, request = self._waiting.pop(ending.request.key, []), ending.request
        if ending.status == "error":
            return None
        label = request.request_id + (f".{request.child}" if request.child else "")
        token_ids = np.array([*request.prompt_ids, *ending.output_ids], np.int64)
        for sae, positions, indices, values in waiting:
            self._tables[sae].add(label, token_ids, positions, indices, values)
            self._unsaved.add(sae)
        return Report(details={sae: self._tables[sae].num_tokens for sae, *_ in waiting})

    def flush(self) -> None:
        for sae in sorted(self._unsaved):
            name = f"{clean(sae)}.{self._identity}.safetensors"
            body = encode_table(self._tables[sae])
            self._publisher.publish({name: partial(write_bytes, body=body)})
            self._unsaved.discard(sae)

    def close(self) -> None:
        self._publisher.close()
