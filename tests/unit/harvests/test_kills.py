"""However often a harvest is killed, its rows are those of one that was not.

A real process is killed. It takes recorded rows in place of an engine, because an engine takes long
to start; tests/engine/test_harvest.py kills the command with an engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

import vllm_scope
from tests.recorded import harvest
from vllm_scope.harvests.manifest import read_manifest

pytestmark = pytest.mark.long

#: Seconds between two looks, and the longest that a run may take before it is killed.
LOOK_S, LONGEST_S = 0.0005, 60


def write_documents(path, count=700):
    chosen = random.Random(5)
    rows = [{"id": f"d{i}", "text": "x" * chosen.randrange(120)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(out):
    """(document, first token) of each context -> its tokens, positions and rows."""
    found = {}
    for request in vllm_scope.open(out):
        span = request.manifest.documents[0]
        assert request.status == "ok"
        assert (span.document, span.first) not in found, "a context is there twice"
        found[span.document, span.first] = (
            [(s.document, s.first, s.num_tokens, s.total) for s in request.manifest.documents],
            request.token_ids.tolist(),
            [request.positions(*stream).tolist() for stream in request.keys()],
            [request[stream].view(torch.int16).tolist() for stream in request.keys()],
        )
    return found


def start(dataset, out, long):
    options = json.dumps({"long": long, "id_column": "id"})
    return subprocess.Popen(
        [sys.executable, "-m", "tests.recorded", str(dataset), str(out), options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def names_in(out):
    return {name for _, _, names in os.walk(out) for name in names if name.startswith((".", "s"))}


def kill_at(dataset, out, long, num_changes, after_s):
    """Kill the process once its folder has changed so often, and some time after. False if it had
    ended before."""
    process = start(dataset, out, long)
    seen, deadline = names_in(out), time.monotonic() + LONGEST_S
    while num_changes and process.poll() is None and time.monotonic() < deadline:
        now = names_in(out)
        num_changes -= now != seen
        seen = now
        time.sleep(LOOK_S)
    time.sleep(after_s)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert not process.communicate()[1]
    return alive


@pytest.mark.parametrize(("long", "num_kills"), [("pack", 3), ("split", 20)])
def test_a_harvest_that_is_killed_at_any_point_equals_one_that_is_not(long, num_kills, tmp_path):
    dataset, out = write_documents(tmp_path / "rows.jsonl"), tmp_path / "out"
    whole = harvest(dataset, tmp_path / "whole", long=long, id_column="id")
    chosen, num_killed = random.Random(num_kills), 0
    while num_killed < num_kills:
        killed = kill_at(dataset, out, long, chosen.randint(1, 12), chosen.random() / 50)
        if not killed:  # it had done all: begin again
            assert read_manifest(str(out)).complete
            for file in list(out.iterdir()):
                file.unlink()
        num_killed += killed
    before = {file: file.read_bytes() for file in out.glob("shard-*.safetensors")}
    kept = {name for file in before for name in names_of(file)}
    printed, errors = start(dataset, out, long).communicate()
    assert not errors
    assert not kept & set(json.loads(printed)), "what a shard held was computed again"
    assert all(file.read_bytes() == body for file, body in before.items())
    assert contents(out) == contents(tmp_path / "whole")
    check_manifest(out, whole)
    assert not [name for name in names_in(out) if name.endswith(".tmp")]


def names_of(file):
    return [request.name for request in vllm_scope.open(file)]


def check_manifest(out, whole):
    """Counts and figures equal those of a harvest that was not killed."""
    manifest = read_manifest(str(out))
    assert manifest.complete
    size = "bytes"  # of the shards' headers too
    assert {**manifest.totals, size: 0} == {**whole.manifest.totals, size: 0}
    assert manifest.streams.keys() == whole.manifest.streams.keys()
    for name, figures in manifest.streams.items():
        other = whole.manifest.streams[name]
        assert figures["rows"] == other["rows"] > 0
        assert figures["norm"] == pytest.approx(other["norm"], rel=1e-6)
        # Other blocks of rows are summed in float32.
        assert figures["variance"] == pytest.approx(other["variance"], rel=1e-4)
        assert figures["outliers"] == other["outliers"]
    for name, shard in manifest.shards.items():
        body = (out / name).read_bytes()
        assert (shard.sha256, shard.num_bytes) == (hashlib.sha256(body).hexdigest(), len(body))
    assert set(manifest.shards) == {file.name for file in out.glob("shard-*.safetensors")}


def test_a_killed_process_leaves_no_lock(tmp_path):
    dataset, out = write_documents(tmp_path / "rows.jsonl"), tmp_path / "out"
    assert kill_at(dataset, out, "split", 1, 0)
    process = start(dataset, out, "split")
    while not list(out.glob("shard-*")) and process.poll() is None:
        time.sleep(LOOK_S)
    psutil.Process(process.pid).suspend()
    refused = start(dataset, out, "split")
    _, errors = refused.communicate()
    psutil.Process(process.pid).resume()
    assert "another process harvests into" in errors
    assert not process.communicate()[1]
    assert read_manifest(str(out)).complete
