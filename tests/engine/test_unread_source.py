"""Families whose source is not understood: served if numbers prove where the stream is.

The classes are users' own: vLLM runs them by `ModelRegistry`. Their weights are Llama's, and each
computes what Llama computes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry

from tests.asking import check, params, run
from tests.conftest import local_engine
from vllm_scope import Add, ConfigError, Read, SpecError, scope

PROMPTS = [list(range(3, 60)), [7] * 5, list(range(400, 380, -1))]
#: One graph, without the compiler's time.
TRACED = {"compilation_config": {"backend": "eager"}}
UNREAD = r"{layer}\.forward returns a pair under one name"


class PairLayer(LlamaDecoderLayer):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        out = (hidden_states, residual)
        return out  # noqa: RET504


class HalvingLayer(LlamaDecoderLayer):
    """Returns twice what it adds to the stream; the next layer halves what it gets."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        if residual is not None:
            hidden_states = hidden_states * 0.5
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        out = (hidden_states * 2, residual)
        return out  # noqa: RET504


class CompiledApartLayer(LlamaDecoderLayer):
    """Returns something else where it is compiled than where it is not."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        if torch.compiler.is_compiling():
            hidden_states = hidden_states * 2
        out = (hidden_states, residual)
        return out  # noqa: RET504


def family_of(layer: type) -> type:
    class Family(LlamaForCausalLM):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer)

    return Family


@contextmanager
def engine_of(layer: type, llama: Path, folder: Path, **options: Any) -> Iterator[Any]:
    name = f"{layer.__name__}ForCausalLM"
    model = folder / name
    shutil.copytree(llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    ModelRegistry.register_model(name, family_of(layer))
    defaults = {"dtype": "float32", "enforce_eager": False, "additional_config": {"scope": {}}}
    with local_engine(model, **(defaults | options)) as llm:
        yield llm


@pytest.fixture(autouse=True)
def no_cached_graph(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))


def test_it_is_read_and_edited_where_numbers_prove_the_stream(llama, ref, tmp_path):
    reads = Read("embed"), Read("resid_post"), Read("resid_pre", layers=[1])
    with engine_of(PairLayer, llama, tmp_path) as llm:
        outputs = run(llm, PROMPTS, params(scope(*reads)))
        direction = torch.linspace(-1, 1, 128)
        after = Add(direction, layer=0, scale=2.0)
        (edited,) = run(llm, PROMPTS[:1], params(scope(after, *reads), max_tokens=1))
    check(outputs, ref)
    for output in outputs:
        assert torch.equal(output.scope["resid_pre", 1], output.scope["resid_post", 0])
    plain = outputs[0].scope["resid_post", 0][: len(PROMPTS[0])]
    assert torch.allclose(edited.scope["resid_post", 0], plain + 2 * direction, atol=1e-4)
    # The next layer got the edited stream.
    assert not torch.allclose(
        edited.scope["resid_post", 1] - edited.scope["resid_post", 0],
        outputs[0].scope["resid_post", 1][: len(PROMPTS[0])] - plain, atol=1e-2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "options", "words"),
    [
        pytest.param(
            HalvingLayer, TRACED, "numbers do not show the stream either: the input of layer 1 is "
            "not the input of its first norm: a row differs by", id="numbers-that-contradict",
        ),
        pytest.param(
            CompiledApartLayer, TRACED, "the compiled graph does not compute what the model "
            "computes uncompiled: the row after layer 0 differs by", id="another-graph",
            marks=pytest.mark.long,
        ),
        pytest.param(
            PairLayer, {"enforce_eager": True}, "the model is not compiled as one graph",
            id="without-compilation", marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_it_is_served_plainly_and_says_which_equality_failed(
    layer, options, words, llama, tmp_path
):
    with engine_of(layer, llama, tmp_path, **options) as llm:
        with pytest.raises(SpecError, match=f"{UNREAD.format(layer=layer.__name__)}.*{words}"):
            run(llm, PROMPTS[:1], params(scope(Read("resid_post"))))
        (plain,) = run(llm, PROMPTS[:1], params())
    assert len(plain.outputs[0].token_ids) == 12


def test_a_site_that_numbers_do_not_prove_ends_the_start(llama, tmp_path):
    config = {"scope": {"sites": ["resid_post", "resid_mid"]}}
    words = "'resid_mid', which cannot be tapped on this model: PairLayer.* numbers prove only"
    with (
        pytest.raises(ConfigError, match=words),
        engine_of(PairLayer, llama, tmp_path, additional_config=config),
    ):
        pass


def test_an_engine_with_monitors_does_not_start_without_taps(llama, tmp_path):
    """Otherwise the engine would start, and would refuse every request."""
    monitors = {"one": {"weight": [1.0], "layers": [0], "threshold": 0.5}}
    config = {"scope": {"monitors": monitors}}
    words = "monitors: every request would have these monitors, and would be refused: this model"
    with (
        pytest.raises(ConfigError, match=words),
        engine_of(PairLayer, llama, tmp_path, enforce_eager=True, additional_config=config),
    ):
        pass
