"""The operator's options of sinks, in `additional_config={"scope": {"sinks": {...}}}`.

    "sinks": {"filesystem": {"root": "/data/captures", "on_overload": "spill"},
              "my_plugin": {"url": "https://..."}},
    "global_sinks": {"filesystem": {"root": "/data/all", "reads": [{"site": "resid_post"}]}}

Owns:  SinkOptions (the options of every sink), SinkConfig (one sink), the look-up of plugins,
       `take_options` (for any kind of plugin).
Runs:  in the front-end before the engine starts, and in every process that parses the options.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from vllm_scope.errors import ConfigError, shown
from vllm_scope.files.options import FileOptions
from vllm_scope.request.actions import MAX_NAME, MEMORY
from vllm_scope.request.options import Number, Options, checked, nearest
from vllm_scope.request.spec import Spec
from vllm_scope.sinks import Sink
from vllm_scope.sinks.reports import MOST_LOGGED, failure, plain

FILESYSTEM, MAX_ACTIVATING = "filesystem", "max_activating"
#: The sinks of this package.
OURS = (FILESYSTEM, MAX_ACTIVATING)
GROUP = "vllm_scope.sinks"
#: In a log, this text replaces the value of a secret option.
HIDDEN = "***"


class SinkOptions(BaseModel):
    """The options that all sinks have. A sink can have further options.

    Attributes:
        on_overload: the policy for rows that arrive while the queue is full. With `block`, the
            engine waits. With `drop`, the rows are dropped and counted, and the request gets the
            status `partial`. With `spill`, the rows wait in a file on a local disk, in their order.
            If this file is full too, the engine waits.
        queue_mib: largest size of the rows that wait in memory for the sink.
        held_mib: largest size of the rows that are kept for running requests, for a sink that takes
            whole requests. Rows beyond the limit are dropped and counted under every policy,
            because only the end of a request makes room. The rows of one API key may take at most
            three times the free part of held_mib. With `drop`, the same rule applies to queue_mib.
        spill_mib: largest size of the rows that wait on disk.
        spill_folder: the folder of the file with the rows that wait on disk. If None, the folder
            for temporary files.
        threads: number of instances of the sink. Each instance has its own thread and an equal
            share of queue_mib, held_mib and spill_mib.
        patience_s: time limit of one call to the sink, in seconds. After this time, the sink counts
            as stalled until the call returns. The engine does not wait for a stalled sink. While
            the sink is stalled and its queue is full, rows are dropped. A request that ends while
            the sink is stalled gets the status `error` at this sink.
        flush_s: longest time in seconds from a request's end until the sink makes the rows of the
            request visible. The time is shorter if the caller waits and no other request is
            running.
        key_mib: largest size of the rows that one API key may send to the sink within 24 hours, in
            each worker. For each request, 8 KiB are added to the size of its rows. Rows beyond the
            limit are dropped and counted, and the request gets the status `partial`. If all rows of
            a request are beyond the limit, the sink gets no call for the request. None: no limit.
            This limit does not apply to offline requests, which have no API key.
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
        """The part of a limit that one thread of the sink may use, in bytes."""
        return int(mib * 2**20) // self.threads


@dataclass(frozen=True)
class SinkConfig:
    """One sink of an engine.

    Attributes:
        options: the options that every sink has.
        own: the options that only this sink has.
        reads: the reads that a sink in `global_sinks` adds to every request, as JSON. None for
            other sinks.
    """

    name: str
    options: SinkOptions
    own: Mapping[str, object]
    reads: str | None = None

    def factory(self) -> Callable[[], Sink]:
        """A function that makes a new instance of the sink. If a plugin's constructor raises an
        error, the function raises ConfigError.

        Raises:
            ConfigError: there is no such plugin, the plugin cannot be imported, or an option of a
                sink of this package is wrong.
        """
        if self.name == FILESYSTEM:
            from vllm_scope.sinks.filesystem import FilesystemSink

            options = FileOptions.parse(self.own)
            return lambda: FilesystemSink(options)
        if self.name == MAX_ACTIVATING:
            from vllm_scope.sinks.max_activating import MaxActivatingOptions, MaxActivatingSink

            sizes = MaxActivatingOptions.parse(self.own)
            return lambda: MaxActivatingSink(sizes)
        try:
            made = _plugin(self.name).load()
        except Exception as error:
            raise ConfigError(
                f"the sink {self.name!r} cannot be imported ({failure(error)}); repair its "
                "package, or leave it out."
            ) from error

        def make() -> Sink:
            try:
                sink: Sink = made(**self.own)
            except Exception as error:
                raise not_taken(f"sink {self.name!r}", self.own, error) from None
            return sink

        return make


def parse_sinks(body: object, where: str, reads: bool) -> dict[str, SinkConfig]:
    """The configuration of each sink, by the name of the sink.

    Args:
        where: the name of the field, "sinks" or "global_sinks".
        reads: True if each sink must have `reads`.

    Raises:
        ConfigError: an option is wrong. The text of the error has the sink, the option and the
            allowed values.
    """
    if not isinstance(body, Mapping):
        raise ConfigError(f"{where} is {shown(body)}; it must be an object, one field per sink.")
    return {name: _parse_one(name, one, f"{where}.{name}", reads) for name, one in body.items()}


