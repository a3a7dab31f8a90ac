"""Inspect: the provider's metadata equals native results; the deception eval runs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import urlparse

import pytest
import torch

pytest.importorskip("inspect_ai", reason="pip install 'vllm-scope[inspect]'")

from inspect_ai.log import read_eval_log
from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
from safetensors.torch import load_file

import vllm_scope.compat.inspect
from tests.checkpoints import reference, row_error
from tests.conftest import MEMORY, TOYWORLD
from tests.engine.test_lora import adapted, make_adapter
from vllm_scope import Probe, Read, SpecError, scope

TEXT = "My father told me about the book Goldette. Happily, it was"
WEIGHT = torch.randn(256, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Inspect finds providers by entry points; here the module is enough.
    assert vllm_scope.compat.inspect.ScopeAPI
    model = get_model(
        "vllm-scope/toyworld", model_path=str(TOYWORLD), chat=False, dtype="float32",
        tensors=str(tmp_path_factory.mktemp("tensors")), max_model_len=256, enforce_eager=True,
        memoize=False, enable_lora=True, max_lora_rank=8, **MEMORY,
    )  # fmt: skip
    yield model
    model.api.close()


def config(extra=None, **options):
    body = None if extra is None else {"extra_args": extra}
    return GenerateConfig(**({"temperature": 0.0, "max_tokens": 5} | options), extra_body=body)


def generate(model, *requests):
    async def together():
        return await asyncio.gather(
            *(model.generate(text, config=given) for text, given in requests),
            return_exceptions=True,
        )

    found = asyncio.run(together())
    for one in found:
        if isinstance(one, Exception) and not isinstance(one, SpecError):
            raise one
    return found


def test_concurrent_requests_have_their_own_scores_and_rows(model):
    """Two evals' worth: each `asyncio.run` is an event loop of its own."""
    spec = scope(Probe(WEIGHT, layer=3, name="p"), Read("resid_post", layers=[3]), Read("embed"))
    for _ in range(2):
        requests = [(f"{TEXT}{' a' * i}", config(spec, max_tokens=3 + i)) for i in range(8)]
        for output in generate(model, *requests, (TEXT, config()))[:-1]:
            found = output.metadata
            ids = [*found["prompt_token_ids"], *found["token_ids"]][:-1]
            assert output.usage.output_tokens == len(found["token_ids"])
            streams = reference(TOYWORLD, torch.float32).streams(ids)
            read = found["reads"]["resid_post.3"]
            assert read["shape"] == [len(ids), 256]
            path = urlparse(read["uri"]).path
            with open(path, "rb") as file:
                assert hashlib.sha256(file.read()).hexdigest() == read["sha256"]
            tensors = load_file(path)
            rows = tensors[read["key"]]
            assert row_error(rows, streams[4]) <= 1e-4
            assert torch.equal(tensors["resid_post.3.positions"], torch.arange(len(ids)))
            scores = torch.tensor(found["scores"]["p"]["scores"])
            torch.testing.assert_close(scores, rows @ WEIGHT, rtol=1e-3, atol=1e-2)
            assert found["scores"]["p"]["positions"] == list(range(len(ids)))


def test_a_plain_request_stays_plain(model):
    (output,) = generate(model, (TEXT, config()))
    assert set(output.metadata) == {"prompt_token_ids", "token_ids"}
    assert output.stop_reason == "max_tokens"
    assert output.completion


def test_vllm_lens_keys_and_name_work(model):
    asked = config({"output_residual_stream": [3, 1]})
    (output,) = generate(model, (TEXT, asked))
    rows = output.metadata["activations"]["residual_stream"]
    ids = [*output.metadata["prompt_token_ids"], *output.metadata["token_ids"]][:-1]
    streams = reference(TOYWORLD, torch.float32).streams(ids)
    assert row_error(rows, torch.stack([streams[2], streams[4]])) <= 1e-4
    # No engine is started before the first request.
    assert isinstance(get_model("vllm-lens/any", memoize=False).api, type(model.api))


def test_each_choice_has_its_own(model):
    asked = config(scope(Read("resid_post", layers=[1])), num_choices=3, temperature=1.0)
    (output,) = generate(model, (TEXT, asked))
    assert len(output.choices) == len(output.metadata["choices"]) == 3
    for metadata in output.metadata["choices"]:
        num_rows = len(metadata["prompt_token_ids"]) + len(metadata["token_ids"]) - 1
        assert metadata["reads"]["resid_post.1"]["shape"] == [num_rows, 256]


