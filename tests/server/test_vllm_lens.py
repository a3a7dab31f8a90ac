"""vllm-lens over HTTP: what its users send, and what its decoder makes of the answers."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch

from tests.server.conftest import API_KEY, OTHER_KEY
from tests.server.test_answers import MESSAGES, TEXT, events_of, ids_of
from vllm_scope import Add, Read, ScopeError, SpecError
from vllm_scope.client import ServerError
from vllm_scope.compat.vllm_lens import SteeringVector, VLLMLensClient, decode_activations
from vllm_scope.compat.vllm_lens import http as lens_http

BODY = {"model": "toyworld", "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
VECTOR = torch.linspace(-8, 8, 256)


def as_vllm_lens_reads_it(entry, fetch):
    """Its decoder, from the description of its format: PyTorch's tensor of one entry."""
    raw = fetch(entry["handle"]) if "handle" in entry else base64.b64decode(entry["data"])
    if entry.get("compression") == "zstd":
        from backports import zstd

        raw = zstd.decompress(raw)
    array = np.frombuffer(raw, entry["dtype"]).reshape(entry["shape"]).copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if entry["original_dtype"] == "torch.bfloat16" else tensor


def stacked(ref, ids, layers=range(6)):
    streams = ref.streams(ids)
    return torch.stack([streams[layer + 1] for layer in layers])


@pytest.fixture
def lens(server):
    with VLLMLensClient(server.url + "/", None, API_KEY, 120) as found:
        yield found


@pytest.fixture
def http(server):
    with server.http() as found:
        yield found


@pytest.mark.parametrize("transport", [None, "base64", "binary"])
@pytest.mark.parametrize("kind", ["generate", "chat"])
def test_the_client_captures_what_hugging_face_computes(kind, transport, lens, ref):
    asked = TEXT if kind == "generate" else MESSAGES
    out = getattr(lens, kind)(
        asked, max_tokens=6, capture_layers=[5, 0], activations_transport=transport,
        ignore_eos=True, return_token_ids=True,
    )  # fmt: skip
    prompt_ids, ids = ids_of(out.raw["choices"][0], out.raw)
    rows = out.activations["residual_stream"]
    assert rows.shape == (2, len(prompt_ids) + 6 - 1, 256)
    expected = stacked(ref, [*prompt_ids, *ids][:-1], [0, 5])
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-3)
    assert (out.hook_results, out.logprobs) == (None, None)
    assert out.text


def test_the_client_steers_as_native_adds_do(lens, client):
    vectors = [SteeringVector(VECTOR[None], [2], scale=0.5)]
    options = {"temperature": 0.0, "max_tokens": 12}
    face = lens.generate(TEXT, capture_layers=True, steering_vectors=vectors, **options)
    native = client.complete(TEXT, Add(VECTOR / 2, layer=2), Read("resid_post"), **options)
    assert face.text == native.text != lens.generate(TEXT, **options).text
    expected = torch.stack([native.scope.tensor("resid_post", k) for k in range(6)])
    assert torch.equal(face.activations["residual_stream"], expected)


