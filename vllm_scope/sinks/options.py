"""What an operator says of a sink: `additional_config={"scope": {"sinks": {...}}}`.

    "sinks": {"filesystem": {"root": "/data/captures", "on_overload": "spill"},
              "my_plugin": {"url": "https://..."}},
    "global_sinks": {"filesystem": {"root": "/data/all", "reads": [{"site": "resid_post"}]}}

Owns:  SinkOptions (what every sink has), SinkConfig (one sink, whole), plugin look-up.
Runs:  in the front-end, before the engine starts, and in every process that parses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)
from pydantic.functional_validators import BeforeValidator

from vllm_scope.errors import ConfigError, shown
from vllm_scope.request.actions import MAX_NAME, MEMORY
from vllm_scope.request.spec import Spec
from vllm_scope.sinks import Sink
from vllm_scope.sinks.reports import plain


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a valid number")
    return value


#: A number in options: finite, and no boolean.
Number = Annotated[FiniteFloat, BeforeValidator(_no_bool)]

FILESYSTEM = "filesystem"
GROUP = "vllm_scope.sinks"
#: What a log has in place of a value.
HIDDEN = "***"


class SinkOptions(BaseModel):
    """What every sink has, beside its own options.

    Attributes:
        on_overload: what happens to rows for which the queue has no room. `block`: the
            engine waits; `drop`: they are dropped, counted, and their request is
            `partial`; `spill`: they wait on a local disk, in order, and when that is
            full the engine waits.
        queue_mib: rows that wait for the sink in memory.
        held_mib: rows of requests that have not ended, of a sink that takes whole
            requests. What would not fit is dropped and counted, whatever the policy:
            to wait would be to wait for an end that cannot come. One API key may hold three
            times what is left free; of queue_mib too, where the policy is `drop`.
        spill_mib, spill_folder: how much may wait on disk, and where; None is the
            folder for temporary files.
        threads: instances of the sink, each with a thread of its own. Queue, held and
            spilled rows are shared out between them.
        patience_s: how long one call to the sink may take. Longer, and the sink counts
            as stalled until the call returns: nothing waits for it, what comes is
            dropped, and its requests end with the reason.
        flush_s: how long a request that has ended may wait until the sink makes it
            visible, together with others. Where its caller waits for that, it is sooner
            once no other request is running.
        key_mib: rows that one API key may give the sink within 24 hours, in each worker; a
            request counts 8 KiB beside its rows. What is more is dropped and counted, and its
            request is `partial`; a request of which the sink was given nothing leaves nothing
            there. None does not count. Offline requests have no key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    on_overload: Literal["block", "drop", "spill"] = "block"
    queue_mib: Number = Field(default=64.0, gt=0)
    held_mib: Number = Field(default=1024.0, gt=0)
    spill_mib: Number = Field(default=4096.0, gt=0)
    spill_folder: StrictStr | None = None
    threads: StrictInt = Field(default=1, ge=1, le=64)
    patience_s: Number = Field(default=20.0, gt=0)
    flush_s: Number = Field(default=2.0, gt=0)
    key_mib: Number | None = Field(default=None, gt=0)

    def share(self, mib: float) -> int:
        """Bytes of one thread."""
        return int(mib * 2**20) // self.threads


@dataclass(frozen=True)
class SinkConfig:
    """One sink of an engine.

    Attributes:
        options: what every sink has.
        own: the sink's own options.
        reads: JSON of what a global sink is given of every request; None for a sink
            that requests name.
    """

    name: str
    options: SinkOptions
    own: Mapping[str, Any]
    reads: str | None = None

    def factory(self) -> Callable[[], Sink]:
        """What makes an instance.

        Raises:
            ConfigError: there is no such plugin, or an option is wrong.
        """
        if self.name == FILESYSTEM:
            from vllm_scope.files import FileOptions
            from vllm_scope.sinks.filesystem import FilesystemSink

            options = FileOptions.parse(self.own)
            return lambda: FilesystemSink(options)
        try:
            made = _plugin(self.name).load()
        except ImportError as error:
            raise ConfigError(f"the sink {self.name!r} cannot be imported: {error}.") from None

        def make() -> Sink:
            try:
                sink: Sink = made(**self.own)
            except (TypeError, ValueError) as error:
                # Their names alone: values may be secrets, and this is logged.
                raise ConfigError(
                    f"the options of sink {self.name!r}, {', '.join(sorted(map(str, self.own)))}, "
                    f"are not taken: {error}."
                ) from None
            return sink

        return make


