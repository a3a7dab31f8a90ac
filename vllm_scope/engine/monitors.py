"""Monitors: an operator's probes on every request.

Owns:  Monitor, `monitors_of`, `set_monitors`, `share` (shares monitors with other API servers),
       `activity_of`, `listen`, and the translator that adds monitors to requests.
Runs:  in the front-end, for each request. In workers, when the model is loaded, to check the
       configured monitors.
From:  config (`monitors`), server.shared, server.peers.   To: frontend.translators, judge,
       controller.

A monitor is a probe with a threshold. In a request, the probe of the monitor NAME has the name
`monitor/NAME`.

Promise: if the model does not support a configured monitor, the engine does not start. If the
engine has no room for all configured monitors, it does not start either. If an operator later sets
monitors that the engine does not support or has no room for, these monitors are refused. Every
request has the monitors that are set when the request enters. Therefore a request is refused if the
monitors and the request's own actions together need more room than the engine has. A request with
prompt embeddings or streamed input is also refused, because it cannot be tapped. An engine with
monitors also refuses beam search.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from dataclasses import field as field_of
from typing import Any

import msgspec

from vllm_scope.config import KEY
from vllm_scope.control.activity import Found
from vllm_scope.control.controller import Observation
from vllm_scope.control.tally import Tally, joined
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.frontend import ahead, translators
from vllm_scope.engine.frontend.checks import check_room
from vllm_scope.engine.frontend.connection import (
    Connection,
    connect_async,
    connect_sync,
    connection_of,
    needs_connection,
    refusing,
)
from vllm_scope.engine.judge import Judge, tallied
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.vllm_types import AsyncLLM, Engine, LLMEngine, VllmConfig
from vllm_scope.engine.webhook import Webhook
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.errors import ConfigError, SpecError, checked_word, shown
from vllm_scope.request.actions import Module, Probe, action_from_json
from vllm_scope.request.actions.base import checked_name
from vllm_scope.request.actions.probing import MONITOR
from vllm_scope.request.cascade import check_cascades
from vllm_scope.request.selectors import Selector
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import MAX_SPEC_BYTES, Spec, check_stopping
from vllm_scope.server.peers import Peers
from vllm_scope.server.shared import Shared
from vllm_scope.vectors.layers import ProbeWeights
from vllm_scope.vectors.probe_weights import from_safetensors

#: The possible actions of a monitor when the value of its probe is above the threshold.
ACTIONS = ("flag", "stop", "escalate")
MOST_MONITORS = 64
#: The remote call that asks EngineCore for room (engine.core.entry).
_CHECK = "scope_check_monitors"
#: The part of error texts that says where `file` and `url` are allowed.
AT_START = "in additional_config={'scope': {'monitors': ...}}, at the engine's start"
#: The fields of a probe that a monitor does not have, and the reason.
_NOT_GIVEN = {
    "name": "the name of a monitor is its key in the object of all monitors",
    "to": "the scores of monitors cannot be sent to a sink",
}
_FIELDS = {"site", "layers", "tokens", *Probe.fields} - _NOT_GIVEN.keys()
_START_FIELDS = ("file", "kind", "url")


@dataclass(frozen=True)
class Monitor:
    """A probe that an operator adds to every request.

    Attributes:
        probe: a probe whose name begins with MONITOR, and whose action is "flag" or "stop".
        tally: the counts of the monitor's findings since the monitor was set.
        webhook: sends each verdict to the operator's address; None if the monitor has no address.
    """

    name: str
    probe: Probe
    tally: Tally = field_of(compare=False)
    webhook: Webhook | None = None

    @property
    def action(self) -> str:
        """One of ACTIONS."""
        return self.probe.action if self.webhook is None else "escalate"


def parse(name: str, body: object) -> Monitor:
    """Make a monitor from a parsed JSON object.

    Args:
        body: the fields of a probe (`weight`, `layers`, `threshold`, ...), without `name` and `to`.
            In place of `weight`, a body can have `file`, which names a safetensors file
            (vectors.probe_weights). A body with `file` can also have the field `kind` with the
            probe's kind, which is "linear" by default. If `action` is "escalate", `url` is the
            address that gets each verdict. `after` names another monitor, which is the first stage.

    Raises:
        SpecError: `body` or the file is malformed, or the file cannot be read. The error names the
            monitor.
    """
    where = f"monitors[{name!r}]"
    checked_name(name, where)
    if not isinstance(body, Mapping):
        raise SpecError(f"{where} is {shown(body)}; it must be an object.")
    fields: dict[str, Any] = dict(body)
    for field, reason in _NOT_GIVEN.items():
        if field in fields:
            raise SpecError(f"{where} has {field!r}; {reason}. Leave {field!r} out.")
    unknown = sorted(fields.keys() - _FIELDS - {*_START_FIELDS}, key=str)
    if unknown:
        raise SpecError(
            f"{where} has {shown(unknown[0])}; the fields are {', '.join(sorted(_FIELDS))}, and "
            f"{', '.join(_START_FIELDS)} {AT_START}."
        )
    action, url = fields.pop("action", "flag"), fields.pop("url", None)
    checked_word(action, ACTIONS, f"{where}.action")
    if action == "escalate" and url is None:
        raise SpecError(
            f"{where}.action is 'escalate', and there is no 'url' to tell; give the url, or take "
            "'flag' or 'stop'."
        )
    if action != "escalate" and url is not None:
        raise SpecError(
            f"{where} has 'url' and action {action!r}, which tells no url; take 'escalate', or "
            "leave 'url' out."
        )
    if fields.get("threshold") is None:
        raise SpecError(f"{where} has no threshold; without one a monitor has no verdict.")
    if "file" in fields:
        found = _weights_of(fields.pop("file"), fields.pop("kind", "linear"), f"{where}.file")
        given = {"bias": found.bias, "activation": found.activation}
        fields = {"weight": found.weight} | given | fields
    elif "kind" in fields:
        raise SpecError(
            f"{where} has 'kind', which says how a 'file' is read, and no 'file'. Leave 'kind' "
            'out: a weight such as {"attention": ...} or {"mlp": ...} names its kind.'
        )
    if fields.get("after") is not None:
        fields["after"] = MONITOR + checked_name(fields["after"], f"{where}.after")
    fields |= {"name": MONITOR + name, "action": "stop" if action == "stop" else "flag"}
    probe = action_from_json(Probe, fields, where)
    if isinstance(probe.weight, Module):
        raise SpecError(f"{where}.weight names a module; give the numbers, or a file.")
    webhook = None if url is None else Webhook.parse(url, f"{where}.url")
    assert probe.threshold is not None
    return Monitor(name, probe, Tally(probe.threshold), webhook)


def _weights_of(file: object, kind: Any, where: str) -> ProbeWeights:
    """The weights in a monitor's file. Raises SpecError, which names the file and the monitor."""
    try:
        return from_safetensors(str(file), kind=kind)
    except OSError as error:
        raise SpecError(
            f"{where} is {shown(file)}, which cannot be read: {error.strerror or error}. Give the "
            "path of a probe's file on this machine."
        ) from error
    except SpecError as error:
        raise SpecError(f"{where} is {shown(file)}: {error}") from error


