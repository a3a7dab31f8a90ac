"""Inspect's provider over an engine that only remembers, and the loop that the engine runs on."""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
from types import SimpleNamespace
from urllib.parse import urlparse

import pytest
import torch
from safetensors.torch import load_file

from vllm_scope.compat.own_loop import OwnLoop
from vllm_scope.errors import SpecError


class Scores(dict):
    def positions(self, name):
        return torch.arange(len(self[name]))


class Result(dict):
    status, error, scores = "complete", None, Scores(p=torch.tensor([0.5, 2.0]))

    def positions(self, site, layer):
        return torch.arange(2)


class Remembering:
    """An engine that answers each prompt with two outputs, the last of them with rows."""

    def __init__(self):
        self.asked, self.threads = [], set()

    def get_tokenizer(self):
        return lambda text: {"input_ids": [len(text)]}

    async def generate(self, prompt, params, name, *, lora_request):
        self.asked.append((params, lora_request))
        for text in ("a", "ab"):
            await asyncio.sleep(0)
            self.threads.add(threading.current_thread().name)
            rows = torch.zeros(3, 2).T  # not contiguous
            result = Result({("resid_post", 1): rows, ("embed", 0): rows})
            one = SimpleNamespace(text=text, token_ids=[1, 2], finish_reason="length", scope=result)
            yield SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[one])

    def shutdown(self):
        self.threads.add(threading.current_thread().name)


@pytest.fixture
def engine(monkeypatch):
    engine = Remembering()

    async def start(self, options):
        engine.options = options
        return engine

    monkeypatch.setattr(OwnLoop, "_start", start)
    return engine


def test_an_engine_outlives_the_loops_that_ask_it(engine):
    own = OwnLoop({"model": "m"})
    for _ in range(2):
        stream = engine.generate({"prompt_token_ids": [1]}, None, "x", lora_request=None)
        assert asyncio.run(own.last(stream)).outputs[0].text == "ab"
    own.close()
    assert len(engine.threads) == 1
    assert threading.current_thread().name not in engine.threads


@pytest.fixture
def api(engine, tmp_path):
    pytest.importorskip("inspect_ai", reason="pip install 'vllm-scope[inspect]'")
    from vllm_scope.compat.inspect import ScopeAPI

    api = ScopeAPI("any", model_path="m", chat=False, tensors=str(tmp_path), seed=3)
    yield api
    api.close()


def generated(api, **config):
    from inspect_ai.model import ChatMessageUser, GenerateConfig

    messages = [ChatMessageUser(content="Hello")]
    return asyncio.run(api.generate(messages, [], "auto", GenerateConfig(**config)))


def test_an_output_has_text_scores_and_the_file_of_its_rows(api, engine):
    body = {"extra_args": {"scope": "{}"}}
    output = generated(api, max_tokens=2, stop_seqs=["."], num_choices=1, extra_body=body)
    assert (output.completion, output.stop_reason) == ("ab", "max_tokens")
    assert output.usage.total_tokens == 3
    assert engine.options == {"model": "m", "seed": 3}
    params, lora = engine.asked[0]
    assert (params.max_tokens, params.stop, params.extra_args) == (2, ["."], {"scope": "{}"})
    assert lora is None
    assert output.metadata["scores"] == {"p": {"scores": [0.5, 2.0], "positions": [0, 1]}}
    assert set(output.metadata["reads"]) == {"resid_post.1", "embed"}
    read = output.metadata["reads"]["resid_post.1"]
    assert (read["shape"], read["dtype"]) == ([2, 3], "float32")
    path = urlparse(read["uri"]).path
    tensors = load_file(path)
    assert set(tensors) == {
        "resid_post.1", "resid_post.1.positions", "embed", "embed.positions"
    }  # fmt: skip
    with open(path, "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == read["sha256"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(
            {"extra_body": {"extra_arg": {}}}, "its fields here are extra_args", id="body"
        ),
        pytest.param(
            {"logprobs": True}, "this provider does not support logprobs; leave", id="logprobs"
        ),
    ],
)
def test_what_the_provider_cannot_give_is_refused(config, words, api, engine):
    with pytest.raises(SpecError, match=words):
        generated(api, **config)
    assert not engine.asked


def test_auroc_is_the_share_of_pairs_in_order(api):
    from inspect_ai.scorer import SampleScore, Score

    from vllm_scope.compat.inspect import auroc

    def scores(*pairs):
        return [
            SampleScore(score=Score(value=1, metadata={"score": s, "present": p})) for s, p in pairs
        ]

    assert auroc()(scores((3, True), (1, True), (2, False), (1, False))) == 0.625
    assert math.isnan(auroc()(scores((3, True))))
