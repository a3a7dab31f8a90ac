"""The options of `vllm-scope harvest`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vllm_scope import Read, TokenIds
from vllm_scope.cli import app
from vllm_scope.cli.harvest import reads_of
from vllm_scope.errors import ScopeError


def test_each_site_is_read_at_the_layers():
    assert reads_of(["resid_post", "embed"], "2,5-6", "all", "int8") == [
        Read("resid_post", layers=[2, 5, 6], codec="int8"), Read("embed", codec="int8")
    ]  # fmt: skip
    assert reads_of(["ln_final"], "2,3", "all", None) == [Read("ln_final")]  # at no layer
    (read,) = reads_of(["attn_out"], "all", '{"token_ids": [7]}', '{"name": "rp8", "k": 8}')
    assert read.tokens == Read("embed", tokens=TokenIds(7)).tokens
    assert dict(read.codec.options)["k"] == 8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("first half", None), "--tokens is 'first half'; it must be all, prompt"),
        (("all", "{"), "--codec is '{'; it must be JSON as in docs/harvest.md"),
    ],
)
def test_an_option_that_is_no_json_is_refused(arguments, sentence):
    with pytest.raises(ScopeError, match=sentence):
        reads_of(["embed"], "all", *arguments)


def test_a_wrong_data_set_is_one_sentence_and_status_1(tmp_path):
    (tmp_path / "x.csv").write_text("a")
    found = CliRunner().invoke(
        app, ["harvest", f"{tmp_path}/x.csv", "--model", "m", "--out", f"{tmp_path}/out"]
    )
    assert found.exit_code == 1
    assert "x.csv cannot be read; a data set consists of" in found.stderr
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
