"""A model that hears: every stream at every position equals Hugging Face's, also where the rows
are a sound's. Its tower has as many layers as its decoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import row_error
from tests.conftest import local_engine
from tests.engine.test_attention_sites import params
from tests.matrix.checkpoint import NUM_LAYERS, config_of, make_checkpoint
from tests.matrix.reference import record
from vllm_scope import Read

MODEL = "Qwen2AudioForConditionalGeneration"  # its processor needs no torchvision
SOUND, RATE = 500, 16_000
TEXT = list(range(3, 40))


@pytest.fixture(scope="module")
def hearing(tmp_path_factory) -> Path:
    """The checkpoint with its processor's files."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

    config = config_of(MODEL)
    config.audio_config.encoder_layers = config.audio_config.num_hidden_layers = NUM_LAYERS
    config.audio_token_id = config.audio_token_index = SOUND
    path = tmp_path_factory.mktemp("hearing")
    make_checkpoint(MODEL, path, config=config)
    WhisperFeatureExtractor(feature_size=config.audio_config.num_mel_bins).save_pretrained(path)
    words = {f"w{number}": number for number in range(SOUND)}
    marks = {"<|AUDIO|>": SOUND, "<|audio_bos|>": SOUND + 1, "<|audio_eos|>": SOUND + 2}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words | marks, unk_token="w0")),
        unk_token="w0", additional_special_tokens=list(marks),
    ).save_pretrained(path)  # fmt: skip
    return path


def test_rows_of_texts_and_sounds_equal_hugging_face(hearing):
    from transformers import Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

    sound = np.sin(np.arange(RATE // 2) / 20).astype(np.float32)
    prompts = [
        {"prompt_token_ids": TEXT},
        {"prompt_token_ids": [7, SOUND, 8, 9], "multi_modal_data": {"audio": (sound, RATE)}},
    ]
    reads = Read("embed"), Read("resid_post")
    options = {"skip_tokenizer_init": False, "block_size": 32, "max_num_batched_tokens": 32}
    config = {"scope": {"sites": ["embed", "resid_post"]}}
    with local_engine(hearing, dtype="float32", additional_config=config, **options) as llm:
        outputs = llm.generate(prompts, params(*reads), use_tqdm=False)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(
        hearing, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    heard = WhisperFeatureExtractor.from_pretrained(hearing)(
        sound, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
    )
    features = {
        "input_features": heard["input_features"], "feature_attention_mask": heard["attention_mask"]
    }  # fmt: skip
    assert outputs[1].prompt_token_ids.count(SOUND) > 1
    for output, inputs in zip(outputs, ({}, features), strict=True):
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        expected = record(model, NUM_LAYERS, token_ids, **inputs).streams
        assert output.scope.status == "complete"
        for k, stream in enumerate(expected):
            rows = output.scope["resid_post", k - 1] if k else output.scope["embed", 0]
            assert rows.shape == (len(token_ids), stream.shape[-1])
            assert row_error(rows, stream) <= 1e-4, k