def parse_all(bodies: object) -> tuple[Monitor, ...]:
    """Make monitors from a parsed JSON object, which maps each name to the body for `parse`."""
    if not isinstance(bodies, Mapping):
        raise SpecError(f"monitors is {shown(bodies)}; it must be an object: name to monitor.")
    if len(bodies) > MOST_MONITORS:
        raise SpecError(f"there are {len(bodies)} monitors; at most {MOST_MONITORS}.")
    found = tuple(parse(name, body) for name, body in bodies.items())
    probes = [monitor.probe for monitor in found]
    check_cascades(probes, lambda i: f"monitors[{found[i].name!r}]", "monitor")
    check_stopping(probes)
    return found


def untapped(reason: str) -> str:
    """The text of the error about monitors on a model without taps.

    Args:
        reason: why the model cannot be tapped.
    """
    return (
        f"every request would have these monitors, and would be refused: this model cannot be "
        f"tapped: {reason}. Set no monitors, or serve another model."
    )


def check(monitors: tuple[Monitor, ...], sites: Sites, num_stages: int, limits: Limits) -> None:
    """Raises SpecError if this engine does not support one of the monitors, or does not have enough
    room for all monitors together.

    Args:
        limits: the engine's limits.
    """
    for monitor in monitors:
        try:
            asked = Spec(probes=(replace(monitor.probe, after=None),)).resolve(sites)
        except SpecError as error:
            text = str(error).replace("probes[0]", f"monitors[{monitor.name!r}]")
            raise SpecError(text) from None
        _check_tokens(asked.probes[0].tokens, f"monitors[{monitor.name!r}].tokens")
        field = "action" if monitor.probe.action == "stop" else "after"
        value = getattr(monitor.probe, field)
        if num_stages > 1 and value not in (None, "flag"):
            instead = "take 'flag'" if field == "action" else "leave it out"
            raise SpecError(
                f"monitors[{monitor.name!r}].{field} is {shown(value.removeprefix(MONITOR))}, and "
                f"this engine has {num_stages} pipeline stages, which cannot do that; {instead}."
            )
    whole = _text_of(monitors)
    if whole is None:
        return
    if len(whole) > MAX_SPEC_BYTES:
        raise SpecError(
            f"these {len(monitors)} monitors are a spec of {len(whole):,} characters, which every "
            f"request would have; a spec has at most {MAX_SPEC_BYTES:,}. Set fewer monitors, or "
            "monitors with smaller weights."
        )
    asked = Spec(probes=tuple(monitor.probe for monitor in monitors)).resolve(sites)
    try:
        check_room(asked, [0], 1, sites, limits, 0)
    except SpecError as error:
        raise SpecError(
            f"every request would have these {len(monitors)} monitors, and would be refused: "
            f"{error} Or set fewer monitors."
        ) from None