def without_secrets(body: object) -> object:
    """The engine's options (`additional_config["scope"]`) in a form for a log. HIDDEN replaces
    values that may be secrets: options of plugins and policies, and URLs in options of sinks and
    monitors."""
    if not isinstance(body, Mapping):
        return body
    shown = dict(body)
    for kind in ("sinks", "global_sinks"):
        if kind in body:
            sinks = body[kind]
            known = isinstance(sinks, Mapping)
            shown[kind] = {n: _hidden(n, one) for n, one in sinks.items()} if known else HIDDEN
    if isinstance(policies := body.get("policies"), Mapping):
        shown["policies"] = dict.fromkeys(policies, HIDDEN)
    if "monitors" in body:
        monitors = body["monitors"]
        known = isinstance(monitors, Mapping)
        shown["monitors"] = (
            {n: _without_urls(one) for n, one in monitors.items()} if known else HIDDEN
        )
    return shown


def _hidden(name: str, body: object) -> object:
    if not isinstance(body, Mapping):
        return HIDDEN
    own = FileOptions.model_fields if name == FILESYSTEM else ()
    known = {*SinkOptions.model_fields, *own, "reads"}

    return _without_urls({key: body[key] if key in known else HIDDEN for key in body})


def _without_urls(body: object) -> object:
    if not isinstance(body, Mapping):
        return HIDDEN

    def is_url(key: object, value: object) -> bool:
        return key == "url" or (isinstance(value, str) and "://" in value)

    return {key: HIDDEN if is_url(key, value) else value for key, value in body.items()}


def not_taken(plugin: str, own: Mapping[str, object], error: Exception) -> ConfigError:
    """The ConfigError to raise after a plugin's constructor has raised `error`.

    Args:
        plugin: the kind and the name of the plugin.
        own: the plugin's own options.
    """
    # The text of this error is logged, and values of options may be secrets. Therefore this code
    # names only the options.
    names = ", ".join(sorted(map(str, own))) or "none"
    # The text is cut after the values are hidden, because `_without_values` does not find a cut
    # value.
    text = plain(_without_values(failure(error, MOST_LOGGED), own))
    return ConfigError(f"the options of {plugin}, {names}, are not taken ({text}).")


def _without_values(text: str, value: object) -> str:
    """The text with HIDDEN in place of each number and string in `value`, and of each part of these
    strings. A library's error often has only a part of a URL, such as its path."""
    if isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            text = _without_values(text, one)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        whole = str(value)
        for part in sorted({whole, *re.findall(r"[\w.-]+", whole)} - {""}, key=len, reverse=True):
            # A short part is hidden only if it is a whole word, because short parts also occur
            # within other words.
            pattern = rf"(?<!\w){re.escape(part)}(?!\w)" if len(part) < 4 else re.escape(part)
            text = re.sub(pattern, HIDDEN, text)
    return text


def _parse_one(name: object, body: object, where: str, reads: bool) -> SinkConfig:
    if not isinstance(name, str) or name in ("", MEMORY) or plain(name, MAX_NAME) != name:
        raise ConfigError(
            f"{where.rpartition('.')[0]} has the name {shown(name)}; a sink's name is a string of "
            f"1 to {MAX_NAME} characters, and the sink memory always exists."
        )
    if not isinstance(body, Mapping):
        raise ConfigError(f"{where} is {shown(body)}; it must be an object of options.")
    if reads and name == MAX_ACTIVATING:
        raise ConfigError(
            f"{where}: this sink takes features, and a global sink gets reads; name it in sinks, "
            "and let requests name it in Features(..., to='max_activating')."
        )
    own = dict(body)
    text = _parse_reads(own.pop("reads", None), where) if reads else None
    options = take_options(SinkOptions, own, where)
    config = SinkConfig(name, options, own, text)
    if name in OURS:
        try:
            config.factory()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    else:
        _plugin(name, where)
    return config


def _parse_reads(body: object, where: str) -> str:
    if not isinstance(body, list) or not body:
        raise ConfigError(
            f"{where}.reads is {shown(body)}; it must be a list of at least one read."
        )
    for i, read in enumerate(body):
        if isinstance(read, Mapping) and set(read) & {"to", "name"}:
            raise ConfigError(f"{where}.reads[{i}] has 'to' or 'name'; remove this field.")
    try:
        return Spec.from_json(json.dumps({"reads": body})).to_json()
    except ValueError as error:
        raise ConfigError(f"{where}.{error}") from None


def take_options(model: type[Options], own: dict[str, Any], where: str) -> Options:
    """The options that all plugins of one kind have in common. `own` has all options of one plugin.
    The returned options are removed from `own`.

    Raises:
        ConfigError: an option is wrong. The text of the error names the first wrong option.
    """
    general = {key: own.pop(key) for key in model.model_fields if key in own}
    return checked(model, general, f"{where}.")


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group, by name."""
    return {point.name: point for point in entry_points(group=group)}


def _plugin(name: str, where: str = "sinks") -> EntryPoint:
    found = installed(GROUP)
    if name not in found:
        known = [*OURS, *sorted(found)]
        raise ConfigError(
            f"{where}: no sink is called {shown(name)}{nearest(name, known)} Installed are "
            f"{', '.join(known)}. A plugin is a package with an entry point in the group {GROUP!r}."
        )
    return found[name]
