"""Rows reach the sinks that were named, whole and counted."""

from __future__ import annotations

import resource
import threading
import time

import numpy as np
import pytest
import torch

import vllm_scope
from tests.unit.recording import (
    POINTS,
    SITES,
    TOKEN_BYTES,
    Live,
    Other,
    Whole,
    install,
    nobody,
    side,
    small_disk,
)  # fmt: skip
from vllm_scope import ConfigError, Features, Probe, Read
from vllm_scope.batch.labels import Labels
from vllm_scope.codecs import make_codec
from vllm_scope.config import ScopeConfig
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.actions import HeldSae
from vllm_scope.request.sites import point_of
from vllm_scope.request.spec import Spec
from vllm_scope.sinks import Manifest, quota
from vllm_scope.sinks.quota import REQUEST_BYTES
from vllm_scope.sinks.request import Delivery
from vllm_scope.sinks.sink_thread import SinkThread
from vllm_scope.worker.packer import Packer

READ = Read("resid_post", to="mine")


# What a sink is given


def test_a_live_sink_has_rows_as_they_come_and_the_counts_at_the_end(monkeypatch):
    with side(monkeypatch, {"mine": {}}, mine=Live) as here:
        here.add(1, READ)
        here.write(1, [0, 1])
        here.write(1, [2])
        here.write(1, [1], base=0.5)  # computed again
        here.write(1, [3])  # of a token that is never accepted
        here.end(1)
        manifest = here.manifest(1)
    (sink,) = Live.made
    assert sink.rows[1, "resid_post", 0] == [(0, 1), (1, 11), (2, 21), (1, 11.5), (3, 31)]
    assert sink.rows[1, "resid_post", 1] == [(0, 2), (1, 12), (2, 22), (1, 12.5), (3, 32)]
    assert manifest == Manifest("ok", None, 6, 6, 0, ["1.x"], {}, [{"said": "fine"}])
    (ending,) = sink.endings
    assert (ending.output_ids, ending.finish_reason) == ((7, 8), "length")
    assert sink.num_closed == 1


def test_a_sink_of_whole_requests_has_the_last_row_of_each_accepted_position_in_order(monkeypatch):
    with side(monkeypatch, {"mine": {}}, mine=Whole) as here:
        here.add(1, Read("resid_post", layer=1, to="mine"), Read("embed", tokens=[0], to="mine"))
        for positions, base in (([2, 0], 0), ([1], 0), ([0, 1], 0.5), ([3, 4], 0)):
            here.write(1, positions, base)
        here.end(1)
        manifest = here.manifest(1)
    rows = Whole.made[0].rows
    assert rows == {
        (1, "resid_post", 1): [(0, 2.5), (1, 12.5), (2, 22)],
        (1, "embed", 0): [(0, 0.5)],
    }
    assert (manifest.expected, manifest.delivered) == (4, 4)
    assert manifest.streams["resid_post.1"] == {"shape": [3, 4], "dtype": "float32"}


@pytest.mark.parametrize("kind", [Live, Whole])
def test_scores_go_to_a_sink_with_their_probe(kind, monkeypatch):
    probe = Probe([1.0, 0, 0, 0], bias=0.5, layer=1, name="truth", to="mine")
    (bank,) = Spec(probes=(probe,)).resolve(SITES).banks
    layout = Layout(POINTS[:1], ((bank, POINTS[2:]),))
    with side(monkeypatch, {"mine": {}}, mine=kind) as here:
        here.add(1, probe)
        # The score is in the slot behind the row.
        here.write(1, [0, 1, 2], layout=Layout((POINTS[0], POINTS[1])))
        here.end(1)
        assert here.manifest(1).status == "partial"  # there was no score in that layout
        here.add(2, probe)
        here.router._route(
            2,
            layout,
            np.arange(3),
            torch.arange(24.0).view(3, 8).view(torch.uint8).numpy(),
            Widths((16,)),
        )
        here.end(2)
        assert here.manifest(2).status == "ok"
    assert kind.made[0].rows == {(2, "resid_post", "truth"): [(0, 4.5), (1, 12.5), (2, 20.5)]}


