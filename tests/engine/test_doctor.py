"""`vllm-scope doctor` on a model that can be read, and on one that cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import TOYWORLD

COHERE = {
    "architectures": ["CohereForCausalLM"], "model_type": "cohere", "torch_dtype": "bfloat16",
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512,
    "max_position_embeddings": 512, "logit_scale": 0.1, "layer_norm_eps": 1e-5,
    "use_qk_norm": False, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


def doctor(model: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "vllm-scope"), "doctor", str(model)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_it_says_what_can_be_read():
    done = doctor(TOYWORLD)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if "│" in line]
    table = {cells[1].strip(): cells[2].strip() for cells in (line.split("│") for line in lines)}
    assert table["embed"] == "yes"
    assert table["resid_post"] == "0-5"
    assert table["mlp_post"] == "-"
    assert "model runner V1" in done.stdout
    assert "7 taps, arena" in done.stdout


def test_it_says_why_not(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(COHERE))
    done = doctor(tmp_path)
    assert done.returncode == 1, done.stderr[-2000:]
    said = " ".join(done.stdout.split())
    assert "cannot be read: CohereDecoderLayer returns a pair" in said
    assert "served plainly" in said


def test_a_model_that_is_not_there_is_one_sentence(tmp_path):
    done = doctor(tmp_path / "nothing")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "nothing" in done.stdout
