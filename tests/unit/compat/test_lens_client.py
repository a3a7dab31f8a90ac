"""VLLMLensClient with a server that only remembers what it was asked."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import httpx
import pytest
import torch

from vllm_scope.compat.vllm_lens import (
    SteeringVector,
    VLLMLensClient,
    decode_activations,
    serialize_activations,
)
from vllm_scope.compat.vllm_lens.http import LensReply
from vllm_scope.errors import ScopeError, SpecError

ROWS = torch.arange(6.0).reshape(1, 3, 2)
VECTOR = SteeringVector(torch.ones(1, 2), [0])


@pytest.fixture
def asked():
    return []


@pytest.fixture
def client(asked):
    def answer(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy"}]})
        asked.append((request.url.path, json.loads(request.content)))
        choice = {"text": "yes", "message": {"content": "yes"}, "logprobs": None}
        body = {
            "choices": [choice],
            "activations": serialize_activations({"residual_stream": ROWS}),
        }
        return httpx.Response(200, json=body)

    with VLLMLensClient("http://here", transport=httpx.MockTransport(answer)) as client:
        yield client


def test_a_completion_has_vllm_lenss_options_in_vllm_xargs(client, asked):
    out = client.generate(
        "Hello", max_tokens=3, capture_layers=[0], capture_qk=True, steering_vectors=[VECTOR],
        activations_transport="binary", logprobs=2, n=2, vllm_xargs={"scope": "{}"},
    )  # fmt: skip
    assert out.text == "yes"
    assert torch.equal(out.activations["residual_stream"], ROWS)
    path, body = asked[0]
    words = body.pop("vllm_xargs")
    assert path == "/v1/completions"
    assert body == {
        "model": "toy", "prompt": "Hello", "max_tokens": 3, "temperature": 0.0, "logprobs": 2,
        "echo": False, "n": 2,
    }  # fmt: skip
    (vector,) = json.loads(words.pop("apply_steering_vectors"))
    assert SteeringVector.model_validate(vector).layer_indices == [0]
    assert words == {
        "scope": "{}", "output_residual_stream": "[0]", "output_qk": "true",
        "activations_transport": "binary",
    }  # fmt: skip


def test_a_chat_that_asks_for_nothing_is_a_plain_request(client, asked):
    messages = [{"role": "user", "content": "Hello"}]
    client.chat(messages, temperature=0.5)
    assert asked == [
        (
            "/v1/chat/completions",
            {"model": "toy", "messages": messages, "max_tokens": 16, "temperature": 0.5},
        )
    ]


def test_generate_and_chat_name_their_options():
    options = [
        "max_tokens", "temperature", "hooks", "capture_layers", "capture_qk", "steering_vectors",
        "activations_transport",
    ]  # fmt: skip
    assert list(inspect.signature(VLLMLensClient.chat).parameters)[2:-1] == options
    both = list(inspect.signature(VLLMLensClient.generate).parameters)[2:-1]
    assert both == [*options, "logprobs", "echo"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"hooks": [print]}, "a server runs none", id="hooks"),
        pytest.param({"stream": True}, "this client does not stream", id="stream"),
        pytest.param({"vllm_xargs": 3}, "vllm_xargs is 3; it must be an object", id="xargs"),
    ],
)
def test_what_this_client_cannot_send_is_refused(options, words, client, asked):
    with pytest.raises(SpecError, match=words):
        client.generate("Hello", capture_layers=[0], **options)
    assert not asked


def test_rows_that_the_server_could_not_deliver_are_an_error():
    missing = {"choices": [{"text": ""}], "activations": {"residual_stream": {"error": "no rows"}}}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=missing))
    client = VLLMLensClient("http://here", "toy", transport=transport)
    with client, pytest.raises(ScopeError, match="no rows"):
        client.generate("Hello", capture_layers=[0])


@pytest.mark.parametrize("num_choices", [1, 2])
def test_every_choice_of_a_binary_answer_can_be_decoded_and_leaves_no_file(num_choices):
    """The activations of choice 0 are those of the answer, and its files are fetched once."""
    files = {}

    def keep(tensors, metadata):
        (tensor,) = tensors.values()
        handle = f"h{len(files)}"
        files[handle] = tensor.numpy().tobytes()
        return SimpleNamespace(id=handle)

    def answer(request):
        if request.method == "POST":
            reply = LensReply(keep)
            choices = [
                {"text": "yes", **reply.choice(i, num_choices, completion)}
                for i, completion in enumerate(completions)
            ]
            return httpx.Response(200, json={"choices": choices, **reply.whole()})
        handle = request.url.path.rsplit("/", 1)[1]
        if handle not in files:
            return httpx.Response(404, json={"error": {"message": "no handle with this id."}})
        content = files[handle]
        if request.url.params.get("delete") == "true":
            del files[handle]
        return httpx.Response(200, content=content)

    completions = [
        SimpleNamespace(activations={"residual_stream": ROWS + i}) for i in range(num_choices)
    ]
    with VLLMLensClient("http://here", "toy", transport=httpx.MockTransport(answer)) as client:
        out = client.generate(
            "Hello", capture_layers=[0], n=num_choices, activations_transport="binary"
        )
        assert torch.equal(out.activations["residual_stream"], ROWS)
        for i, choice in list(enumerate(out.raw["choices"]))[1:]:
            found = decode_activations(choice, fetch_bytes=client.fetch_bytes)
            assert torch.equal(found["residual_stream"], ROWS + i)
    assert files == {}