@pytest.mark.parametrize("kind", [Live, Whole])
def test_each_probe_of_a_place_gets_its_own_scores_at_a_sink(kind, monkeypatch):
    probes = [
        Probe([i + 1.0, 0, 0, 0], layer=1, name=f"p{i}", to="memory" if i == 2 else "mine")
        for i in range(6)
    ]
    (bank,) = Spec(probes=tuple(probes)).resolve(SITES).banks
    layout = Layout((), ((bank, POINTS[2:]),))
    with side(monkeypatch, {"mine": {}}, mine=kind) as here:
        here.add(1, *probes)
        # Six numbers in two slots.
        data = torch.arange(24.0).view(3, 8).view(torch.uint8).numpy()
        here.router._route(1, layout, np.arange(3), data, Widths((16,)))
        here.end(1)
        manifest = here.manifest(1)
    assert (manifest.status, manifest.expected, manifest.delivered) == ("ok", 15, 15)
    assert kind.made[0].rows == {
        (1, "resid_post", f"p{i}"): [(position, 8 * position + i) for position in range(3)]
        for i in (0, 1, 3, 4, 5)
    }


class KeepsFeatures(Live):
    """Name -> (position, indices, values), copied."""

    def write(self, block):
        some = zip(
            block.positions.tolist(), block.indices.tolist(), block.rows.tolist(), strict=True
        )
        self.rows.setdefault(block.probe, []).extend(some)


class KeepsWholeFeatures(KeepsFeatures):
    live = False


@pytest.mark.parametrize("kind", [KeepsFeatures, KeepsWholeFeatures])
def test_features_go_to_a_sink_with_their_indices(kind, monkeypatch):
    rows = {"encoder": [[1.0] * 4] * 2, "bias": [0.0, 0.0], "threshold": [0.0, 20.0]}
    where = {"site": "resid_post", "layer": 1, "to": "mine"}
    some = Features(rows, indices=[70, 20], name="some", **where)
    top = Features(HeldSae("s", 99, 4, None), top_k=2, threshold=0.5, name="top", **where)
    asked = Spec(features=(some, top)).resolve(SITES)
    banks = [one.cells[0].bank for one in asked.features]
    layout = Layout((), tuple((bank, POINTS[2:]) for bank in banks))
    with side(monkeypatch, {"mine": {}}, mine=kind) as here:
        here.add(1, some, top)
        # The numbers of both features, padded; then two indices and two values.
        data = torch.tensor([[10.0, 20, 0, 0, 0, 0, 3, 0.25], [0, 21, 0, 0, 0, 0, 0, 0]])
        data[:, 4:6] = torch.tensor([[5, 8], [1, 2]], dtype=torch.int32).view(torch.float32)
        here.router._route(1, layout, np.arange(2), data.view(torch.uint8).numpy(), Widths((16,)))
        here.end(1)
        manifest = here.manifest(1)
    # Three positions were processed; the last did not come. At its threshold nothing is active.
    assert (manifest.status, manifest.expected, manifest.delivered) == ("partial", 6, 4)
    assert kind.made[0].rows == {
        "some": [(0, [70, -1], [10.0, 0.0]), (1, [-1, 20], [0.0, 21.0])],
        "top": [(0, [5, -1], [3.0, 0.0]), (1, [-1, -1], [0.0, 0.0])],
    }


class KeepsBlocks(Live):
    """What blocks hold, copied."""

    def write(self, block):
        encoded = None if block.encoded is None else block.encoded.kept()
        self.rows[block.site, block.layer] = (block.rows.clone(), encoded)


class KeepsWholeBlocks(KeepsBlocks):
    live = False


@pytest.mark.parametrize("kind", [KeepsBlocks, KeepsWholeBlocks])
def test_a_row_that_two_reads_name_comes_under_both_names(kind, monkeypatch):
    """The exit of layer 0 and the entry of layer 1; the first goes to memory, too."""
    reads = Read("resid_pre", layer=1, to="mine"), Read("resid_post", layer=0, to="mine")
    exit_, entry = point_of(2, 1), point_of(2, 2)
    layout, count = Layout((exit_,), (), ((entry, exit_),)), np.arange(3)
    raw = torch.randn(3, 4)
    with side(monkeypatch, {"mine": {}}, mine=kind) as here:
        here.add(1, *reads, Read("resid_post", layer=0))
        data = raw.view(torch.uint8).numpy().reshape(3, -1)
        here.router._route(1, layout, count, data, Widths((16,)))
        here.end(1)
        manifest = here.manifest(1)
    (sink,) = kind.made
    assert {stream: torch.equal(rows, raw) for stream, (rows, _) in sink.rows.items()} == {
        ("resid_pre", 1): True, ("resid_post", 0): True,
    }  # fmt: skip
    assert (manifest.status, manifest.delivered) == ("ok", 6)


