"""`vllm-scope watch`: shows an answer while it streams, each token with the scores of probes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from vllm_scope.cli.display import Coloured, Lines, Scale
from vllm_scope.cli.remote import Server, asking, check_whole, scope_of
from vllm_scope.errors import SpecError
from vllm_scope.request.actions import Probe
from vllm_scope.request.sites import MODEL_SITES
from vllm_scope.vectors.probe_files import CHAT, RAW, doubts, probe_path, read_place, read_weights


def watch(
    server: Server,
    prompt: str,
    files: Sequence[Path],
    layer: int | None,
    chat: bool,
    system: str | None,
    tokens: str | None,
) -> None:
    """Complete a prompt, and show each token with its scores as it streams.

    Args:
        prompt: a text. In a chat, the prompt is a user's message or a JSON list of messages.
        files: the files of probes (vectors.probe_files). The first probe colours the text.
        layer: the layer of the scored rows, for probe files without a .json file.
        system: a system message, which makes the prompt a chat.
        tokens: the selector of the tokens that are scored. If None, the selector is "generated" for
            a probe that was fitted to generated tokens, and "all" for other probes.
    """
    console = Console()
    messages = messages_of(prompt, chat, system)
    with asking(server, console) as client:
        template = RAW if messages is None else CHAT
        probes = [load(path, layer, tokens, template) for path in files]
        for doubt in dict.fromkeys(doubt for probe in probes for doubt in probe.doubts):
            print(f"warning: {doubt}", file=sys.stderr)
        actions, scales = [p.action for p in probes], [p.scale for p in probes]
        asked, shown = (prompt, prompt) if messages is None else (messages, "")
        view, last = None, None
        for chunk in client.stream(asked, *actions, **server.fields):
            last = chunk.scope or last
            view = view or view_of(console, scales, shown)
            view.add(chunk)
        found = scope_of(server, last)
        if view is not None:
            view.end()
        check_whole(found)


def messages_of(prompt: str, chat: bool, system: str | None) -> list[dict[str, object]] | None:
    """The messages of a chat; None for a plain prompt."""
    if not chat and system is None:
        return None
    first: list[dict[str, object]] = []
    if system is not None:
        first = [{"role": "system", "content": system}]
    try:
        given = json.loads(prompt)
    except ValueError:
        given = None
    if isinstance(given, list) and given and all(isinstance(each, dict) for each in given):
        return [*first, *given]
    return [*first, {"role": "user", "content": prompt}]


def view_of(console: Console, scales: Sequence[Scale], prompt: str) -> Coloured | Lines:
    if not console.is_terminal or console.no_color or console.is_dumb_terminal:
        return Lines(console, [scale.name for scale in scales])
    return Coloured(console, scales, prompt)


@dataclass(frozen=True)
class Watched:
    """A probe from a file: its action, its colours, and the reasons to doubt its scores."""

    action: Probe
    scale: Scale
    doubts: list[str]


def load(path: Path, layer: int | None, tokens: str | None, template: str) -> Watched:
    """The probe of a file. The probe's name is the file's name without its suffix. A .json file of
    this name has the probe's place. Without a .json file, the place is `resid_post` at `layer`."""
    weight, bias = read_weights(probe_path(path))
    beside = path.with_suffix(".json")
    if beside.exists():
        place = read_place(beside)
        if layer not in (None, place["layer"]):
            raise SpecError(
                f"{beside} has layer {place['layer']}, and --layer is {layer}; leave --layer out."
            )
    elif layer is None:
        raise SpecError(f"there is no {beside} with the probe's layer; give --layer.")
    else:
        place = {"site": "resid_post", "layer": layer}
    pooling, calibration = place.get("pooling"), place.get("calibration")
    tokens = tokens or ("generated" if pooling == "generated" else "all")
    at = None if place["site"] in MODEL_SITES else place["layer"]
    action = Probe(weight, bias=bias, site=place["site"], layers=at, name=path.stem, tokens=tokens)
    scale = Scale(path.stem, 1.0, -place.get("threshold", 0.0), False)
    if calibration is not None and calibration["slope"] != 0:
        scale = Scale(path.stem, calibration["slope"], calibration["offset"], True)
    found = doubts(path.stem, pooling, tokens, place.get("template"), template)
    return Watched(action, scale, found)
