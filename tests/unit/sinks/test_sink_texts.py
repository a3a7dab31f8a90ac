"""Whatever text a sink or a worker brings up, it travels, bounded; the log has more of it."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from tests.unit.recording import Live, Whole, side
from vllm_scope import ConfigError, Read, SpecError
from vllm_scope.config import ScopeConfig
from vllm_scope.core.registry import Registry
from vllm_scope.request.sites import Sites
from vllm_scope.sinks import Report
from vllm_scope.sinks.reports import MOST_LOGGED, MOST_REASON, plain
from vllm_scope.transport.messages import FinishHeader, decode, encode

READ = Read("resid_post", to="mine")
HALF = "\ud800"


class UnspeakableError(Exception):
    """Its text is no text."""

    def __str__(self):
        raise RuntimeError("no text")


class Loud(Live):
    """Fails as it is told, where it is told."""

    made: ClassVar[list] = []
    error: BaseException
    where = ""

    def write(self, block):
        if self.where == "write":
            raise self.error
        super().write(block)

    def finish(self, ending):
        if self.where == "finish":
            raise self.error
        if self.where == "published":
            future: Future[None] = Future()
            future.set_exception(self.error)
            return Report(published=future)
        if self.where == "flush":
            return Report(published=Future())
        return None

    def flush(self):
        if self.where == "flush":
            raise self.error


@pytest.mark.parametrize("where", ["write", "finish", "flush", "published"])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        pytest.param(OSError(f"half {HALF} of a pair"), "OSError: half ? of a pair", id="half"),
        pytest.param(OSError("x" * 50_000_000), "OSError: xxx", id="50-MB"),
        pytest.param(UnspeakableError(), "UnspeakableError", id="no-text"),
    ],
)
def test_a_sinks_exception_is_reported_whatever_its_text(monkeypatch, caplog, where, error, says):
    monkeypatch.setattr(Loud, "where", where)
    monkeypatch.setattr(Loud, "error", error, raising=False)
    with side(monkeypatch, {"mine": {}}, mine=Loud) as here:
        for key in (1, 2):
            here.add(key, READ)
            here.write(key, [0, 1, 2])
            here.end(key)
        manifests = [here.manifest(key) for key in (1, 2)]
    for manifest in manifests:
        assert (manifest.status, manifest.delivered) == ("error", 0)
        assert f"sink 'mine' failed: {says}" in manifest.reason
        assert len(manifest.reason) <= MOST_REASON
        assert decode(encode(FinishHeader(1, 0, None, {"mine": manifest}))).manifests
    logged = [r for r in caplog.records if "sink 'mine' failed" in r.getMessage()]
    assert logged
    assert all(len(record.getMessage()) < 2 * MOST_LOGGED for record in logged)
    assert not any(record.exc_info for record in logged), "which would be the whole text"
    assert any("Traceback" in record.getMessage() for record in logged)


def manifest_after(report, monkeypatch):
    """The manifest of a request whose sink returns this report."""
    monkeypatch.setattr(Live, "finish", lambda self, ending: report)
    with side(monkeypatch, {"mine": {}}, mine=Live) as here:
        here.add(1, READ)
        here.write(1, [0, 1, 2])
        here.end(1)
        return here.manifest(1)


def test_numbers_of_a_report_that_json_does_not_have_are_none(monkeypatch):
    report = Report(details={"loss": math.nan, "all": [1.5, math.inf, -math.inf]})
    manifest = manifest_after(report, monkeypatch)
    assert manifest.status == "ok"
    assert manifest.details == [{"loss": None, "all": [1.5, None, None]}]


def test_lone_surrogates_of_a_report_are_replaced(monkeypatch):
    report = Report(
        [f"a{HALF}"], {f"s{HALF}": {"dtype": f"d{HALF}"}}, None, f"r{HALF}",
        {f"k{HALF}": [{"v": f"v{HALF}"}]},
    )  # fmt: skip
    manifest = manifest_after(report, monkeypatch)
    assert (manifest.status, manifest.files) == ("ok", ["a?"])
    assert manifest.streams["s?"] == {"dtype": "d?"}
    assert manifest.details == [{"k?": [{"v": "v?"}]}]
    assert msgspec.msgpack.encode(manifest)


@pytest.mark.parametrize(
    ("report", "status", "says"),
    [
        pytest.param(Report(status="partial", reason="x" * 9000), "partial", "xxx", id="reason"),
        pytest.param(
            Report(details={"x": "y" * 50_000_000}), "error", "report takes 50,0", id="details"
        ),
        pytest.param(Report(files=["x" * 100] * 20_000), "error", "report takes 2,0", id="files"),
    ],
)
def test_a_report_of_any_size_costs_its_caller_little(monkeypatch, report, status, says):
    manifest = manifest_after(report, monkeypatch)
    assert manifest.status == status
    assert says in manifest.reason
    assert len(manifest.reason) <= MOST_REASON
    assert len(msgspec.msgpack.encode(manifest)) < 2 << 20


def test_a_workers_error_text_is_cut_in_the_manifest(monkeypatch):
    with side(monkeypatch, {"mine": {}}, mine=Live) as here:
        here.add(1, READ)
        here.end(1, error=f"no room {HALF}" + "x" * 10_000)
        manifest = here.manifest(1)
    assert manifest.reason.startswith("no room ?xxx")
    assert len(manifest.reason) <= MOST_REASON


def test_a_burst_of_failures_is_logged_and_a_flood_is_not(monkeypatch, caplog):
    monkeypatch.setattr(Loud, "where", "write")
    monkeypatch.setattr(Loud, "error", OSError("no"), raising=False)
    begun = time.monotonic()
    with side(monkeypatch, {"mine": {}}, mine=Loud) as here:
        for key in range(200):
            here.add(key, READ)
            here.write(key, [0])
            here.end(key)
        assert here.manifest(199).status == "error"
    logged = [r for r in caplog.records if "sink 'mine' failed" in r.getMessage()]
    # 30 at once, and then one per second.
    assert 30 <= len(logged) <= 32 + time.monotonic() - begun


@pytest.mark.parametrize(
    ("text", "most", "found"),
    [
        ("short", 10, "short"),
        ("0123456789", 10, "0123456789"),
        ("0123456789!", 10, "0123456..."),
        (f"{HALF}\udfff\U0001f600", 10, "??\U0001f600"),
    ],
)
def test_a_text_is_cut_and_can_be_encoded(text, most, found):
    assert plain(text, most) == found


@pytest.mark.parametrize("name", [f"a{HALF}", "\udfff"])
def test_a_sink_of_such_a_name_is_refused_with_a_sentence(name):
    with pytest.raises(ConfigError, match="sinks has the name"):
        ScopeConfig.parse({"sinks": {name: {}}})


@pytest.mark.parametrize("name", [f"a{HALF}", "\udfff"])
def test_a_module_of_such_a_name_is_refused_with_a_sentence(name):
    registry = Registry(Sites(2, 4, "float32", (0, 2, 4)))
    with pytest.raises(SpecError, match="characters that UTF-8 can encode, not '"):
        registry.register(name, save({"resid_post.1": np.ones(4, np.float32)}))
    assert registry.names == {}


class Talkative(Whole):
    """A plugin whose report names what its operator knows."""

    def finish(self, ending):
        files = ["day/1.x", "/data/1.x", "s3://bucket/1.x", "~/1.x", "C:\\1.x", "a/../../1.x"]
        entry = {"shape": [1], "file": "/data/1.x"}
        return Report(files, {"embed.0": entry}, "partial", "/data is full", {"root": "/data"})


def test_a_keys_manifest_has_no_path_from_a_plugin(monkeypatch):
    with side(monkeypatch, {"mine": {}}, mine=Talkative) as here:
        here.add(0, READ)
        here.write(0, [0, 1, 2])
        here.end(0)
        manifest = here.manifest(0)
    assert manifest.reason == "/data is full"
    told = manifest.public("mine")
    assert told.files == ["day/1.x"]
    assert told.streams["embed.0"] == {"shape": [1]}
    assert (told.status, told.details) == ("partial", [])
    assert "operator" in told.reason
    assert "data" not in str(told)


def test_a_keys_manifest_says_why_our_files_are_partial(monkeypatch, tmp_path):
    options = {"root": str(tmp_path / "root"), "layout": "per_request"}
    with side(monkeypatch, {"filesystem": options}) as here:
        here.add(0, Read("resid_post", to="filesystem"))
        here.write(0, [0])
        here.end(0, reason="abort")
        manifest = here.manifest(0, "filesystem")
    told = manifest.public("filesystem")
    assert told.reason == manifest.reason == "the request ended by abort after 2 tokens"
    assert (told.files, told.streams) == (manifest.files, manifest.streams)
    assert str(tmp_path) not in str(told)