@pytest.mark.parametrize("kind", [KeepsBlocks, KeepsWholeBlocks])
def test_a_plugin_gets_encoded_rows_encoded_and_decoded(kind, monkeypatch):
    reads = (
        Read("embed", to="mine"),
        Read("resid_post", layer=0, to="mine", codec="int8"),
        Read("resid_post", layers=[0, 1], codec="fp16"),
        Read("resid_post", layer=1, to="mine", codec="full8"),
    )
    embed, first, second = POINTS
    int8, fp16, full8 = (r.encoding for r in Spec(reads).resolve(SITES).reads[1:])
    layout = Layout((embed,), ((fp16, (first, second)), (full8, (second,)), (int8, (first,))))
    raw = torch.randn(3, 3, 4)
    packer = Packer(torch.float32, torch.device("cpu"), Widths((16,)))
    count = np.arange(3)
    labels = Labels(count, count, np.zeros(3, np.int32), (layout,), count)
    data = torch.empty((packer.num_slots(labels, None), 16), dtype=torch.uint8)
    packer.pack(raw.view(9, 4), labels, None, data)
    with side(monkeypatch, {"mine": {}}, mine=kind) as here:
        here.add(1, *reads)
        here.router._route(1, layout, count, data.numpy().reshape(3, -1), Widths((16,)))
        here.end(1)
        manifest = here.manifest(1)
        assert here.router.counters()["mine"]["bytes"] == 3 * (16 + 16 + 16)
    (sink,) = kind.made
    assert list(sink.rows) == [("embed", 0), ("resid_post", 0), ("resid_post", 1)]
    rows, encoded = sink.rows["embed", 0]
    assert torch.equal(rows, raw[:, 0])
    assert encoded is None
    for layer, name in enumerate(("int8", "full8")):
        codec = make_codec(name, 4, torch.float32)
        rows, encoded = sink.rows["resid_post", layer]
        assert encoded.codec == codec
        parts = codec.encode(raw[:, layer + 1])
        assert all(torch.equal(encoded.parts[part], parts[part]) for part in parts)
        assert torch.equal(rows, codec.decode(parts, 3))
        if kind is KeepsWholeBlocks:
            assert manifest.streams[f"resid_post.{layer}"] == {
                "shape": [3, 4], "dtype": "float32", "codec": codec.metadata()
            }  # fmt: skip
    assert (manifest.status, manifest.expected, manifest.delivered) == ("ok", 9, 9)


def test_rows_of_a_request_go_to_each_of_its_sinks_and_no_further(monkeypatch):
    with side(monkeypatch, {"mine": {}, "other": {}}, mine=Live, other=Other) as here:
        here.add(1, READ, Read("embed", to="other"))
        here.add(2, Read("embed", to="other"))
        here.write([1, 2, 9, 1, 2], [0, 0, 0, 1, 1])
        for key in (1, 2, 9):
            here.end(key, output=(7,))
        assert here.manifest(1, "mine").delivered == 4
        assert here.manifest(2, "other").delivered == 2
    assert set(Live.made[0].rows) == {(1, "resid_post", 0), (1, "resid_post", 1)}
    rows = [(0, 0), (1, 10)]
    assert Other.made[0].rows == {(1, "embed", 0): rows, (2, "embed", 0): rows}
    assert set(here.memory.finished[9][1]) == set()


def test_a_tag_and_a_name_are_the_destinations_own(monkeypatch):
    with side(monkeypatch, {"mine": {}, "other": {}}, mine=Live, other=Other) as here:
        here.add(1, Read("embed", to="mine", tag="t", name="n"), Read("embed", to="other"))
        here.write(1, [0])
        here.end(1, output=(7,))
        here.manifest(1)
    requests = [sink.endings[0].request for sink in (Live.made[0], Other.made[0])]
    assert [(r.tag, r.name) for r in requests] == [("t", "n"), (None, None)]


def test_with_four_threads_each_request_keeps_its_order_and_none_is_missing(monkeypatch):
    with side(monkeypatch, {"mine": {"threads": 4}}, mine=Live) as here:
        for key in range(40):
            here.add(key, READ)
        for position in range(20):
            here.write(list(range(40)), [position] * 40)
        for key in range(40):
            here.end(key, output=tuple(range(19)))
        assert all(here.manifest(key).status == "ok" for key in range(40))
    assert len(Live.made) == 4
    assert [len(sink.endings) for sink in Live.made] == [10, 10, 10, 10]
    assert all(len(sink.threads) == 1 for sink in Live.made)
    for sink in Live.made:
        for rows in sink.rows.values():
            assert [position for position, _ in rows] == list(range(20))


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_request_is_partial_with_what_it_had(monkeypatch, reason):
    with side(monkeypatch, {"mine": {}}, mine=Whole) as here:
        here.add(1, READ, prompt=tuple(range(10)))
        here.write(1, [0, 1, 2])
        here.end(1, output=(), reason=reason)
        manifest = here.manifest(1)
    assert manifest.status == "partial"
    assert reason in manifest.reason
    assert (manifest.expected, manifest.delivered, manifest.dropped) == (20, 6, 14)


