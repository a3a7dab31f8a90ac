"""The tiny configurations of tests/matrix/checkpoint.py."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.matrix.checkpoint import NUM_LAYERS, PUBLISHED, WRITTEN, config_of, rename_weights


@pytest.mark.parametrize(
    ("architecture", "tower"),
    [
        ("LlavaForConditionalGeneration", "vision_config"),
        ("Gemma4ForConditionalGeneration", "vision_config"),  # whose default is none
        ("Granite4VisionForConditionalGeneration", "vision_config"),
        ("Qwen2AudioForConditionalGeneration", "audio_config"),
    ],
)
def test_only_the_decoder_of_a_multimodal_model_has_the_number_of_layers(architecture, tower):
    config = config_of(architecture)
    text, other = config.get_text_config(), getattr(config, tower)
    assert (text.num_hidden_layers, text.hidden_size) == (NUM_LAYERS, 128)
    assert other.num_hidden_layers < NUM_LAYERS


def test_a_part_may_have_a_model_type_and_fields_of_its_own():
    assert config_of("Granite4VisionForConditionalGeneration").text_config.model_type == "granite"
    rope = config_of("Qwen3VLForConditionalGeneration").text_config.rope_parameters
    assert rope["mrope_section"] == [6, 5, 5]
    # What the decoder's own architecture needs, the multimodal one needs too.
    assert config_of("Gemma4ForConditionalGeneration").text_config.sliding_window == 16


def test_weights_get_the_names_of_published_checkpoints(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({f"{WRITTEN}norm.weight": torch.ones(2), "lm_head.weight": torch.zeros(2)}, file)
    rename_weights(tmp_path)
    found = load_file(file)
    assert sorted(found) == [f"{PUBLISHED}norm.weight", "lm_head.weight"]
    assert found[f"{PUBLISHED}norm.weight"].tolist() == [1, 1]
