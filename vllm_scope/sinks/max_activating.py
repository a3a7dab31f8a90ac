"""The sink `to="max_activating"`, which makes tables of the strongest tokens of features.

    "sinks": {"max_activating": {"root": "strongest", "k": 20, "before": 16, "after": 8}}
    Features("toy", top_k=64, to="max_activating")

Owns:  MaxActivatingSink, MaxActivatingOptions.
Runs:  on a sink thread. Several instances, and several engines, may write into one root.
To:    saes.max_activating (the table). Each file has one table.

The sink gets the rows after the request has ended. Therefore each accepted token counts one time.
Failed requests are left out. If a request was aborted, the tokens before the abort are counted.
Requests with edits are refused, because edits change features.
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
        k: number of strongest tokens that a table keeps for each feature.
        before, after: number of context tokens before and after a strongest token.
        tables_mib: largest size of all tables of one instance (see `table_bytes`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: StrictStr = Field(min_length=1)
    k: StrictInt = Field(default=20, ge=1, le=1000)
    before: StrictInt = Field(default=16, ge=0, le=1000)
    after: StrictInt = Field(default=8, ge=0, le=1000)
    tables_mib: StrictInt = Field(default=1024, ge=1)

    @staticmethod
    def parse(own: Mapping[str, object]) -> MaxActivatingOptions:
        """The checked options. Raises ConfigError if an option is wrong. The error's text names the
        option and the allowed values."""
        return checked(MaxActivatingOptions, own, "")


#: Largest number of places (tokens x top_k) of one request. A request with this number of places
#: takes some seconds.
MAX_PLACES: Final = 1 << 23

#: (SAE's name, positions [n], indices [n, places], values [n, places]) of one request.
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
        #: The table of each SAE, by the name of the SAE.
        self._tables: dict[str, MaxActivating] = {}
        self._unsaved: set[str] = set()
        #: The features of each request, by the key of the request.
        self._waiting: dict[int, list[_Waiting]] = {}

    def write(self, block: Block) -> None:
        if block.sae is None or block.indices is None or block.num_features is None:
            raise ConfigError(
                f"{shown(block.probe)} are not all features of an SAE; the sink max_activating "
                "takes features of an SAE that the engine holds, without indices and threshold."
            )
        self._make(block.sae, block.num_features)
        some = self._waiting.setdefault(block.request.key, [])
        if all(sae != block.sae for sae, *_ in some):  # count each SAE one time
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
                f"{needed / 2**20:,.1f} MiB. Raise tables_mib, or lower k, before or after."
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