def test_a_request_that_the_worker_fails_is_failed_at_its_sinks(monkeypatch):
    with side(monkeypatch, {"mine": {}}, mine=Whole) as here:
        here.add(1, READ)
        here.end(1, error="no room in the tables")
        manifest = here.manifest(1)
        assert here.memory.finished[1][0] == "no room in the tables"
    assert (manifest.status, manifest.reason) == ("error", "no room in the tables")


@pytest.mark.parametrize("fails", ["copy", "queue"])
def test_rows_that_a_sink_cannot_be_given_fail_their_request_and_take_none_of_the_others(
    fails, monkeypatch, caplog
):
    """The rows of all three requests come in one batch."""

    def failing(original):
        def call(self, *args):
            delivery = self if fails == "copy" else args[0]
            if delivery.info.key == 2:
                raise MemoryError
            return original(self, *args)

        return call

    owner, name = (Delivery, "arrival") if fails == "copy" else (SinkThread, "put")
    monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    with side(monkeypatch, {"mine": {}}, mine=Live) as one:
        for key in (1, 2, 3):
            one.add(key, Read("embed", to="mine"))
        one.write([1, 2, 3], [0, 0, 0])
        one.write([1, 2, 3], [1, 1, 1])
        for key in (1, 2, 3):
            one.end(key, output=(7,))
        found = [one.manifest(key) for key in (1, 2, 3)]
    assert [(m.status, m.delivered) for m in found] == [("ok", 2), ("error", 0), ("ok", 2)]
    assert "'mine' did not get some rows (MemoryError)" in found[1].reason
    assert caplog.text.count("rows could not be given to the sink") == 2


def test_ends_that_callers_cannot_be_told_take_none_of_the_sinks(monkeypatch, caplog):
    config = {"mine": {"reads": [{"site": "embed"}]}}
    with side(monkeypatch, {"other": {}}, config, mine=Live, other=Other) as here:

        def fail(*_):
            raise OSError("no such road")

        here.add(1, Read("embed", to="other"))
        here.add(2, Read("embed", to="global:mine"))
        monkeypatch.setattr(here.memory, "finish_all", fail)
        finish = here.memory.finish
        monkeypatch.setattr(
            here.memory, "finish", lambda key, *rest: (fail if key == 2 else finish)(key, *rest)
        )
        here.router.finish_all([(2, None), (3, None), (1, None)])
        assert here.manifest(1, "other").delivered == 0  # it came
    assert [ending.request.key for ending in Live.made[0].endings] == [2]
    assert caplog.text.count("the end of a request could not be sent") == 2


def test_global_sinks_see_every_request_and_nobody_waits_for_them(monkeypatch):
    config = {"mine": {"reads": [{"site": "embed"}]}}
    with side(monkeypatch, {}, config, mine=Live) as here:
        here.add(-2, Read("embed", to="global:mine"))
        Live.made[0].go_on.clear()
        here.write(-2, [0, 1, 2])
        here.end(-2)
        assert -2 in here.memory.finished  # at once
        Live.made[0].go_on.set()
    assert Live.made[0].endings[0].status == "ok"


# Files


def _files(tmp_path, **options):
    return {"filesystem": {"root": str(tmp_path / "root"), "layout": "per_request"} | options}


TO_FILES = Read("resid_post", to="filesystem")


def test_a_manifest_tells_where_the_rows_are(monkeypatch, tmp_path):
    with side(monkeypatch, _files(tmp_path, codec="fp16")) as here:
        here.add(1, Read("resid_post", layer=1, to="filesystem", tag="a/b", name="../x"))
        here.write(1, [0, 1, 2])
        here.end(1)
        manifest = here.manifest(1, "filesystem")
        capture = vllm_scope.open(tmp_path / "root")
        request = capture["../x"]
        assert request["resid_post", 1][:, 0].tolist() == [2, 12, 22]
        assert request.token_ids.tolist() == [5, 6, 7, 8]
    assert manifest.status == "ok"
    assert manifest.streams["resid_post.1"]["shape"] == (3, 4)
    assert manifest.streams["resid_post.1"]["codec"]["codec"] == "fp16"
    (found,) = (tmp_path / "root").rglob("*.safetensors")
    assert [found.name] == manifest.files
    assert manifest.details == [{"root": str(tmp_path / "root"), "paths": [str(found)]}]


