"""`vllm-scope doctor` on a model that can be read, and on one that cannot."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.conftest import TOYWORLD
from tests.lenses import random_lens
from vllm_scope.engine import plugin
from vllm_scope.errors import ConfigError
from vllm_scope.request.sites import SITES

GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "torch_dtype": "bfloat16",
    "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 512,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA_3N = {
    "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text",
    "torch_dtype": "bfloat16", "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "vocab_size": 512, "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 1, "laurel_rank": 8,
    "layer_types": ["full_attention"] * 2, "activation_sparsity_pattern": [0.0, 0.0],
    "max_position_embeddings": 512,
}  # fmt: skip


#: Its code in vLLM needs no torchvision.
QWEN_2_AUDIO = {
    "architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
        "max_position_embeddings": 512,
    },
    "audio_config": {
        "model_type": "qwen2_audio_encoder", "d_model": 64, "encoder_layers": 4,
        "encoder_attention_heads": 2, "encoder_ffn_dim": 128,
    },
}  # fmt: skip
QWEN_2_VL = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen2_vl_text", "hidden_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
        "vocab_size": 512, "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [4, 6, 6]},
    },
    "vision_config": {"depth": 1, "embed_dim": 64, "hidden_size": 128, "num_heads": 2},
}  # fmt: skip


def doctor(model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "vllm-scope"), "doctor", str(model), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def table_of(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Site -> its cells, of lines that were wrapped joined."""
    table: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("│"):
            site, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            name = site or list(table)[-1]
            before = table.get(name, [""] * len(cells))
            table[name] = [" ".join(pair).strip() for pair in zip(before, cells, strict=True)]
    return table