BAD = {
    "layer": (config(scope(Read("resid_post", layers=[99]))), "layers 0 to 5"),
    "extra-body": (GenerateConfig(extra_body={"extra_arg": {}}), "fields here are extra_args"),
    "logprobs": (config(logprobs=True), "this provider does not support logprobs"),
}


def test_an_action_without_scope_is_refused_before_the_eval():
    probe = Probe(torch.ones(4), layer=1, name="p")
    for wrong in (probe, [probe], scope(probe)["scope"], None):
        with pytest.raises(SpecError, match=r"reading takes the result of scope\(\.\.\.\), not "):
            vllm_scope.compat.inspect.reading(wrong)
    vllm_scope.compat.inspect.reading(scope(probe))


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_given_fails_that_request_alone(case, model):
    given, words = BAD[case]
    bad, good = generate(
        model, (TEXT, given), (TEXT, config(scope(Read("resid_post", layers=[1]))))
    )
    assert isinstance(bad, SpecError)
    assert words in str(bad)
    assert "resid_post.1" in good.metadata["reads"]


def test_a_lora_request_reads_its_own_model(model, tmp_path):
    make_adapter(tmp_path, 256, num_layers=6)
    lora = {"lora_name": "adapter", "lora_int_id": 1, "lora_path": str(tmp_path)}
    asked = config({"output_residual_stream": [2]})
    asked.extra_body["lora_request"] = lora
    (output,) = generate(model, (TEXT, asked))
    ids = [*output.metadata["prompt_token_ids"], *output.metadata["token_ids"]][:-1]
    rows = output.metadata["activations"]["residual_stream"][0]
    assert row_error(rows, adapted(TOYWORLD, tmp_path).streams(ids)[3]) <= 1e-4
    assert row_error(rows, reference(TOYWORLD, torch.float32).streams(ids)[3]) > 0.1


def test_chats_go_through_the_models_template(model):
    messages = [ChatMessageUser(content="What is the capital of Qidelar?")]
    api = model.api
    engine = api._started()
    ids = vllm_scope.compat.inspect.ScopeAPI("any", chat=True)._token_ids(engine, messages)
    text = engine.llm.get_tokenizer().decode(ids)
    assert text.endswith("<|user|>What is the capital of Qidelar?<|assistant|>")
    assert ids.count(ids[0]) == 1, "one token opens the text"


def test_the_deception_eval_tells_liars_from_honest_speakers(model, tmp_path):
    from examples.faces.inspect_deception import run

    model.api.close()  # one engine at a time
    log = run(tmp_path, num_train=80, num_test=40)
    assert log.status == "success", log.error
    metrics = {name: m.value for name, m in log.results.scores[0].metrics.items()}
    assert metrics["accuracy"] > 0.9
    assert metrics["auroc"] > 0.95
    written = read_eval_log(log.location)
    assert len(written.samples) == 40
    sample = written.samples[0]
    assert sample.output.metadata["scores"]["deception"]["positions"]
    assert sample.scores["probe_scorer"].metadata["probe"] == "deception"


#: Each is the end of a script that has evaluated something, and closes no model.
ENDS = {
    "it-raises": "raise SystemExit(3)",
    "requests-are-given-up": """
async def given_up():
    asked = asyncio.ensure_future(model.generate(TEXT, config=GenerateConfig(max_tokens=200)))
    await asyncio.sleep(0.2)
    asked.cancel()

asyncio.run(given_up())
""",
}
SCRIPT = """
import asyncio
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
import vllm_scope.compat.inspect

TEXT = "My father told me"
if __name__ == "__main__":
    model = get_model(
        "vllm-scope/toyworld", model_path={path!r}, chat=False, max_model_len=256,
        enforce_eager=True, gpu_memory_utilization=0.3,
    )
    options = dict(log_dir={logs!r}, display="plain", max_tokens=4)
    for _ in range(2):
        (log,) = eval(Task(dataset=[Sample(input=TEXT)]), model=model, **options)
        assert log.status == "success", log.error
{end}
"""


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_an_evaluation_says_nothing_of_a_dead_engine(end, model, tmp_path):
    model.api.close()  # one engine at a time
    script = tmp_path / "script.py"
    text = textwrap.indent(ENDS[end], "    ")
    script.write_text(SCRIPT.format(path=str(TOYWORLD), logs=str(tmp_path / "logs"), end=text))
    done = subprocess.run(
        [sys.executable, script], cwd=Path(__file__).parents[2], timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOGGING_LEVEL": "INFO"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == (3 if end == "it-raises" else 0), said
    for words in ("EngineDeadError", "Traceback", "exited unexpectedly", "ERROR"):
        assert words not in said, said
    assert "trigger received" in said or "send sigterm" in said, "the engine was not stopped"