@pytest.mark.parametrize("layout", ["per_request", "npz"])
def test_no_key_replaces_the_file_of_another(monkeypatch, tmp_path, layout):
    """Both say the same tag and name. Offline nothing has an owner, and paths are as ever."""
    with side(monkeypatch, _files(tmp_path, layout=layout)) as here:
        for key, owner in enumerate(("one", "two", "")):
            here.info = {"owner": owner}
            here.add(key, Read("resid_post", layer=1, to="filesystem", tag="run", name="q"))
            here.write(key, [0, 1, 2], base=100 * key)
            here.end(key)
            assert here.manifest(key, "filesystem").status == "ok"
    root = tmp_path / "root"
    places = {
        p.parent.relative_to(root).as_posix(): p for p in root.rglob("q.*") if ".j" not in p.name
    }
    assert sorted(places) == ["key-one/run", "key-two/run", "run"]
    for number, place in enumerate(("key-one/run", "key-two/run", "run")):
        (request,) = vllm_scope.open(places[place])
        assert request["resid_post", 1][:, 0].tolist() == [100 * number + i for i in (2, 12, 22)]
    assert len(vllm_scope.open(root).find(name="q", tag="run")) == 3


def test_an_operator_may_let_keys_share_their_folders(monkeypatch, tmp_path):
    with side(monkeypatch, _files(tmp_path, key_folders=False)) as here:
        for key, owner in enumerate(("one", "two")):
            here.info = {"owner": owner}
            here.add(key, Read("resid_post", layer=1, to="filesystem", tag="run", name="q"))
            here.write(key, [0, 1, 2], base=key)
            here.end(key)
            here.manifest(key, "filesystem")
    (request,) = vllm_scope.open(tmp_path / "root")
    assert request["resid_post", 1][:, 0].tolist() == [3, 13, 23]


def test_a_sink_gets_the_owner_of_rows_and_a_global_one_does_not(monkeypatch):
    config = {"other": {"reads": [{"site": "embed"}]}}
    with side(monkeypatch, {"mine": {}}, config, mine=Live, other=Other) as here:
        here.info = {"owner": "one"}
        here.add(1, READ, Read("embed", to="global:other"))
        here.write(1, [0])
        here.end(1, output=(7,))
        here.manifest(1)
    owners = [sink.endings[0].request.owner for sink in (Live.made[0], Other.made[0])]
    assert owners == ["one", ""]