@pytest.mark.parametrize("transport", ["base64", "binary"])
def test_each_of_several_choices_has_its_own(transport, http, ref):
    """A list of prompts had the first one's only, and n > 1 had the first completion's."""
    words = {"output_residual_stream": "[3]", "activations_transport": transport}
    body = BODY | {"prompt": [TEXT, "The capital of "], "n": 2, "vllm_xargs": words}
    raw = http.post("/v1/completions", json=body).json()

    def fetch(handle):
        return http.get(f"/v1/activations/{handle}?delete=true").content

    assert [choice["index"] for choice in raw["choices"]] == [0, 1, 2, 3]
    for choice in raw["choices"]:
        prompt_ids, ids = ids_of(choice, raw)
        rows = as_vllm_lens_reads_it(choice["activations"]["residual_stream"], fetch)
        expected = stacked(ref, [*prompt_ids, *ids][:-1], [3])
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-3)
    # What its own client looks at.
    assert raw["activations"] == raw["choices"][0]["activations"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_streams_carry_them_where_choices_end(kind, n, server, ref):
    asked = {"prompt": TEXT} if kind == "completions" else {"messages": MESSAGES}
    body = BODY | asked | {"stream": True, "n": n, "vllm_xargs": {"output_residual_stream": "true"}}
    tokens, found, prompt_ids = {}, {}, None
    events = events_of(server, f"/v1/{kind}", body)
    for event in events:
        prompt_ids = event.get("prompt_token_ids") or prompt_ids
        for choice in event["choices"]:
            prompt_ids = choice.get("prompt_token_ids") or prompt_ids
            tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
            if choice.get("finish_reason"):
                found[choice["index"]] = decode_activations(event if n == 1 else choice)
    assert sorted(found) == list(range(n))
    for index, activations in found.items():
        expected = stacked(ref, [*prompt_ids, *tokens[index]][:-1])
        rows = activations["residual_stream"]
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-3)
    assert sum("activations" in event for event in events) == 1


def binary(http, prompt=TEXT):
    words = {"output_residual_stream": "[1]", "activations_transport": "binary"}
    response = http.post("/v1/completions", json=BODY | {"prompt": prompt, "vllm_xargs": words})
    return response.json()["activations"]["residual_stream"]


def test_a_handle_is_its_askers_alone_and_says_what_it_holds(server, http):
    entry = binary(http)
    path = f"/v1/activations/{entry['handle']}"
    with server.http(OTHER_KEY) as other, server.http(None) as nobody:
        assert other.get(f"{path}?delete=true").status_code == 404
        assert nobody.get(path).status_code == 401
    response = http.get(path)
    assert response.headers["content-type"] == "application/octet-stream"
    assert len(response.content) == entry["nbytes"] == 4 * np.prod(entry["shape"])
    assert response.headers["x-vllm-lens-dtype"] == entry["dtype"] == "float32"
    assert json.loads(response.headers["x-vllm-lens-shape"]) == entry["shape"]
    assert "data" not in entry
    assert http.get(f"{path}?delete=true").status_code == 200
    assert http.get(path).status_code == 404


@pytest.mark.parametrize("handle", ["a" * 32, "..%2Flock", "~", "%00"])
def test_what_is_no_handle_is_not_found(handle, http):
    assert http.get(f"/v1/activations/{handle}").status_code == 404


def test_native_results_are_no_handles(http):
    xargs = {"scope": '{"reads": [{"site": "embed"}]}', "scope_tensors": "handle"}
    body = BODY | {"prompt": TEXT, "vllm_xargs": xargs}
    raw = http.post("/v1/completions", json=body).json()
    result = raw["choices"][0]["scope"]["result"]
    assert http.get(f"/v1/activations/{result['id']}").status_code == 404
    assert http.get(f"{result['url']}?delete=true").status_code == 200


def test_the_client_leaves_nothing_behind(lens, server):
    before = server.at_rest()["results"]
    out = lens.generate(
        TEXT, capture_layers=True, activations_transport="binary", n=2, temperature=1.0
    )
    other = decode_activations(out.raw["choices"][1], fetch_bytes=lens.fetch_bytes)
    # They share a prompt.
    here, there = (rows["residual_stream"][:, :5] for rows in (out.activations, other))
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-2)
    assert server.at_rest()["results"] == before


def test_the_example_turns_reviews(lens):
    from examples.faces.vllm_lens_client import run

    assert run(lens) > 0.8