def _check_tokens(tokens: Selector, where: str) -> None:
    """Raises SpecError if a request can be too short for these tokens."""
    try:
        tokens.check(1, 0, where)  # the shortest request: a prompt of one token, and max_tokens 1
    except SpecError:
        raise SpecError(
            f"{where} has positions that a short request does not have, and such requests would be "
            "refused. Give 'all', 'prompt', 'generated', 'last', a slice or token ids."
        ) from None


#: Maps an engine's VllmConfig to the engine's monitors. An engine without monitors can lack an
#: entry.
_monitors: Beside[tuple[Monitor, ...]] = Beside()
#: The file by which several API servers share their monitors; None outside a server.
_file: Shared | None = None
#: The lock for `_monitors` and `_peers`, which the event loop and other threads read and set.
_looking = threading.Lock()


def share(file: Shared) -> None:
    """If a server has several API server processes, share this process's monitors with the other
    processes through a file."""
    global _file
    _file = file


def _shared(vllm_config: VllmConfig) -> Shared | None:
    if _file is None or vllm_config.parallel_config._api_process_count == 1:
        return None
    return _file


def configured(vllm_config: VllmConfig) -> tuple[Monitor, ...]:
    """The monitors with which the engine starts.

    Raises:
        ConfigError: a monitor is malformed, or a monitor's file cannot be read.
    """
    config = config_of(vllm_config)
    try:
        return () if config is None else parse_all(config.monitors)
    except SpecError as error:
        raise ConfigError(f"additional_config['scope'].{error}") from error


def told(vllm_config: VllmConfig) -> dict[str, dict[str, object]]:
    """The fields of each monitor as JSON, without the weight and the bias of its probe, by the name
    of the monitor."""
    found = {}
    for monitor in monitors_of(vllm_config):
        body = monitor.probe.to_json()
        shown_fields = ("site", "layers", "activation", "aggregate", "threshold", "tokens")
        kept = {field: body[field] for field in shown_fields if field in body}
        if monitor.probe.after is not None:
            kept["after"] = monitor.probe.after.removeprefix(MONITOR)
        found[monitor.name] = kept | {"action": monitor.action}
    return found


def _since(monitors: tuple[Monitor, ...], before: tuple[Monitor, ...]) -> dict[str, float]:
    """The time at which each monitor was set, by the name of the monitor. If a monitor is equal to
    the monitor in `before` with the same name, it has the time of that earlier monitor.

    A monitor with a webhook, or with a changed first stage, never counts as equal.
    """
    now, new = time.time(), {monitor.name: monitor for monitor in monitors}
    old = {monitor.name: monitor for monitor in before}

    def same(name: str) -> bool:
        one, other = new[name], old.get(name)
        if other is None or one.webhook or other.webhook:
            return False
        first = one.probe.after
        alike = one.probe.to_json() == other.probe.to_json()
        return alike and (first is None or same(first.removeprefix(MONITOR)))

    return {name: old[name].tally.since_s if same(name) else now for name in new}


def _put(
    vllm_config: VllmConfig, monitors: tuple[Monitor, ...], since: Mapping[str, float]
) -> None:
    """Replace the monitors. A monitor whose time in `since` is unchanged keeps its tally."""
    old = {monitor.name: monitor for monitor in _monitors.of(vllm_config) or ()}

    def held(one: Monitor) -> Monitor:
        other, since_s = old.get(one.name), since[one.name]
        if other is not None and other.tally.since_s == since_s:
            return other
        assert one.probe.threshold is not None
        return replace(one, tally=Tally(one.probe.threshold, since_s))

    _monitors.put(vllm_config, tuple(map(held, monitors)))