def parse_sinks(body: object, where: str, reads: bool) -> dict[str, SinkConfig]:
    """Name -> sink.

    Args:
        where: "sinks" or "global_sinks".
        reads: each says what it reads.

    Raises:
        ConfigError: names the sink and the option, what came and what is allowed.
    """
    if not isinstance(body, Mapping):
        raise ConfigError(f"{where} is {shown(body)}; it is an object, one field per sink.")
    return {name: _parse_one(name, one, f"{where}.{name}", reads) for name, one in body.items()}


def without_secrets(body: Any) -> Any:
    """The engine's options (`additional_config["scope"]`) for a log: of sinks' own options the
    names alone, as any value may be a token, or a URL that has one."""
    if not isinstance(body, Mapping):
        return body
    shown = dict(body)
    for kind in ("sinks", "global_sinks"):
        if kind in body:
            sinks = body[kind]
            known = isinstance(sinks, Mapping)
            shown[kind] = {n: _hidden(n, one) for n, one in sinks.items()} if known else HIDDEN
    return shown


def _hidden(name: str, body: object) -> Any:
    if not isinstance(body, Mapping):
        return HIDDEN
    known = {*SinkOptions.model_fields, "reads"}
    if name == FILESYSTEM:
        from vllm_scope.files import FileOptions

        known |= set(FileOptions.model_fields)
    return {
        key: value if key in known and not _is_url(value) else HIDDEN for key, value in body.items()
    }


def _is_url(value: object) -> bool:
    return isinstance(value, str) and "://" in value


def _parse_one(name: object, body: object, where: str, reads: bool) -> SinkConfig:
    sane = isinstance(name, str) and 0 < len(name) <= MAX_NAME and plain(name, MAX_NAME) == name
    if not sane or name == MEMORY:
        raise ConfigError(
            f"{shown(name)} is no name of a sink, which is a string of 1 to {MAX_NAME} characters; "
            "memory is always there."
        )
    assert isinstance(name, str)
    if not isinstance(body, Mapping):
        raise ConfigError(f"{where} is {shown(body)}; it is an object of options.")
    own = dict(body)
    text = _parse_reads(own.pop("reads", None), where) if reads else None
    general = {key: own.pop(key) for key in SinkOptions.model_fields if key in own}
    try:
        options = SinkOptions.model_validate(general)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{where}.{first['loc'][0]} is {shown(first['input'])}: {first['msg']}. Every sink "
            f"has the options {', '.join(SinkOptions.model_fields)}."
        ) from None
    config = SinkConfig(name, options, own, text)
    if name == FILESYSTEM:
        try:
            config.factory()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    else:
        _plugin(name)
    return config


def _parse_reads(body: object, where: str) -> str:
    import json

    if not isinstance(body, list) or not body:
        raise ConfigError(f"{where}.reads is {shown(body)}; it is a list of at least one read.")
    for i, read in enumerate(body):
        if isinstance(read, Mapping) and set(read) & {"to", "name"}:
            raise ConfigError(f"{where}.reads[{i}] has 'to' or 'name'; a global sink's has not.")
    try:
        return Spec.from_json(json.dumps({"reads": body})).to_json()
    except ValueError as error:
        raise ConfigError(f"{where}.{error}") from None


def _plugin(name: str) -> EntryPoint:
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join([FILESYSTEM, *sorted(found)])
        raise ConfigError(
            f"there is no sink {shown(name)}; installed are {known}. A plugin is a package with "
            f"an entry point in the group {GROUP!r}."
        )
    return found[name]
