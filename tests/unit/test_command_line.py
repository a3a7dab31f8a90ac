"""What the command line makes of files."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from vllm_scope.cli.remote import Server, asking
from vllm_scope.cli.steer import _additions
from vllm_scope.vectors import SteeringModule, load_vectors, save_vectors

TIERS = {"vectors": {"post_block": {"1": [1, 2]}}, "decode_vectors": {"pre_attn": {"0": [3, 4]}}}


@pytest.mark.parametrize("name", ["v.json", "v.safetensors"])
def test_a_files_vectors_go_to_the_tokens_of_their_tiers(name, tmp_path):
    (tmp_path / "v.json").write_text(json.dumps(TIERS))
    save_vectors(tmp_path / "v.safetensors", load_vectors(tmp_path / "v.json"))
    found = _additions(str(tmp_path / name), 2.0)
    assert [(a.site, a.layers, a.tokens.to_json(), a.scale) for a in found] == [
        ("resid_post", (1,), "all", 2.0), ("resid_pre", (0,), "generated", 2.0)
    ]  # fmt: skip
    save_vectors(tmp_path / "e.safetensors", SteeringModule({("embed", 0): [1.0, 2.0]}))
    (embed,) = _additions(str(tmp_path / "e.safetensors"), 1.0)
    assert embed.to_json()["site"] == "embed"
    (named,) = _additions("formal", 1.0)
    assert named.vector.name == "formal"


def test_a_server_that_is_not_there_is_named(capsys):
    with (
        pytest.raises(SystemExit),
        asking(Server("http://127.0.0.1:9", None, 1, 0.0), Console(width=200)) as client,
    ):
        client.complete("text")
    assert "no answer from http://127.0.0.1:9: " in capsys.readouterr().out