def model_of(config: dict, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.alone
def test_it_says_what_can_be_read_and_nothing_else_in_less_than_15_seconds(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # as on a machine that is new
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = doctor(TOYWORLD)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    first, *middle, last = done.stdout.splitlines()
    assert first.endswith("model runner V1")
    assert last == "7 taps, arena 7.0 MiB."
    assert middle[0].strip() == "6 layers of 256, bfloat16"
    assert {line[0] for line in middle[1:]} == set("┏┃┡│└")
    table = table_of(done)
    assert list(table) == list(SITES)
    assert table["embed"] == ["yes", "yes", ""]
    assert table["resid_pre"] == table["resid_post"] == ["0-5", "yes", ""]
    inside = ("q", "k", "v", "z", "attn_in", "attn_out", "mlp_in", "mlp_out", "mlp_post")
    for site in ("resid_mid", *inside):
        assert table[site] == ["0-5", "no", ""]
    assert table["ln_final"] == ["yes", "no", ""]
    assert table["router_logits"] == [
        "-",
        "no",
        "vLLM's configuration of this model has no experts",
    ]
    # Of a processor, which is all of it on a machine that has nothing else to do.
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 15, used


@pytest.mark.long
def test_a_site_that_the_model_cannot_have_is_told_from_one_that_is_not_configured(tmp_path):
    done = doctor(model_of(GPT2, tmp_path), "--sites", "resid_mid,attn_out")
    assert done.returncode == 1, done.stdout
    table = table_of(done)
    assert table["resid_mid"] == ["0-1", "yes", ""]
    assert table["resid_post"] == table["q"] == ["0-1", "no", ""]
    assert table["attn_out"][:2] == ["-", "yes"]
    assert table["mlp_out"][:2] == ["-", "no"]
    for site in ("attn_out", "mlp_out"):
        assert table[site][2].startswith("GPT2Block adds to the stream inside")
    assert "cannot be read: " in done.stdout.splitlines()[-1]


@pytest.mark.long
def test_a_site_of_experts_is_refused_for_a_dense_model_as_the_start_refuses_it():
    done = doctor(TOYWORLD, "--sites", "router_logits")
    assert done.returncode == 1, done.stdout
    said = done.stdout.splitlines()[-1].partition("cannot be read: ")[2]
    plugin.register()
    asked = {"scope": {"sites": ["router_logits"]}}
    with pytest.raises(ConfigError) as caught:
        EngineArgs(str(TOYWORLD), additional_config=asked).create_engine_config()
    own = "'vllm-scope doctor MODEL' says which of them this model has."
    assert str(caught.value).replace(own, "The table says which of them this model has.") == said
    assert (
        "has 'router_logits', and vLLM's configuration of this model has no experts. Leave" in said
    )


@pytest.mark.long
def test_a_site_inside_the_attention_is_whole_on_several_ranks():
    done = doctor(TOYWORLD, "--tensor-parallel-size", "2", "--sites", "q")
    assert done.returncode == 0, done.stdout
    table = table_of(done)
    assert table["q"] == ["0-5", "yes", ""]
    assert table["resid_post"] == ["0-5", "no", ""]


def test_a_folder_that_is_not_there_is_told_at_once():
    done = doctor(Path("/no/folder"))
    assert done.returncode == 2
    assert done.stdout == (
        "/no/folder: there is no such folder; give one with a config.json, or a name on "
        "Hugging Face.\n"
    )


@pytest.mark.long
def test_it_says_why_not(tmp_path):
    done = doctor(model_of(GEMMA_3N, tmp_path))
    assert done.returncode == 1, done.stdout
    said = " ".join(done.stdout.split())
    assert "cannot be read: Gemma3nTextModel.forward has no loop over layers" in said
    assert "vLLM serves the model, but refuses" in said
    assert "an engine that compiles the model can serve embed, resid_pre and resid_post" in said


@pytest.mark.long
def test_of_a_multimodal_model_it_says_what_can_be_read_of_the_decoder(tmp_path):
    """From its configuration alone: no file of a processor, no tokenizer."""
    done = doctor(model_of(QWEN_2_AUDIO, tmp_path))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "4 layers of 128, bfloat16" in done.stdout
    table = table_of(done)
    assert table["embed"] == ["yes", "yes", ""]
    assert table["resid_post"] == ["0-3", "yes", ""]
    assert table["z"] == ["0-3", "no", ""]


@pytest.mark.long
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_package_that_the_models_code_needs_is_named(tmp_path):
    done = doctor(model_of(QWEN_2_VL, tmp_path))
    assert (done.returncode, done.stderr) == (2, ""), done.stdout
    sentence = (
        "Qwen2VLForConditionalGeneration needs the package torchvision, which is not installed"
    )
    assert sentence in done.stdout
    assert len(done.stdout.splitlines()) == 1, done.stdout


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        pytest.param(
            "nothing", (), "nothing: ", id="a-model-that-is-not-there", marks=pytest.mark.long
        ),
        pytest.param("", ("--sites", "resid"), "--sites is 'resid'; sites are embed", id="a-site"),
        pytest.param(
            "",
            ("--sites", "logits"),
            "which is not a site: vLLM itself returns logits",
            id="a-site-without-taps",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "",
            ("--dtype", "float9"),
            "dtype: Input should be",
            id="a-dtype",
            marks=pytest.mark.long,
        ),
        # No machine has all of its memory free. Beside a server the same is said earlier.
        pytest.param("", ("--gpu-memory-utilization", "1"), "; leave --gpu-mem", id="memory"),
    ],
)
def test_a_question_without_an_answer_is_one_sentence(model, options, words, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # with it vLLM asks for nothing
    done = doctor(TOYWORLD / model, *options)
    assert (done.returncode, done.stderr) == (2, ""), done.stdout
    assert len(done.stdout.splitlines()) == 1, done.stdout
    assert words in done.stdout
    assert done.stdout.rstrip().endswith(".")
    assert ".." not in done.stdout


@pytest.mark.long
def test_it_says_what_saes_and_lenses_take_of_a_device(tmp_path):
    digest = random_lens("named", [0, 1, 4], 256).save(tmp_path / "named")
    small = random_lens("small", [0], 8)
    small.save(tmp_path / "small")
    done = doctor(
        TOYWORLD, "--dtype", "bfloat16", "--saes", f"toy={TOYWORLD / 'sae'}",
        "--lenses", f"named={tmp_path / 'named'}",
    )  # fmt: skip
    # Three maps of 256 x 256 weights in 2 bytes, and biases in 4.
    assert f"lens named: resid_post 0-1, 4, 0.4 MiB, sha256 {digest}." in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Lenses: 0.4 MiB of each device; lenses_mib")
    assert done.returncode == 0, done.stdout
    # 384 features: 256 weights in 2 bytes, a bias and a threshold in 4.
    assert "SAE toy: 384 features of resid_post 0, 0.2 MiB." in done.stdout
    assert "\nEncoders: 0.2 MiB of each device" in done.stdout
    done = doctor(TOYWORLD, "--saes", "toy=/nowhere", "--lenses", f"a={tmp_path / 'small'}")
    assert done.returncode == 2
    assert "/nowhere is not there" in done.stdout
    assert "is of rows of 8 numbers; this model's rows have 256." in done.stdout
