"""Sinks for tests, and a worker's delivery side without a model."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_scope import Features
from vllm_scope.batch.labels import Labels
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites, point_of
from vllm_scope.request.spec import Spec
from vllm_scope.sinks import Block, Ending, Manifest, Report, RequestInfo, RowBatch
from vllm_scope.sinks import options as sink_options
from vllm_scope.sinks.request import Ended
from vllm_scope.sinks.router import Router

PATIENCE_S = 20
SITES = Sites(2, 4, "float32", (0, 2, 4))
#: Points of embed, resid_post 0 and resid_post 1.
POINTS = tuple(point_of(boundary, 1) for boundary in SITES.boundaries)
#: Of one row at each of two layers.
TOKEN_BYTES = 2 * 16
EVERYTHING = Layout(POINTS)


class Recorder:
    """Keeps what it is given; slow, stuck or broken as it is told.

    Attributes:
        rows: (key, site, layer or probe) -> (position, first value) in order.
        stuck: `write` hangs while it is set.
    """

    live = True
    made: list[Recorder]

    def __init__(self, delay_s: float = 0.0, fail: str = "") -> None:
        self.delay_s, self.fail = delay_s, fail
        #: How long one row takes.
        self.row_s = 0.0
        self.rows: dict[tuple, list[tuple[int, float]]] = {}
        self.endings: list[Ending] = []
        self.num_flushed = self.num_closed = 0
        self.threads: set[int] = set()
        self.go_on = threading.Event()
        self.go_on.set()
        type(self).made.append(self)

    def write(self, block: Block) -> None:
        self.threads.add(threading.get_ident())
        time.sleep(self.delay_s + self.row_s * len(block.positions))
        assert self.go_on.wait(PATIENCE_S)
        if self.fail == "write":
            raise OSError("disk full")
        name = (block.request.key, block.site, block.probe or block.layer)
        values = block.rows.reshape(len(block.positions), -1)[:, 0].tolist()
        some = self.rows.setdefault(name, [])
        some += zip(block.positions.tolist(), values, strict=True)

    def finish(self, ending: Ending) -> Report | None:
        if self.fail == "finish":
            raise OSError("disk full")
        self.endings.append(ending)
        return Report(files=[f"{ending.request.key}.x"], details={"said": "fine"})

    def flush(self) -> None:
        self.num_flushed += 1

    def close(self) -> None:
        self.num_closed += 1


class Live(Recorder): ...


class Whole(Recorder):
    live = False


class Other(Recorder): ...


class Memory:
    """Stands for the road back to front-ends."""

    def __init__(self) -> None:
        self.finished: dict[int, tuple[str | None, dict[str, Manifest]]] = {}
        self.at: dict[int, float] = {}
        self.num_batches = 0
        self.reports: list[dict] = []

    def write(self, batch: RowBatch) -> None:
        self.num_batches += 1

    def finish_all(self, ends: Any) -> None:
        for key, error in ends:
            self.finish(key, error)

    def finish(self, key: int, error: str | None, manifests: Any = None) -> None:
        assert key not in self.finished
        self.at[key] = time.monotonic()
        self.finished[key] = (error, manifests or {})

    def counters(self) -> dict[str, float]:
        return {"bytes": 0}

    def send_counters(self, sinks: dict) -> bool:
        self.reports.append(sinks)
        return True

    def close(self) -> None: ...


class Side:
    """A router and what feeds it, as the drain does."""

    def __init__(self, router: Router, memory: Memory) -> None:
        self.router, self.memory = router, memory
        #: What all requests have.
        self.info: dict[str, Any] = {}
        self._asked: dict[int, tuple[Resolved, tuple[int, ...]]] = {}

    def add(self, key: int, *actions: Any, prompt: tuple[int, ...] = (5, 6)) -> None:
        reads = tuple(a for a in actions if hasattr(a, "when"))
        features = tuple(a for a in actions if isinstance(a, Features))
        probes = tuple(a for a in actions if not hasattr(a, "when") and a not in features)
        asked = Spec(reads, probes, features=features).resolve(SITES)
        info = RequestInfo(key, f"r{key}", f"u{key}", prompt, **self.info)
        self.router.add_request(info, asked)

    def write(self, key: int | list[int], positions: list[int], base: float = 0.0,
              layout: Layout = EVERYTHING, size: int = 4) -> None:  # fmt: skip
        """One row for each point; its values are base + 10 * position + point's number."""
        keys = [key] * len(positions) if isinstance(key, int) else key
        widths = Widths((4 * size,))
        rows = torch.zeros(len(positions), len(layout.points), size)
        for i, position in enumerate(positions):
            for j in range(len(layout.points)):
                rows[i, j] = base + 10 * position + j
        labels = Labels(
            np.array(keys, np.int64), np.array(positions, np.int64),
            np.zeros(len(positions), np.int32), (layout,), np.arange(len(positions)),
        )  # fmt: skip
        slots = rows.view(torch.uint8).reshape(-1, SLOT_BYTES)
        assert len(slots) == len(positions) * layout.slots(widths)
        lease: Any = SimpleNamespace(slots=slots)
        self.router.write(RowBatch(labels, lease, widths))

    def end(self, key: int, output: tuple[int, ...] = (7, 8), reason: str = "length",
            error: str | None = None) -> None:  # fmt: skip
        self.router.expect_end(key, Ended(output, reason))
        self.router.finish(key, error)

    def manifest(self, key: int, sink: str = "mine") -> Manifest:
        """Once it is there."""
        deadline = time.monotonic() + PATIENCE_S
        while key not in self.memory.finished and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.memory.finished[key][1][sink]


@contextmanager
def side(monkeypatch, sinks: dict, global_sinks: dict | None = None,
         here: tuple[int, ...] = SITES.boundaries, **plugins) -> Iterator[Side]:  # fmt: skip
    """Args:
    sinks, global_sinks: as in the engine's options.
    here: boundaries of this stage.
    plugins: name -> class.
    """
    install(monkeypatch, plugins)
    memory: Any = Memory()
    parse = sink_options.parse_sinks
    router = Router(
        memory, parse(sinks, "sinks", False), parse(global_sinks or {}, "global_sinks", True),
        SITES, here,
    )  # fmt: skip
    try:
        yield Side(router, memory)
    finally:
        router.close()


def install(monkeypatch, plugins: dict[str, type]) -> None:
    """As if packages with these entry points were installed."""
    for plugin in plugins.values():
        if issubclass(plugin, Recorder):
            plugin.made = []
    points = [SimpleNamespace(name=n, load=lambda c=c: c) for n, c in plugins.items()]
    monkeypatch.setattr(sink_options, "entry_points", lambda group: points)


@contextmanager
def nobody(*own):
    """Root may write anywhere; for a while we are someone else, whose folders these are."""
    if os.geteuid():
        yield
        return
    stranger = 65534
    folders = [path for folder in own for path in (folder, *folder.rglob("*"))]
    for path in folders:
        os.chown(path, stranger, stranger)
    # A temporary folder is root's alone.
    parents = {p: p.stat().st_mode for folder in own for p in folder.parents if p.owner() == "root"}
    for path, mode in parents.items():
        path.chmod(mode | 0o111)
    os.seteuid(stranger)
    try:
        yield
    finally:
        os.seteuid(0)
        for path, mode in parents.items():
            path.chmod(mode)


@contextmanager
def small_disk(folder, num_bytes):
    """A file system of its own, in memory."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
