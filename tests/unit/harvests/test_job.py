"""What a folder holds decides what is computed; settings, hashes and figures are beside it."""

from __future__ import annotations

import hashlib
import io
import json
import resource
import uuid

import pytest
from tqdm import tqdm

import vllm_scope
from tests.recorded import READS, RecordedEngine, harvest
from vllm_scope import Read
from vllm_scope.errors import ConfigError, FileError, ScopeError, SpecError
from vllm_scope.files import FileOptions, RequestRecord, open_writer
from vllm_scope.files.staged import make_staged
from vllm_scope.harvests import progress
from vllm_scope.harvests.manifest import read_manifest

#: Two shards and a half.
TEXTS = ["y" * (20 + i % 50) for i in range(150)]


def shards_in(out):
    return sorted(out.glob("shard-*.safetensors"))


def test_the_manifest_names_settings_versions_counts_and_the_hash_of_each_shard(tmp_path):
    found = harvest(TEXTS, tmp_path)
    body = json.loads((tmp_path / "harvest.json").read_text())
    assert read_manifest(str(tmp_path)) == found.manifest
    settings = body["settings"]
    assert [read["site"] for read in settings["reads"]] == ["resid_post", "embed"]
    assert settings["reads"][0]["layers"] == [1, 3]
    assert (settings["model"], settings["dtype"], settings["context"]) == (
        "recorded",
        "bfloat16",
        40,
    )
    assert body["runs"][0]["versions"]["vllm_scope"] == vllm_scope.__version__
    assert body["complete"]
    assert list(body["shards"]) == [shard.name for shard in shards_in(tmp_path)]
    assert len(body["shards"]) > 2
    for shard in shards_in(tmp_path):
        digest = hashlib.sha256(shard.read_bytes()).hexdigest()
        assert body["shards"][shard.name]["sha256"] == digest
    totals = body["totals"]
    assert totals["documents"] == len(TEXTS)
    assert totals["tokens"] == sum(map(len, TEXTS))
    assert totals["contexts"] == len(vllm_scope.open(tmp_path))
    page = (tmp_path / "harvest.html").read_text()
    assert "resid_post.3" in page
    assert f"{totals['tokens']:,}" in page
    assert "Complete: " in page
    means = vllm_scope.open(tmp_path)  # the file of means is passed over
    assert means.keys() == [("embed", 0), ("resid_post", 1), ("resid_post", 3)]


def test_means_and_variances_of_each_dimension_are_in_a_file(tmp_path):
    import torch
    from safetensors.torch import load_file

    harvest(TEXTS, tmp_path)
    found = load_file(tmp_path / "harvest-statistics.safetensors")
    rows = torch.cat([request["resid_post", 3] for request in vllm_scope.open(tmp_path)]).double()
    torch.testing.assert_close(found["resid_post.3.mean"], rows.mean(0).float())
    expected = rows.var(0, unbiased=False).float()
    torch.testing.assert_close(found["resid_post.3.variance"], expected, rtol=1e-4, atol=1e-4)


def test_a_finished_harvest_computes_nothing_and_a_lost_shard_is_computed_again(tmp_path):
    whole = harvest(TEXTS, tmp_path)
    engine = RecordedEngine()
    assert harvest(TEXTS, tmp_path, engine).computed == 0
    assert not engine.computed
    lost = shards_in(tmp_path)[1]
    names = [request.name for request in vllm_scope.open(lost)]
    lost.unlink()
    assert harvest(TEXTS, tmp_path, engine).computed == len(names)
    assert sorted(engine.computed) == sorted(names)
    assert len(vllm_scope.open(tmp_path)) == whole.manifest.totals["contexts"]