def monitors_of(vllm_config: VllmConfig) -> tuple[Monitor, ...]:
    """The monitors that are added to new requests."""
    with _looking:
        return _looked_up(vllm_config)


def _looked_up(vllm_config: VllmConfig) -> tuple[Monitor, ...]:
    if (shared := _shared(vllm_config)) is not None and (text := shared.news()) is not None:
        told = json.loads(text)
        _put(vllm_config, parse_all(told["monitors"]), told["since"])
    found = _monitors.of(vllm_config)
    if found is not None:
        return found
    # This code runs for each request. To save time, it parses only a configuration with monitors.
    additional = vllm_config.additional_config
    body = additional.get(KEY) if isinstance(additional, dict) else None
    if not isinstance(body, Mapping) or not body.get("monitors"):
        return ()
    return _monitors.put(vllm_config, configured(vllm_config))


def no_beams(vllm_config: VllmConfig) -> str:
    """The error text for a beam search with taps. vLLM makes a request for each token of each beam.
    In such a request, monitors see no generated tokens, and the request has ended before a verdict
    can stop it."""
    found = monitors_of(vllm_config)
    called = f"monitor{'s' if found[1:] else ''} {', '.join(repr(one.name) for one in found)}"
    why = f", and this engine taps every request for its {called}" if found else ""
    return f"beam search cannot be tapped{why}; sample instead."


def spec_of(vllm_config: VllmConfig) -> str | None:
    """The text of a spec that has only the monitors' probes; None if there are no monitors."""
    return _text_of(monitors_of(vllm_config))


def _text_of(monitors: tuple[Monitor, ...]) -> str | None:
    return translators.text_of(tuple(m.probe for m in monitors)) if monitors else None


def set_monitors(
    engine: Engine,
    bodies: object,
    connection: Connection,
    ask: Callable[[str], object] = lambda _: None,
) -> None:
    """Replace an engine's monitors, in this process and in the other API server processes. The new
    monitors are added to requests that enter later. There is one exception: the prepared requests
    of a sweep or harvest that already runs (frontend.alike).

    Args:
        bodies: maps the name of each monitor to the body for `parse`. A body must not have the
            fields `file` and `url`: a caller can send numbers, but no paths and no addresses. An
            empty mapping removes all monitors.
        connection: the engine's sites and limits.
        ask: a function that gets the monitors as the text of a spec. It asks EngineCore whether
            there is room for these monitors and the server-wide edits together.

    Raises:
        SpecError: a monitor is malformed, or the engine does not support a monitor, or the engine
            has too little room for all monitors and the server-wide edits. In this case, no monitor
            is changed.
        OSError: the file that API servers share cannot be written. In this case, no monitor is
            changed.
    """
    for name, body in bodies.items() if isinstance(bodies, Mapping) else ():
        if isinstance(body, Mapping):
            _check_outside(f"monitors[{name!r}]", body)
    monitors = parse_all(bodies)
    if monitors and connection.reason is not None:
        raise SpecError(untapped(connection.reason))
    num_stages = engine.vllm_config.parallel_config.pipeline_parallel_size
    check(monitors, connection.sites, num_stages, connection.limits)
    text = _text_of(monitors)
    if text is not None:
        with refusing():
            ask(text)
    since = _since(monitors, monitors_of(engine.vllm_config))
    shared = _shared(engine.vllm_config)
    with _looking:
        if shared is None:
            _put(engine.vllm_config, monitors, since)
        else:
            shared.set(json.dumps({"monitors": bodies, "since": since}).encode())


def _check_outside(where: str, body: Mapping[str, object]) -> None:
    """Raises SpecError if a body has a field or an action that is allowed only in configured
    monitors."""
    if "file" in body:
        raise SpecError(
            f"{where} has 'file', which is for monitors that the engine starts with; send the "
            "numbers as 'weight'."
        )
    if "url" in body or body.get("action") == "escalate":
        what = "has 'url'" if "url" in body else "has action 'escalate', which needs a 'url'"
        raise SpecError(
            f"{where} {what}. Only monitors that the engine starts with tell a url: set them "
            f"{AT_START}. A monitor that is set while the engine serves has action 'flag' or "
            "'stop'."
        )


