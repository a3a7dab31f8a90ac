"""Models that see: every stream at every position equals Hugging Face's, also where the rows are an
image's. Positions have three numbers (M-RoPE), and the tokens of an image share positions.

Needs torchvision (requirements/matrix.txt)."""

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
from tests.matrix.vision import import_torchvision
from vllm_scope import Add, Read

if not import_torchvision():
    pytest.skip("torchvision is not installed.", allow_module_level=True)

MODELS = [f"Qwen{name}ForConditionalGeneration" for name in ("2VL", "2_5_VL", "3VL")]
IMAGE, VIDEO, BEGIN, END = range(500, 504)
TEXT = list(range(3, 40))
#: Two images of one prompt, in tokens: their sizes in pixels need no resizing.
SIZES = [(2, 3), (3, 1)]


@pytest.fixture(scope="module", params=MODELS)
def seeing(tmp_path_factory, request) -> Path:
    """The checkpoint with its processor's files."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor

    config = config_of(request.param)
    config.image_token_id, config.video_token_id = IMAGE, VIDEO
    config.vision_start_token_id, config.vision_end_token_id = BEGIN, END
    config.text_config.rope_parameters["mrope_interleaved"] = request.param == MODELS[2]
    vision = config.vision_config
    if request.param == MODELS[0]:
        vision.hidden_size = config.text_config.hidden_size
    path = tmp_path_factory.mktemp("seeing")
    make_checkpoint(request.param, path, config=config)
    token = vision.patch_size * vision.spatial_merge_size
    Qwen2VLImageProcessor(
        min_pixels=token**2, max_pixels=(4 * token) ** 2, patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size, temporal_patch_size=vision.temporal_patch_size,
    ).save_pretrained(path)  # fmt: skip
    words = {f"w{number}": number for number in range(IMAGE)}
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    marks = {name: IMAGE + i for i, name in enumerate(names)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words | marks, unk_token="w0")),
        unk_token="w0", pad_token="w0", additional_special_tokens=names,
    ).save_pretrained(path)  # fmt: skip
    return path


@pytest.fixture(scope="module")
def engine(seeing, tmp_path_factory):
    from vllm.model_executor.models import registry

    # vLLM inspects a model's class in a new process, which would import torchvision's library. vLLM
    # would keep what it found for processes without torchvision.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        with local_engine(
            seeing, dtype="float32", skip_tokenizer_init=False, block_size=32,
            max_num_batched_tokens=32, limit_mm_per_prompt={"image": 2, "video": 0},
            additional_config={"scope": {"sites": ["embed", "resid_post"]}},
        ) as llm:  # fmt: skip
            yield llm


def processor_of(seeing):
    from transformers import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor.from_pretrained(seeing)


def images(seeing):
    from PIL import Image

    processor, rng = processor_of(seeing), np.random.default_rng(0)
    token = processor.patch_size * processor.merge_size
    sizes = [(height * token, width * token, 3) for height, width in SIZES]
    return [Image.fromarray(rng.integers(0, 256, size, np.uint8)) for size in sizes]


def prompts(seeing):
    one = [BEGIN, IMAGE, END]
    return [
        {"prompt_token_ids": TEXT},
        {"prompt_token_ids": [7, *one, 8, *one, 9], "multi_modal_data": {"image": images(seeing)}},
    ]


def expected(seeing, output, inputs):
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        seeing, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    if inputs:
        kinds = [int(token == IMAGE) for token in token_ids]
        inputs = inputs | {"mm_token_type_ids": torch.tensor([kinds])}
    return record(model, NUM_LAYERS, token_ids, **inputs).streams


def test_rows_of_texts_and_images_equal_hugging_face(seeing, engine):
    reads = Read("embed"), Read("resid_post")
    outputs = engine.generate(prompts(seeing), params(*reads), use_tqdm=False)
    assert outputs[1].prompt_token_ids.count(IMAGE) == 6 + 3
    seen = dict(processor_of(seeing)(images(seeing), return_tensors="pt"))
    for output, inputs in zip(outputs, ({}, seen), strict=True):
        assert output.scope.status == "complete"
        streams = expected(seeing, output, inputs)
        for k, stream in enumerate(streams):
            rows = output.scope["resid_post", k - 1] if k else output.scope["embed", 0]
            assert rows.shape == stream.shape
            assert row_error(rows, stream) <= 1e-4, k


def test_an_edit_of_an_image_changes_these_rows_and_later_ones(seeing, engine):
    """The positions of an edit count tokens. They are not the positions of M-RoPE."""
    prompt = prompts(seeing)[1]
    (plain,) = engine.generate([prompt], params(Read("resid_post")), use_tqdm=False)
    image = [i for i, token in enumerate(plain.prompt_token_ids) if token == IMAGE]
    push = torch.full((128,), 0.5)
    edit = Add(push, layer=1, tokens=image[-3:])
    (edited,) = engine.generate([prompt], params(edit, Read("resid_post")), use_tqdm=False)
    first = image[-3]
    before, after = plain.scope["resid_post", 1], edited.scope["resid_post", 1]
    length = len(plain.prompt_token_ids)
    torch.testing.assert_close(after[:first], before[:first])
    torch.testing.assert_close(after[image[-3:]], before[image[-3:]] + push)
    torch.testing.assert_close(after[image[-1] + 1 : length], before[image[-1] + 1 : length])
    later = plain.scope["resid_post", 2], edited.scope["resid_post", 2]
    assert torch.equal(later[0][:first], later[1][:first])
    assert not torch.isclose(later[0][length - 1], later[1][length - 1]).all()
