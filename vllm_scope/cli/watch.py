"""`vllm-scope watch`: scores of probes, in the terminal, while the tokens stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_scope.actions import Probe
from vllm_scope.cli.remote import Server, asking, bars
from vllm_scope.errors import SpecError
from vllm_scope.vectors.probe_files import probe_path, read_place, read_weights

#: Scores shown of each probe, the last ones.
WIDTH = 48


def watch(server: Server, prompt: str, files: list[Path], layer: int | None, chat: bool) -> None:
    """Follow one answer.

    Args:
        files: each a probe's safetensors (vectors.probe_files).
        layer: whose rows they score, where no .json beside a file says it.
    """
    console = Console()
    with asking(server, console) as client:
        probes = [load(path, layer) for path in files]
        asked = [{"role": "user", "content": prompt}] if chat else prompt
        view = View([probe.name for probe in probes], "" if chat else prompt)
        with Live(view.shown(), console=console, refresh_per_second=12) as live:
            for chunk in client.stream(asked, *probes, **server.options):
                view.add(chunk.text, dict(chunk.scope.scores) if chunk.scope else {})
                live.update(view.shown())


def load(path: Path, layer: int | None) -> Probe:
    """A probe of the file's name, at the place that its .json tells."""
    weight, bias = read_weights(probe_path(path))
    beside = path.with_suffix(".json")
    if not beside.exists():
        if layer is None:
            raise SpecError(f"there is no {beside} that says whose rows it scores; give --layer.")
        return Probe(weight, bias, layer=layer, name=path.stem)
    place = read_place(beside)
    if layer not in (None, place["layer"]):
        raise SpecError(f"{beside} has layer {place['layer']}, --layer {layer}; leave that out.")
    at = None if place["site"] == "embed" else place["layer"]
    return Probe(weight, bias, place["site"], at, name=path.stem)


class View:
    """What is on the screen: the text so far, and a line for each probe."""

    def __init__(self, names: list[str], prompt: str) -> None:
        self._text = Text(prompt, style="dim")
        self._scores: dict[str, list[float]] = {name: [] for name in names}

    def add(self, text: str, scores: dict[str, np.ndarray]) -> None:
        self._text.append(text, style="bold not dim")
        for name, values in scores.items():
            self._scores[name] += values.tolist()

    def shown(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for heading in ("probe", "now", "mean", f"last {WIDTH}"):
            table.add_column(heading)
        for name, values in self._scores.items():
            known = [value for value in values if np.isfinite(value)]
            if not known:
                table.add_row(name, "-", "-", "")
                continue
            last = known[-WIDTH:]
            line = bars(last, min(known), max(known))
            table.add_row(name, f"{known[-1]:+.2f}", f"{np.mean(known):+.2f}", line)
        return Group(self._text, Text(""), table)
