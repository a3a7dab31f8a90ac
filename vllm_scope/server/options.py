"""The fields of `vllm_xargs` that say in which form a request wants to receive its tensors.

Owns:  ScopeOptions.
Runs:  in each API server process, before the request enters the engine.
To:    engine.http.serving, answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import MEMORY
from vllm_scope.request.actions.probing import MONITOR, is_monitor
from vllm_scope.request.spec import Spec
from vllm_scope.server import encode
from vllm_scope.server.settings import ADMIN_KEY

_ALLOWED = {"scope_tensors": ("auto", "handle"), "scope_stream": ("scores", "rows")}


@dataclass(frozen=True)
class ScopeOptions:
    """The form in which a request wants to receive its tensors.

    Attributes:
        tensors: with "auto", rows that are too large for the answer go into a file. With "handle",
            all rows go into a file.
        stream: with "scores", chunks carry only scores. With "rows", chunks carry rows and scores.
        named: True if a read names the request's files. A request that names its files can have
            only one prompt.
        reads: True if a read sends rows to the answer.
    """

    tensors: Literal["auto", "handle"] = "auto"
    stream: Literal["scores", "rows"] = "scores"
    named: bool = False
    reads: bool = False

    @staticmethod
    def parse(xargs: Mapping[str, object], operator: bool = False) -> ScopeOptions | None:
        """The options of a request; None if no name in `xargs` begins with `scope`.

        Args:
            operator: True if the request has the operator's key.

        Raises:
            SpecError: a field or a value is unknown, the spec is missing or wrong, or the spec is
                not possible over HTTP for this sender.
        """
        own = {name: value for name, value in xargs.items() if name.startswith("scope")}
        if not own:
            return None
        for name in own.keys() - {"scope"}:
            if name not in _ALLOWED:
                raise SpecError(
                    f"vllm_xargs has {shown(name)}; allowed with 'scope' are {', '.join(_ALLOWED)}."
                )
            if own[name] not in _ALLOWED[name]:
                raise SpecError(
                    f"vllm_xargs[{name!r}] is {shown(own[name])}; it must be one of "
                    f"{', '.join(_ALLOWED[name])}."
                )
        if "scope" not in own:
            raise SpecError("vllm_xargs has options of a scope and no 'scope'.")
        spec = Spec.from_json(own.pop("scope"))
        _check_answerable(spec)
        if spec.moments and not operator:
            raise SpecError(
                "the request has moments, and all requests share the sums of a name; send it with "
                f"the operator's key in the header {ADMIN_KEY}, or read the rows and sum them."
            )
        found = {name.removeprefix("scope_"): value for name, value in own.items()} | {
            "named": any(read.name is not None for read in spec.reads),
            "reads": any(read.to == MEMORY for read in spec.reads),
        }
        return msgspec.convert(found, ScopeOptions)


def _check_answerable(spec: Spec) -> None:
    """Raises SpecError for a spec that cannot be answered over HTTP.

    A read that sends rows with the codec rp8 to the answer is refused. To decode these rows, the
    server would have to invert the codec's whole projection. This computation takes seconds. Names
    that are reserved for an operator's monitors are refused. Names that end in one of
    `encode.ENDINGS` are refused, because other tensors in a file have these endings.
    """
    names = [(f"probes[{i}].name", probe.name) for i, probe in enumerate(spec.probes)]
    names += [(f"features[{i}].name", one.name) for i, one in enumerate(spec.features)]
    names += [(f"lens[{i}].name", one.name) for i, one in enumerate(spec.lens)]
    for i, edit in enumerate(spec.edits):
        names.append((f"edits[{i}].dose", edit.dose or ""))
        if edit.gate is not None:
            names.append((f"edits[{i}].gate.name", edit.gate.name or ""))
    for where, name in names:
        if is_monitor(name):
            raise SpecError(
                f"{where} is {shown(name)}; names that begin with {MONITOR!r} are the operator's. "
                "Take another."
            )
        ending = next((e for e in encode.ENDINGS if name.endswith(e)), None)
        if ending is not None:
            raise SpecError(
                f"{where} is {shown(name)}; over HTTP no name ends in {ending!r}, which is the "
                "end of other tensors' names in a file. Take another."
            )
    for i, read in enumerate(spec.reads):
        if read.to == MEMORY and read.codec is not None and read.codec.name == "rp8":
            raise SpecError(
                f"reads[{i}].codec is 'rp8'; answers have decoded rows, and rp8 keeps the "
                "projections. Take another codec, or let the rows go to a sink."
            )