def test_what_is_beside_the_shards_is_made_again_from_them(tmp_path):
    """A kill between a shard and its index, or before the manifest, loses nothing."""
    whole = harvest(TEXTS, tmp_path).manifest
    manifest = json.loads((tmp_path / "harvest.json").read_text())
    manifest |= {"complete": False, "shards": {}, "streams": {}, "totals": {}}
    (tmp_path / "harvest.json").write_text(json.dumps(manifest))
    for index in tmp_path.glob("shard-*.json"):
        index.unlink()
    again = harvest(TEXTS, tmp_path)
    assert again.computed == 0
    assert (again.manifest.shards, again.manifest.streams) == (whole.shards, whole.streams)
    assert again.manifest.totals == whole.totals


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"long": "truncate"}, "with long 'split', and now long is 'truncate'; give the same"),
        ({"context": 12}, "with context 40, and now context is 12"),
        ({"reads": READS[:1]}, "with reads"),
        ({"dataset": TEXTS[:-1]}, "with dataset '.*', and now dataset is"),
        ({"engine": RecordedEngine(model="other")}, "with model 'recorded', and now model is 'oth"),
        ({"engine": RecordedEngine(dtype="float32")}, "with dtype 'bfloat16', and now dtype is"),
        (
            {"engine": RecordedEngine(more={"layers": [[1]]})},
            "with layers None, and now layers is ",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_with_other_settings_is_refused_with_what_differs(change, sentence, tmp_path):
    harvest(TEXTS, tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    change = {"dataset": TEXTS, **change}
    with pytest.raises(ConfigError, match=sentence):
        harvest(change.pop("dataset"), tmp_path, **change)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_without_rows_takes_other_settings(tmp_path):
    with pytest.raises(
        ScopeError, match=r"the rows of document '.*' are failed: no memory; compute"
    ):
        harvest(TEXTS, tmp_path, Failing())
    assert harvest(TEXTS, tmp_path, long="pack").manifest.complete


class Failing(RecordedEngine):
    def compute(self, prompts, reads):
        for context, rows in super().compute(prompts, reads):
            rows.status, rows.error = "failed", "no memory"
            yield context, rows


class Ending(RecordedEngine):
    """Dies after some contexts."""

    def compute(self, prompts, reads):
        for number, item in enumerate(super().compute(prompts, reads)):
            if number == 100:
                raise RuntimeError("the engine died")
            yield item


def test_what_an_engine_computed_before_it_died_is_kept(tmp_path):
    with pytest.raises(RuntimeError, match="the engine died"):
        harvest(TEXTS, tmp_path, Ending())
    assert len(vllm_scope.open(tmp_path)) == 100
    assert not read_manifest(str(tmp_path)).complete
    found = harvest(TEXTS, tmp_path)
    assert found.computed == found.manifest.totals["contexts"] - 100


class LaterRoom(RecordedEngine):
    """A file may have 512 KiB at most, as on a full disk, until most contexts are computed. A shard
    has more."""

    def compute(self, prompts, reads):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
        try:
            for number, item in enumerate(super().compute(prompts, reads)):
                if number == 700:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                yield item
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_shard_that_cannot_be_written_ends_the_harvest_and_is_computed_again(tmp_path):
    with pytest.raises(FileError, match="cannot be written"):
        harvest(TEXTS * 4, tmp_path, LaterRoom())
    assert not read_manifest(str(tmp_path)).complete
    found = harvest(TEXTS * 4, tmp_path).manifest
    assert found.complete
    assert found.totals["contexts"] == len(vllm_scope.open(tmp_path))
    assert found.totals["documents"] == 4 * len(TEXTS)


def test_a_damaged_shard_and_one_that_is_there_twice_are_refused(tmp_path):
    harvest(TEXTS, tmp_path)
    first = shards_in(tmp_path)[0]
    body = first.read_bytes()
    copy = first.with_name("shard-copied.safetensors")
    copy.write_bytes(body)
    with pytest.raises(FileError, match="has a context that is also in another shard; remove"):
        harvest(TEXTS, tmp_path)
    copy.unlink()
    first.write_bytes(body[:-1])
    with pytest.raises(FileError, match=first.name):
        harvest(TEXTS, tmp_path)
    (tmp_path / "harvest.json").write_text("{")
    with pytest.raises(FileError, match=r"harvest\.json cannot be read"):
        harvest(TEXTS, tmp_path)


def test_a_folder_with_other_rows_is_refused(tmp_path):
    with open_writer(FileOptions.parse({"root": str(tmp_path)})) as writer:
        writer.begin().finish(RequestRecord("a", [1], [2], "m", 0, 0))
    with pytest.raises(
        FileError, match="has rows that no harvest wrote; harvest into another folder"
    ):
        harvest(TEXTS, tmp_path)


def test_a_folder_with_other_rows_is_refused_also_after_a_kill(tmp_path):
    """A killed harvest leaves the hidden folder of its engine."""
    with open_writer(FileOptions.parse({"root": str(tmp_path)})) as writer:
        writer.begin().finish(RequestRecord("a", [1], [2], "m", 0, 0))
    make_staged(str(tmp_path), False, 0o600).make()
    with pytest.raises(FileError, match="has rows that no harvest wrote"):
        harvest(TEXTS, tmp_path)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_url_is_harvested_and_resumed_as_a_folder_is(scheme, tmp_path):
    pytest.importorskip("fsspec")
    url = f"{scheme}://{tmp_path / 'remote' if scheme == 'file' else f'/{uuid.uuid4().hex}'}"
    with pytest.raises(RuntimeError, match="the engine died"):
        harvest(TEXTS, url, Ending())
    found = harvest(TEXTS, url)
    assert found.computed == found.manifest.totals["contexts"] - 100
    local = tmp_path / "local"
    harvest(TEXTS, local)
    here, there = ({r.name: r for r in vllm_scope.open(out)} for out in (str(local), url))
    assert here.keys() == there.keys()
    for name, request in here.items():
        for stream in request.keys():
            assert request[stream].tolist() == there[name][stream].tolist()


def test_documents_without_tokens_and_without_rows_are_counted(tmp_path):
    ids = [[5, 6], [], [7]]
    found = harvest(ids, tmp_path, reads=(Read("embed"),))
    assert found.manifest.totals["empty"] == 1
    assert found.manifest.totals["documents"] == 2
    assert harvest([[]], tmp_path / "none").manifest.complete


def test_a_text_that_is_no_unicode_is_passed_over_and_named(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one"}\n{"text": "a \\ud83d b"}\n{"text": ""}\n{"text": "three"}\n')
    for computed in (2, 0):  # and in each run
        found = harvest(path, tmp_path / "out")
        assert found.computed == computed
        totals = found.manifest.totals
        assert (totals["documents"], totals["empty"], totals["skipped"]) == (2, 1, 1)
        ((name, why),) = found.manifest.skipped.items()
        assert name.endswith("-1")
        assert why == "its text has half of a surrogate pair"
        assert read_manifest(str(tmp_path / "out")) == found.manifest


@pytest.mark.parametrize(("long", "kept"), [("split", 3), ("truncate", 2)])
def test_a_context_without_a_position_of_a_read_is_passed_over_and_named(long, kept, tmp_path):
    ids = [[5] * 12, [6] * 4, [7] * 70, []]  # contexts of at most 40
    reads = (Read("embed", tokens=[11]),)
    found = harvest(ids, tmp_path, long=long, reads=reads)
    assert found.computed == kept
    assert found.manifest.totals["skipped"] == 1
    assert (found.manifest.totals["documents"], found.manifest.totals["empty"]) == (2, 1)
    ((name, why),) = found.manifest.skipped.items()
    assert name.endswith("-1")
    assert why.startswith("reads[0].tokens has 11; with this prompt")
    assert harvest(ids, tmp_path, long=long, reads=reads).computed == 0


@pytest.mark.parametrize("dataset", [
    pytest.param([[5] * 12, [6] * 4, [7] * 70, [8] * 12, []], id="skipped-and-empty"),
    pytest.param([[], []], id="all-empty"),
])  # fmt: skip
def test_the_bar_ends_at_every_document_of_the_data_set(dataset, tmp_path, monkeypatch):
    bars = []

    class Bar(tqdm):
        def __init__(self, **options):
            super().__init__(**options | {"disable": False, "file": io.StringIO()})
            bars.append(self)

    monkeypatch.setattr(progress, "tqdm", Bar)
    for _ in range(2):  # and if the harvest goes on
        harvest(dataset, tmp_path, reads=(Read("embed", tokens=[11]),))
        for shard in shards_in(tmp_path):
            shard.unlink()
    assert [(bar.n, bar.total) for bar in bars] == [(len(dataset), len(dataset))] * 2


def test_the_rest_of_a_document_may_be_passed_over(tmp_path):
    found = harvest([[7] * 45], tmp_path, reads=(Read("embed", tokens=[11]),)).manifest
    assert (found.totals["documents"], found.totals["empty"], found.totals["skipped"]) == (1, 0, 1)
    assert next(iter(found.skipped)).endswith("-0:40")


def test_a_harvest_that_would_pass_over_everything_ends_with_the_reason(tmp_path):
    with pytest.raises(SpecError, match=r"no document of a list of 30 .*-0: reads\[0\].tokens has"):
        harvest(["abc"] * 30, tmp_path, reads=(Read("embed", tokens=[100]),))
    assert len(read_manifest(str(tmp_path)).shards) == 0