def set_on(engine: LLMEngine, bodies: object) -> None:
    """Connect to the workers of an LLM if necessary, and then set its monitors."""
    if needs_connection(engine):
        connect_sync(engine)
    connection = connection_of(engine.output_processor)

    def ask(text: str) -> None:
        engine.collective_rpc(_CHECK, args=(text,))

    set_monitors(engine, bodies, connection, ask)
    ahead.send(engine, monitors_of(engine.vllm_config))
    _make_ready(engine, connection)


async def set_on_async(engine: AsyncLLM, bodies: object) -> None:
    """Connect to the workers of an AsyncLLM if necessary, and then set its monitors."""
    if needs_connection(engine):
        await connect_async(engine)
    connection = connection_of(engine.output_processor)
    loop = asyncio.get_running_loop()

    async def call(text: str) -> None:
        await engine.collective_rpc(_CHECK, args=(text,))

    def ask(text: str) -> None:
        asyncio.run_coroutine_threadsafe(call(text), loop).result()

    await asyncio.to_thread(set_monitors, engine, bodies, connection, ask)
    ahead.send_soon(engine, monitors_of(engine.vllm_config))
    await asyncio.to_thread(_make_ready, engine, connection)  # not on the event loop


def _make_ready(engine: Engine, connection: Connection) -> None:
    """Resolve and check the spec of a request that has only monitors. Without this function, the
    first request would have to do this work, and other requests would wait."""
    text = spec_of(engine.vllm_config)
    if connection.reason is not None or text is None:
        return
    with suppress(SpecError):  # `check` has already checked the monitors
        connection.check(connection.resolve(Spec.from_json(text)), [0], 1)


# The findings of monitors

#: Maps an engine's VllmConfig to the Peers object, which exchanges counts with other processes.
_peers: Beside[Peers] = Beside()


def _peers_of(vllm_config: VllmConfig) -> Peers | None:
    """The engine's Peers, which exchanges counts with the other API server processes; None if there
    are no other processes."""
    if (shared := _shared(vllm_config)) is None:
        return None
    config = weakref.ref(vllm_config)

    def text() -> bytes:
        found = config()
        return msgspec.json.encode({} if found is None else tallied(monitors_of(found)))

    with _looking:
        known = _peers.of(vllm_config)
        return known or _peers.put(vllm_config, Peers(shared.folder, text))


def activity_of(vllm_config: VllmConfig) -> dict[str, Found]:
    """The findings of each monitor in all API server processes, by the name of the monitor. The
    counts of other processes can be about one second old."""
    own = tallied(monitors_of(vllm_config))
    peers = _peers_of(vllm_config)
    texts = [] if peers is None else peers.others()
    others = [msgspec.json.decode(text, type=dict[str, Found]) for text in texts]
    return {
        name: joined(
            [found, *(o[name] for o in others if name in o and o[name].since_s == found.since_s)],
            time.time(),
        )
        for name, found in own.items()
    }


# The controller that gets the findings

#: Maps an engine's VllmConfig to the function that gives the monitors' findings to the Controller.
_listeners: Beside[Callable[[Observation], None]] = Beside()


def listen(vllm_config: VllmConfig, tell: Callable[[Observation], None] | None) -> None:
    """Call `tell` with the monitors' findings in each completion of requests that enter from now
    on. If `tell` is None, no function gets the findings of these requests.

    Raises:
        SpecError: the engine already has a controller.
    """
    if tell is None:
        _listeners.pop(vllm_config)
    elif _listeners.of(vllm_config) is not None:
        raise SpecError("this engine has a controller already; close that one first.")
    else:
        _listeners.put(vllm_config, tell)


# In requests


def _everywhere(vllm_config: VllmConfig) -> Mapping[str, object] | None:
    monitors = monitors_of(vllm_config)
    if not monitors:
        return None
    return {_KEY: (monitors, _listeners.of(vllm_config), _peers_of(vllm_config))}


#: The key of the values that `_everywhere` gives to `_translate`. A caller cannot send a value
#: under this key, because the key is not registered.
_KEY = "scope monitors"


def _translate(values: Mapping[str, object], sites: Sites) -> translators.Translation:
    found: Any = values[_KEY]
    monitors, tell, peers = found
    return translators.Translation(
        tuple(monitor.probe for monitor in monitors), Judge(monitors, tell, peers).told
    )


def register() -> None:
    """Add the monitors to every request of this process's engines."""
    translators.register("monitors", (), _translate, _everywhere)
