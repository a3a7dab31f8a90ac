"""Which finished folders are returned without an engine, and without a run."""

from __future__ import annotations

import pytest

import vllm_scope
from tests.recorded import READS, RecordedEngine
from vllm_scope.engine import offline
from vllm_scope.errors import ConfigError, FileError, SpecError

TEXTS = ["one", "two words", "three"]


class LLM:
    """An engine that runs, given as an object."""

    def __init__(self, **settings):
        self.engine = RecordedEngine(**settings)


@pytest.fixture
def started(monkeypatch):
    """The options of each engine that was started. Its dtype and length are those of them."""
    found = []

    def start(model, options, sites):
        if isinstance(model, LLM):
            return model.engine
        found.append(options)
        most_tokens = options.get("max_model_len", 41) - 1
        return RecordedEngine(most_tokens, model, options.get("dtype", "bfloat16"))

    monkeypatch.setattr(offline, "OfflineEngine", start)
    return found


def harvest(out, model="recorded", **options):
    return vllm_scope.harvest(TEXTS, *READS, model=model, out=out, progress=False, **options)


def test_the_same_call_on_a_finished_folder_starts_no_engine(started, tmp_path):
    options = {"dtype": "bfloat16", "hf_token": "secret", "max_model_len": 41}
    whole = harvest(tmp_path, engine=options)
    assert whole.computed == 3
    again = harvest(tmp_path, engine=dict(reversed(options.items())))
    assert (again.computed, again.manifest) == (0, whole.manifest)
    assert len(started) == 1
    assert "secret" not in (tmp_path / "harvest.json").read_text()


@pytest.mark.parametrize("options", [{}, {"engines": 2}], ids=["one", "several"])
def test_a_data_set_without_the_column_is_refused_before_an_engine_starts(
    options, started, tmp_path
):
    (tmp_path / "x.jsonl").write_text('{"body": "one"}\n')
    out = tmp_path / "out"
    with pytest.raises(SpecError, match=r"row 0 of .*x\.jsonl has body; a document is a text"):
        vllm_scope.harvest(
            tmp_path / "x.jsonl", *READS, model="m", out=out, progress=False, **options
        )
    assert not started
    assert not out.exists()


def test_a_data_set_that_is_not_there_is_refused_before_an_engine_starts(started, tmp_path):
    with pytest.raises(FileError, match=r"there is no file or folder .*no\.jsonl; give the path"):
        vllm_scope.harvest(tmp_path / "no.jsonl", *READS, model="m", out=tmp_path / "out")
    assert not started
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "float32"}, "with dtype 'bfloat16', and now dtype is 'float32'"),
        ({"max_model_len": 64}, "with context 40, and now context is 63"),
        ({"max_model_len": 64, "dtype": "float32"}, "and now "),
    ],
)
def test_a_finished_folder_is_not_returned_for_other_rows(options, sentence, started, tmp_path):
    harvest(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        harvest(tmp_path, engine=options)


def test_a_finished_folder_is_returned_if_other_options_give_the_same_rows(started, tmp_path):
    whole = harvest(tmp_path)
    again = harvest(tmp_path, engine={"tensor_parallel_size": 2})
    assert (again.computed, again.manifest) == (0, whole.manifest)


def test_a_finished_folder_is_returned_for_an_llm_only_if_its_rows_are_those(started, tmp_path):
    whole = harvest(tmp_path)
    assert harvest(tmp_path, LLM()).manifest == whole.manifest
    for llm, sentence in (
        (LLM(model="other"), "with model 'recorded', and now model is 'other'"),
        (LLM(dtype="float32"), "with dtype 'bfloat16'"),
        (LLM(most_tokens=50), "with context 40, and now context is 50"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            harvest(tmp_path, llm)