BAD = {
    "transport": (
        {"activations_transport": "pigeon", "capture_layers": [1]},
        "it must be 'binary'",
    ),
    "attention": ({"capture_qk": True}, "does not tap queries and keys; start it with"),
    "a-layer": ({"capture_layers": [99]}, "layers 0 to 5"),
    "a-size": ({"steering_vectors": [SteeringVector(torch.ones(1, 8), [0])]}, "rows have 256"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_given_is_an_error(case, lens):
    options, sentence = BAD[case]
    with pytest.raises(SpecError, match=sentence):
        lens.generate(TEXT, **options)


#: Vectors over the wire that are none.
VECTORS = {
    "text": {"activations": "v", "layer_indices": [0]},
    "ragged": {"activations": [[1.0], [1.0, 2.0]], "layer_indices": [0, 1]},
    "endless": {"activations": [[1e400] * 256], "layer_indices": [0]},
    "objects": {
        "activations": {"data": "", "dtype": "O", "original_dtype": "", "shape": [1, 256]},
        "layer_indices": [0],
    },
    "a-terabyte": {
        "activations": {
            "data": "AAAA", "dtype": "float32", "original_dtype": "", "shape": [1 << 20, 1 << 20],
            "compression": "zstd",
        },
        "layer_indices": [0],
    },
    "a-scale": {"activations": [[1.0] * 256], "layer_indices": [0], "scale": "big"},
    "layers": {"activations": [[1.0] * 256], "layer_indices": 0},
    "positions": {
        "activations": [[1.0] * 256], "layer_indices": [0], "position_indices": [[0]]
    },
}  # fmt: skip


@pytest.mark.parametrize("case", VECTORS)
def test_vectors_that_are_none_are_refused_with_400(case, http):
    text = json.dumps([VECTORS[case]])
    body = BODY | {"prompt": TEXT, "vllm_xargs": {"apply_steering_vectors": text}}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.startswith("apply_steering_vectors"), message


def test_hooks_do_not_run_on_a_server(lens, http):
    body = BODY | {"prompt": TEXT, "vllm_xargs": {"apply_hooks": '[{"fn": {"cloudpickle": ""}}]'}}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "arbitrary code" in response.json()["error"]["message"]
    response = http.post("/v1/hooks/register", json={"hooks": []})
    assert response.status_code == 404
    assert "arbitrary code" in response.json()["error"]["message"]
    with pytest.raises(SpecError, match="arbitrary code"):
        lens.generate(TEXT, hooks=[object()])
    with pytest.raises(SpecError, match="arbitrary code"):
        lens.register_hooks([object()])
    for name in ("collect_hook_results", "clear_hooks", "clear_hook_results", "clear_prefetched"):
        with pytest.raises(SpecError, match="arbitrary code"):
            getattr(lens, name)()


def test_rows_that_could_not_be_given_are_an_error_for_every_reader():
    body = {"activations": {"residual_stream": {"error": "3 rows are missing."}}}
    with pytest.raises(ScopeError, match="3 rows are missing"):
        decode_activations(body)
    assert not {"data", "handle"} & set(body["activations"]["residual_stream"])


@pytest.mark.parametrize(("most", "key"), [(48, "data"), (47, "error")])
def test_what_is_too_large_for_json_says_how_to_get_it(most, key, monkeypatch):
    monkeypatch.setattr(lens_http, "MAX_INLINE_BYTES", most)
    completion = SimpleNamespace(activations={"residual_stream": torch.ones(2, 3, 2)})
    reply = lens_http.LensReply(None)
    assert reply.choice(0, 1, completion) == {}
    entry = reply.whole()["activations"]["residual_stream"]
    assert key in entry
    if key == "error":
        assert "activations_transport='binary'" in entry["error"]


def test_a_stranger_is_told_so(server):
    with (
        VLLMLensClient(server.url, "toyworld", "wrong") as lens,
        pytest.raises(ServerError, match="401"),
    ):
        lens.generate(TEXT)


def test_the_clients_module_needs_neither_torch_nor_vllm():
    code = (
        "import sys, vllm_scope.compat.vllm_lens.client\n"
        "print([m for m in ('torch', 'vllm', 'fastapi', 'pydantic') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_client_waits_no_longer_than_it_was_told(server):
    def slow(request):
        raise httpx.ReadTimeout("slow", request=request)

    lens = VLLMLensClient(server.url, "toyworld", timeout=0.1, transport=httpx.MockTransport(slow))
    started = time.monotonic()
    with pytest.raises(httpx.ReadTimeout):
        lens.generate(TEXT)
    assert time.monotonic() - started < 5