def test_a_key_that_has_used_its_part_of_a_day_is_told_and_others_go_on(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(quota, "hours", lambda: now[0])
    most = (2 * REQUEST_BYTES + 3 * 2 * TOKEN_BYTES) / 2**20

    def ask(key, owner):
        here.info = {"owner": owner}
        here.add(key, READ)
        here.write(key, [0, 1, 2])
        here.end(key)
        return here.manifest(key)

    with side(monkeypatch, {"mine": {"key_mib": most, "threads": 2}}, mine=Live) as here:
        assert [ask(key, "one").status for key in (1, 2)] == ["ok", "ok"]
        told = ask(3, "one")
        assert (told.status, told.expected, told.delivered) == ("partial", 6, 0)
        assert (
            "would send sink 'mine' more than the 0.0158 MiB that a key may send in 24 hours "
            "(key_mib)" in told.reason
        )
        assert ask(4, "two").status == "ok"
        assert [ask(key, "").status for key in (5, 6, 7)] == ["ok"] * 3, (
            "offline it is the operator"
        )
        now[0] = 23.5
        assert ask(8, "one").status == "partial"
        now[0] = 24.5
        assert ask(9, "one").status == "ok"
        assert set().union(*here.router._quotas["mine"]._given.values()) == {"one"}


def test_a_key_that_has_used_its_part_of_a_day_makes_no_more_files(monkeypatch, tmp_path):
    most = (REQUEST_BYTES + 3 * 2 * TOKEN_BYTES) / 2**20
    options = _files(tmp_path, layout="per_request", key_mib=most)
    with side(monkeypatch, options) as here:
        here.info = {"owner": "one"}
        for key, positions in ((1, [0, 1, 2]), (2, [0, 1, 2]), (3, [])):
            here.add(key, TO_FILES)
            if positions:
                here.write(key, positions)
            here.end(key)
        manifests = [here.manifest(key, "filesystem") for key in (1, 2, 3)]
    assert [one.status for one in manifests] == ["ok", "partial", "partial"]
    assert [len(one.files) > 0 for one in manifests] == [True, False, False]
    assert all("(key_mib)" in one.reason for one in manifests[1:])
    assert len(vllm_scope.open(tmp_path / "root")) == 1


@pytest.mark.parametrize("layout", ["sharded", "packed"])
@pytest.mark.parametrize("when", ["full", "flush_s", "alone", "flush", "close"])
def test_a_requests_end_is_reported_when_its_shard_is_visible(monkeypatch, tmp_path, layout, when):
    """Not before: until then a crash could lose the rows."""
    flush_s = 0.6 if when == "flush_s" else 50.0
    options = _files(tmp_path, layout=layout, flush_s=flush_s, file_mib=1)
    with side(monkeypatch, options) as here:
        here.add(1, TO_FILES)
        here.write(1, [0, 1, 2], size=1 << 11)
        here.add(2, TO_FILES)  # goes on, and its rows could go along
        started = time.monotonic()
        here.end(1)
        time.sleep(0.3)
        assert 1 not in here.memory.finished
        assert len(vllm_scope.open(tmp_path / "root")) == 0
        if when == "full":
            here.add(3, TO_FILES)
            here.write(3, list(range(70)), size=1 << 11)
            here.end(3, output=tuple(range(69)))
        elif when == "alone":
            here.end(2, output=(), reason="abort")
        elif when == "flush":
            assert here.router.flush() == {"filesystem": None}
        elif when == "close":
            here.router.close()
        manifest = here.manifest(1, "filesystem")
        assert (manifest.status, manifest.delivered) == ("ok", 6)
        assert time.monotonic() - started < 5
        (file,) = manifest.files
        assert (tmp_path / "root" / file).exists()
        assert len(vllm_scope.open(tmp_path / "root" / file).find(request_id="r1")) == 1
        assert (2 in here.memory.finished) == (when == "alone")
        if when in ("full", "flush_s", "flush"):
            here.end(2)


@pytest.mark.parametrize("layout", ["sharded", "packed"])
def test_a_shard_that_a_full_disk_refused_fails_its_requests_and_not_the_next(
    monkeypatch, tmp_path, layout
):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with side(monkeypatch, _files(tmp_path, layout=layout)) as here:
        for key in range(5):
            here.add(key, TO_FILES)
            here.write(key, [0, 1, 2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            for key in range(4):
                here.end(key)
            # This one, or one that nobody asked for.
            assert "File too large" in here.router.flush()["filesystem"]
            for key in range(4):
                manifest = here.manifest(key, "filesystem")
                assert (manifest.status, manifest.delivered, manifest.files) == ("error", 0, [])
                assert "File too large" in manifest.reason
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        here.end(4)
        assert here.manifest(4, "filesystem").status == "ok"
        assert here.router.counters()["filesystem"]["errors"] >= 4
    assert len(vllm_scope.open(tmp_path / "root")) == 1


@pytest.mark.parametrize("layout", ["per_request", "sharded", "packed", "npz"])
def test_a_flush_says_what_an_earlier_one_that_nobody_asked_for_could_not_publish(
    monkeypatch, tmp_path, layout
):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with side(monkeypatch, _files(tmp_path, layout=layout)) as here:
        here.add(1, TO_FILES)
        here.write(1, [0, 1, 2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            here.end(1)
            assert here.manifest(1, "filesystem").status == "error"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "File too large" in here.router.flush()["filesystem"]
        assert here.router.flush() == {"filesystem": None}


@pytest.mark.parametrize("layout", ["per_request", "sharded", "packed", "npz"])
def test_what_two_stages_wrote_is_one_request_in_files_and_on_the_result(
    monkeypatch, tmp_path, layout
):
    """As two workers of one pipeline do, each with its layers, on one root."""
    asked = [Read(site, to="filesystem", name="both") for site in ("resid_post", "embed")]
    options = _files(tmp_path, layout=layout)
    stages = [(POINTS[:2], SITES.boundaries[:2], 0), (POINTS[2:], SITES.boundaries[2:], 2)]
    with (
        side(monkeypatch, options, here=stages[0][1]) as first,
        side(monkeypatch, options, here=stages[1][1]) as second,
    ):
        manifests = []
        for stage, here in enumerate((first, second)):
            here.info = {"stage": stage, "num_stages": 2}
            here.add(1, *asked)
            here.write(1, [0, 1, 2], base=stages[stage][2], layout=Layout(stages[stage][0]))
            here.end(1)
            manifests.append(here.manifest(1, "filesystem"))
            if stage == 0:
                (half,) = vllm_scope.open(tmp_path / "root")
                assert half.status == "partial"
                assert "stages [1] of 2 are missing" in half.manifest.reason
        request = vllm_scope.open(tmp_path / "root")["both"]
    both = manifests[0].joined(manifests[1])
    assert request.status == both.status == "ok"
    assert request.manifest.expected == both.expected == both.delivered == 9
    assert sorted(request.manifest.files) == sorted(both.files)
    for j, (site, layer) in enumerate([("embed", 0), ("resid_post", 0), ("resid_post", 1)]):
        assert request[site, layer][:, 0].tolist() == [j, 10 + j, 20 + j]
        assert f"{site}.{layer}" in both.streams


def _root_becomes_a_file(root):
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    root.write_text("in the way")


def _root_is_removed(root):
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        pytest.param(_root_becomes_a_file, "Not a directory", id="the-root-is-a-file"),
        pytest.param(_root_is_removed, "No such file", id="the-root-is-removed"),
    ],
)
def test_a_root_that_goes_wrong_fails_requests_with_the_reason(monkeypatch, tmp_path, harm, reason):
    with side(monkeypatch, _files(tmp_path)) as here:
        here.add(1, TO_FILES)
        here.write(1, [0, 1, 2])
        here.end(1)
        assert here.manifest(1, "filesystem").status == "ok"
        harm(tmp_path / "root")
        for key in (2, 3):
            here.add(key, TO_FILES)
            here.write(key, [0, 1, 2])
            here.end(key)
            manifest = here.manifest(key, "filesystem")
            assert manifest.status == "error"
            assert reason in manifest.reason


def test_a_full_disk_fails_the_request_that_met_it_with_the_reason(monkeypatch, tmp_path):
    """A file may have 2 KiB at most, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with side(monkeypatch, _files(tmp_path)) as here:
        for key, num_rows in ((1, 3), (2, 200), (3, 3)):
            here.add(key, TO_FILES)
            here.write(key, list(range(num_rows)))
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
            try:
                here.end(key, output=tuple(range(num_rows - 1)))
                manifest = here.manifest(key, "filesystem")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert manifest.status == ("error" if key == 2 else "ok")
            assert key != 2 or "File too large" in manifest.reason
    assert len(vllm_scope.open(tmp_path / "root")) == 2
    assert not list((tmp_path / "root").glob(".*.tmp"))


def test_no_permission_fails_one_tag_and_not_the_next(monkeypatch, tmp_path):
    with side(monkeypatch, _files(tmp_path)) as here, nobody(tmp_path):
        for tag in ("shut", "open"):
            (tmp_path / "root" / tag).mkdir()
        (tmp_path / "root" / "shut").chmod(0o500)
        for key, tag, status in ((1, "shut", "error"), (2, "open", "ok")):
            here.add(key, Read("resid_post", to="filesystem", tag=tag))
            here.write(key, [0, 1, 2])
            here.end(key)
            manifest = here.manifest(key, "filesystem")
            assert manifest.status == status
            assert status == "ok" or "Permission denied" in manifest.reason


def test_a_disk_that_is_full_ends_requests_with_the_reason_until_there_is_room(
    monkeypatch, tmp_path
):
    disk = tmp_path / "root"
    disk.mkdir()
    with small_disk(disk, 256 << 10), side(monkeypatch, _files(tmp_path)) as here:
        (disk / "ballast").write_bytes(bytes(200 << 10))
        for key, num_rows in ((1, 3), (2, 2000), (3, 3), (4, 2000)):
            if key == 4:
                (disk / "ballast").unlink()
            here.add(key, TO_FILES)
            here.write(key, list(range(num_rows)))
            here.end(key, output=tuple(range(num_rows - 1)))
            manifest = here.manifest(key, "filesystem")
            assert manifest.status == ("error" if key == 2 else "ok"), manifest
            assert key != 2 or "No space left on device" in manifest.reason
        here.router.close()
        assert sorted(r.manifest.uid for r in vllm_scope.open(disk)) == ["u1", "u3", "u4"]
        assert not list(disk.glob(".*"))


def test_an_impossible_root_is_refused_at_start(monkeypatch, tmp_path):
    (tmp_path / "root").write_text("")
    with (
        pytest.raises(vllm_scope.FileError, match="cannot be written to"),
        side(monkeypatch, _files(tmp_path)),
    ):
        pass


# Options

FILES = "filesystem"


@pytest.mark.parametrize(
    ("sink", "options", "sentence"),
    [
        pytest.param(FILES, {"fsync": "False"}, "fsync", id="a-word-for-a-bool"),
        pytest.param(FILES, {"fsync": 0}, "fsync", id="a-number-for-a-bool"),
        pytest.param(FILES, {"rot": "/r"}, "rot", id="a-misspelt-option"),
        pytest.param(FILES, {"root": None}, "root", id="no-root"),
        pytest.param(FILES, {"queue_mib": True}, "queue_mib", id="a-bool-for-a-number"),
        pytest.param(FILES, {"on_overload": "wait"}, "on_overload", id="no-policy"),
        pytest.param(FILES, {"reads": []}, "reads", id="reads-of-no-global-sink"),
        pytest.param("kafka", {}, "'kafka'. Installed are filesystem, max_act", id="no-plugin"),
        pytest.param("memory", {}, "the sink memory always exists", id="memory"),
        pytest.param("mine", [], "object of options", id="a-list"),
    ],
)
def test_options_are_parsed_strictly(monkeypatch, sink, options, sentence):
    install(monkeypatch, {"mine": Live})
    body = {"root": "/r"} | options if sink == FILES else options
    with pytest.raises(ConfigError) as caught:
        ScopeConfig.parse({"sinks": {sink: body}})
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("additional_config['scope'].")


def test_false_stays_false_in_a_sinks_options(tmp_path):
    body = {"filesystem": {"root": str(tmp_path), "fsync": False}}
    config = ScopeConfig.parse({"sinks": body}).sink_configs()["filesystem"]
    assert config.own["fsync"] is False


def test_a_plugins_unknown_option_stops_the_start(monkeypatch):
    with (
        pytest.raises(ConfigError, match="unexpected keyword argument 'colour'"),
        side(monkeypatch, {"mine": {"colour": 1}}, mine=Live),
    ):
        pass


def test_a_sink_that_cannot_be_made_leaves_nothing_of_the_others(monkeypatch, tmp_path):
    before = threading.active_count()
    with (
        pytest.raises(ConfigError, match="colour"),
        side(monkeypatch, _files(tmp_path) | {"mine": {}, "other": {"colour": 1}},
             mine=Live, other=Other),
    ):  # fmt: skip
        pass
    assert threading.active_count() == before
    assert Live.made[0].num_closed == 1
    assert list((tmp_path / "root").iterdir()) == []


def test_a_folder_to_spill_to_that_is_not_there_stops_the_start(monkeypatch, tmp_path):
    options = {"on_overload": "spill", "spill_folder": str(tmp_path / "none")}
    with (
        pytest.raises(
            ConfigError, match=r"sink 'mine' cannot spill: .*none.*spill_folder must be a"
        ),
        side(monkeypatch, {"mine": options}, mine=Live),
    ):
        pass
    assert Live.made[0].num_closed == 1


def test_rows_are_not_visible_later_than_their_callers_wait():
    body = {"filesystem": {"root": "/r", "flush_s": 9}}
    ScopeConfig.parse({"sinks": body, "deliver_timeout_s": 10})
    reads = {"filesystem": body["filesystem"] | {"reads": [{"site": "embed"}]}}
    ScopeConfig.parse({"global_sinks": reads, "deliver_timeout_s": 8})
    with pytest.raises(
        ConfigError,
        match=r"sinks.filesystem.flush_s is 9; it must be less than deliver_timeout_s, 8",
    ):
        ScopeConfig.parse({"sinks": body, "deliver_timeout_s": 8})


def test_a_read_names_one_tag_and_name_for_a_sink():
    with pytest.raises(vllm_scope.SpecError, match="differ in tag or name"):
        vllm_scope.scope(Read("embed", to="x", tag="a"), Read("embed", to="x"))
    with pytest.raises(vllm_scope.SpecError, match="rows go to memory"):
        Read("embed", tag="a")
    spec = Spec((Read("embed", to="x", tag="a", name="b"),))
    assert Spec.from_json(spec.to_json()) == spec


def test_counters_are_reported_when_they_change(monkeypatch):
    with side(monkeypatch, {"mine": {}}, mine=Live) as here:
        here.add(1, READ)
        here.write(1, [0, 1, 2])
        here.end(1)
        here.manifest(1)
        deadline = time.monotonic() + 5
        while not here.memory.reports and time.monotonic() < deadline:
            time.sleep(0.01)
    assert here.memory.reports[0]["mine"]["rows"] == 6
    assert here.memory.reports[0]["mine"]["bytes"] == 6 * 16


def test_threads_end_with_the_router(monkeypatch):
    before = threading.active_count()
    with side(monkeypatch, {"mine": {"threads": 3}}, mine=Live):
        assert threading.active_count() == before + 4
    assert threading.active_count() == before
