"""Everything that is asked comes back over HTTP with Hugging Face's values."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch

from tests.checkpoints import check_completion
from tests.server.conftest import API_KEY
from vllm_scope import Add, Probe, Read, SpecError, scope
from vllm_scope.client import AsyncScopeClient
from vllm_scope.codecs import make_codec
from vllm_scope.vectors import SteeringModule

READS = Read("resid_post", layers=[0, 5]), Read("resid_pre", layers=[2]), Read("embed")
WEIGHT = np.linspace(-1, 1, 256, dtype=np.float32)
PROBE = Probe(WEIGHT, bias=0.5, layer=3, name="ramp")
TEXT = "My father told me about the book Goldette. Happily, it was"
OPTIONS = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
MESSAGES = [{"role": "user", "content": "What is the capital of Kimar?"}]


class AsResult:
    """A client's data under the names of the offline result, for `check_completion`."""

    def __init__(self, data):
        self._data = data

    def __getattr__(self, name):
        return getattr(self._data, name)

    def __getitem__(self, stream):
        return self._data.tensor(*stream)


def check(choice, prompt_ids, ids, ref):
    check_completion(AsResult(choice.scope), prompt_ids, ids, ref)


def check_scores(scores, ids, ref, weight=WEIGHT, name="ramp"):
    rows = ref.streams(ids)[4]
    expected = rows @ torch.from_numpy(weight) + 0.5
    assert scores.positions(name).tolist() == list(range(len(ids)))
    torch.testing.assert_close(torch.from_numpy(scores[name]), expected, rtol=1e-3, atol=1e-3)


def ids_of(raw_choice, raw):
    prompt = raw_choice.get("prompt_token_ids") or raw.get("prompt_token_ids")
    return prompt, raw_choice["token_ids"]


def test_a_completion_has_its_rows_and_scores(client, ref):
    out = client.complete(TEXT, *READS, PROBE, **OPTIONS)
    prompt_ids, ids = ids_of(out.raw["choices"][0], out.raw)
    assert out.scope.expected == 5 * (len(prompt_ids) + len(ids) - 1)
    check(out.choices[0], prompt_ids, ids, ref)
    check_scores(out.scope.scores, [*prompt_ids, *ids][:-1], ref)


def test_a_list_of_prompts_with_two_completions_each(client, ref):
    out = client.complete(
        [TEXT, "The capital of "], *READS, **OPTIONS | {"n": 2, "temperature": 1.0}
    )
    assert [choice.index for choice in out.choices] == [0, 1, 2, 3]
    for choice, raw in zip(out.choices, out.raw["choices"], strict=True):
        check(choice, *ids_of(raw, out.raw), ref=ref)


def test_sampled_completions_of_chat(client, ref):
    # The model is sure of itself: at 1.0, three unseeded answers may be one.
    options = OPTIONS | {"temperature": 2.0, "n": 3, "seed": 7}
    out = client.chat(MESSAGES, *READS, PROBE, **options)
    texts = {tuple(raw["token_ids"]) for raw in out.raw["choices"]}
    assert len(texts) > 1
    for choice, raw in zip(out.choices, out.raw["choices"], strict=True):
        prompt_ids, ids = ids_of(raw, out.raw)
        check(choice, prompt_ids, ids, ref)
        check_scores(choice.scope.scores, [*prompt_ids, *ids][:-1], ref)


def test_large_and_small_rows_are_the_same(client, server):
    small = client.complete(TEXT, *READS, PROBE, **OPTIONS)
    large = client.complete(TEXT, *READS, PROBE, scope_tensors="handle", **OPTIONS)
    assert small.raw["choices"][0]["scope"]["result"] is None
    assert large.raw["choices"][0]["scope"]["result"]["num_bytes"] > 5 * 20 * 1024
    assert "data" not in large.raw["choices"][0]["scope"]["rows"][0]
    for stream in small.scope.keys():
        assert np.array_equal(small.scope[stream], large.scope[stream])
        assert np.array_equal(small.scope.positions(*stream), large.scope.positions(*stream))
    assert np.array_equal(small.scope.scores["ramp"], large.scope.scores["ramp"])
    # The client has fetched the file, and it is gone.
    assert server.at_rest()["results"] == 0


def test_rows_that_were_read_with_a_codec_come_decoded_whichever_way(client):
    # `resid_pre` of layer 3 is `resid_post` of layer 2: raw, and of the same run.
    asked = Read("resid_post", layers=[2], codec="int8"), Read("resid_pre", layers=[3])
    codec = make_codec("int8", 256, torch.float32)

    def check_decoded(*parts):
        """Of one answer, or of its chunks: one stream's rows may come before the other's."""

        def rows_of(*stream):
            found = {}
            for part in parts:
                if stream in part.keys():
                    positions = part.positions(*stream).tolist()
                    found |= dict(zip(positions, part.tensor(*stream), strict=True))
            return found

        raw, decoded = rows_of("resid_pre", 3), rows_of("resid_post", 2)
        assert list(raw) == list(decoded)
        rows = torch.stack(list(raw.values()))
        expected = codec.decode(codec.encode(rows), len(rows))
        assert torch.equal(torch.stack(list(decoded.values())), expected)
        return list(raw)

    inline = client.complete(TEXT, *asked, **OPTIONS)
    entries = inline.raw["choices"][0]["scope"]["rows"]
    assert [entry.get("codec") for entry in entries] == ["int8", None]
    positions = check_decoded(inline.scope)
    in_file = client.complete(TEXT, *asked, scope_tensors="handle", **OPTIONS)
    assert check_decoded(in_file.scope) == positions == list(range(len(positions)))
    chunks = client.stream(TEXT, *asked, **OPTIONS, vllm_xargs={"scope_stream": "rows"})
    streamed = [c.scope for c in chunks if c.scope is not None and c.scope.rows]
    assert check_decoded(*streamed) == positions
    assert len(streamed) > 1


def test_a_plain_answer_has_no_scope(client):
    out = client.complete(TEXT, **OPTIONS)
    assert "scope" not in out.raw["choices"][0]


def events_of(server, path, body):
    with server.http() as http, http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def xargs(*actions, **more):
    return {"vllm_xargs": scope(*actions) | more}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_chunks_carry_each_value_once_and_in_time(kind, n, server, ref):
    asked = {"messages": MESSAGES} if kind == "chat" else {"prompt": TEXT}
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    body = OPTIONS | asked | {"model": "toyworld", "stream": True, "n": n}
    body["temperature"] = 1.0
    body |= xargs(Read("resid_post", layers=[2]), PROBE, scope_stream="rows")
    tokens = {index: [] for index in range(n)}
    scores = {index: {} for index in range(n)}
    rows = {index: {} for index in range(n)}
    ends, prompt_ids = {}, None
    for event in events_of(server, path, body):
        prompt_ids = event.get("prompt_token_ids") or prompt_ids
        for choice in event["choices"]:
            index, found = choice["index"], choice.get("scope", {})
            prompt_ids = choice.get("prompt_token_ids") or prompt_ids
            tokens[index] += choice.get("token_ids") or []
            for into, entries in (
                (scores[index], found.get("scores", {}).values()),
                (rows[index], found.get("rows", ())),
            ):
                for entry in entries:
                    new = [p for first, last in entry["spans"] for p in range(first, last)]
                    assert not set(new) & set(into), "a value came twice"
                    into.update(dict.fromkeys(new, entry))
            # The text of the token at `last` is out; what belongs to the one two before
            # it, and to all before that, must be.
            last = len(prompt_ids) + len(tokens[index]) - 1
            if tokens[index]:
                assert set(range(last - 1)) <= set(scores[index]), (last, sorted(scores[index]))
                assert set(range(last - 1)) <= set(rows[index])
            if choice.get("finish_reason"):
                ends[index] = found
    assert sorted(ends) == list(range(n))
    for index, end in ends.items():
        positions = list(range(len(prompt_ids) + len(tokens[index]) - 1))
        assert sorted(scores[index]) == sorted(rows[index]) == positions
        assert end["status"] == "complete"
        assert (end["expected"], end["dropped"]) == (2 * len(positions), 0)


def test_a_stream_put_together_is_the_reference(client, server, ref):
    parts, scores, tokens = [], [], []
    chunks = client.stream(TEXT, Read("resid_post", layers=[5]), PROBE, **OPTIONS,
                           vllm_xargs={"scope_stream": "rows"})  # fmt: skip
    text = ""
    for chunk in chunks:
        text += chunk.text
        if ("resid_post", 5) in chunk.scope.keys():
            parts.append(chunk.scope.tensor("resid_post", 5))
        scores += chunk.scope.scores.get("ramp", np.zeros(0)).tolist()
    whole = client.complete(TEXT, Read("resid_post", layers=[5]), PROBE, **OPTIONS)
    assert text == whole.text
    prompt_ids, tokens = ids_of(whole.raw["choices"][0], whole.raw)
    expected = ref.streams([*prompt_ids, *tokens][:-1])[6]
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(scores, whole.scope.scores["ramp"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_tokens_of_a_stream_are_aligned_with_their_scores(kind, client, server, ref):
    """Each with its id, its text, its position and the score of the row at this position."""
    generated = Probe(-WEIGHT, bias=0.5, layer=3, name="generated", tokens="generated")
    asked = TEXT if kind == "completions" else MESSAGES
    chunks = list(client.stream(asked, PROBE, generated, **OPTIONS))
    text = "".join(chunk.text for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    whole = (client.complete if kind == "completions" else client.chat)(asked, PROBE, **OPTIONS)
    prompt_ids, ids = ids_of(whole.raw["choices"][0], whole.raw)
    assert [token.id for token in tokens] == ids
    assert [token.position for token in tokens] == [len(prompt_ids) + i for i in range(len(ids))]
    assert "".join(token.text for token in tokens) == text == whole.text
    rows = ref.streams([*prompt_ids, *ids])[4]
    for token in tokens[:-1]:
        ramp = float(rows[token.position] @ torch.from_numpy(WEIGHT))
        assert token.scores["ramp"] == pytest.approx(0.5 + ramp, abs=1e-3)
        assert token.scores["generated"] == pytest.approx(0.5 - ramp, abs=1e-3)
    assert tokens[-1].scores == {}
    # They come as they are made; vLLM joins those that the server had no time to send.
    streams = (client.stream(asked, PROBE, **OPTIONS) for _ in range(10))
    assert any(sum(bool(chunk.tokens) for chunk in stream) > 1 for stream in streams)
    answered = whole.raw["choices"][0]["scope"]["tokens"]
    assert [each["id"] for each in answered] == ids


def test_without_rows_in_chunks_the_last_one_has_them_all(client, ref):
    *_, last = client.stream(TEXT, Read("resid_post", layers=[5]), **OPTIONS)
    whole = client.complete(TEXT, Read("resid_post", layers=[5]), **OPTIONS)
    assert last.finish_reason == "length"
    assert last.scope.status == "complete"
    np.testing.assert_allclose(
        last.scope["resid_post", 5], whole.scope["resid_post", 5], rtol=1e-4, atol=1e-3
    )


def test_edits_work_and_need_no_neighbour(client, ref):
    plain = client.complete(TEXT, **OPTIONS)
    vector = np.full(256, 0.7, np.float32)
    out = client.complete(
        TEXT, Add(vector, layer=2, scale=10.0), Read("resid_post", layers=[2, 5]), **OPTIONS
    )
    assert out.text != plain.text
    prompt_ids, ids = ids_of(out.raw["choices"][0], out.raw)
    token_ids = [*prompt_ids, *ids][:-1]
    streams, _ = ref.edited(token_ids, [("resid_post", 2, lambda x: x + 7.0)])
    for layer in (2, 5):
        torch.testing.assert_close(
            out.scope.tensor("resid_post", layer), streams["resid_post", layer],
            rtol=1e-3, atol=1e-2,
        )  # fmt: skip
    assert client.complete(TEXT, **OPTIONS).text == plain.text


def test_a_module_and_the_servers_edits_steer_until_they_are_gone(client):
    plain = client.complete(TEXT, **OPTIONS).text
    module = SteeringModule({("resid_post", 2): np.full(256, 0.7, np.float32)})
    name = "a name / with ü and ?"
    with pytest.raises(SpecError, match="Register it first"):
        client.complete(TEXT, Add(name, scale=10.0), **OPTIONS)
    client.put_module(name, module)
    try:
        assert [m["name"] for m in client.modules()] == [name]
        steered = client.complete(TEXT, Add(name, scale=10.0), **OPTIONS).text
        assert steered != plain
        client.set_edits(Add(name, scale=10.0))
        assert client.complete(TEXT, **OPTIONS).text == steered
        assert client.edits()[0]["vector"] == {"module": name}
    finally:
        client.clear_edits()
        client.delete_module(name)
    assert client.edits() == client.modules() == []
    with pytest.raises(SpecError, match="Register it first"):
        client.complete(TEXT, Add(name, scale=10.0), **OPTIONS)
    assert client.complete(TEXT, **OPTIONS).text == plain


def test_the_plain_openai_client_works(server, ref):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY)
    out = client.completions.create(
        model="toyworld", prompt=TEXT, max_tokens=4, temperature=0,
        extra_body=xargs(PROBE),
    )  # fmt: skip
    scores = out.choices[0].scope["scores"]["ramp"]
    assert out.choices[0].scope["status"] == "complete"
    assert len(scores["values"]) == sum(b - a for a, b in scores["spans"])


def test_the_async_client_answers_the_same(server):
    async def both():
        async with AsyncScopeClient(server.url, API_KEY) as client:
            whole = await client.complete(TEXT, PROBE, **OPTIONS)
            parts = [
                chunk.scope.scores.get("ramp", np.zeros(0))
                async for chunk in client.stream(TEXT, PROBE, **OPTIONS)
            ]
        return whole.scope.scores["ramp"], np.concatenate(parts)

    whole, parts = asyncio.run(both())
    np.testing.assert_allclose(whole, parts, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/responses", {"input": "hi"}, id="responses"),
        pytest.param(
            "/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, id="anthropic-messages"
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_without_a_place_for_a_scope_say_so(path, body, stream, server):
    with server.http() as http:
        body = body | {"model": "toyworld", "stream": stream} | xargs(PROBE)
        response = http.post(path, json=body)
    assert response.status_code == 400
    assert "have no field for a scope; use /v1/completions" in response.text


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        pytest.param(
            xargs(PROBE) | {"use_beam_search": True}, "beam search cannot be tapped", id="beams"
        ),
        pytest.param(
            {"vllm_xargs": {"scope_stream": "rows"}}, "options of a scope and no 'scope'", id="none"
        ),
        pytest.param(
            {"vllm_xargs": {"scope": "{}", "scope_tensor": "auto"}},
            "allowed with 'scope' are scope_tensors",
            id="misspelt",
        ),
        pytest.param({"vllm_xargs": {"scope": 5}}, "it must be a JSON string", id="a-number"),
        pytest.param(
            {"vllm_xargs": {"scope": {"reads": [{"site": "embed"}]}}},
            "vllm_xargs['scope'] is {'reads': [{'site': 'embed'}]}; it must be a "
                "string", id="an-object",
        ),
        pytest.param(scope(Read("embed")), "must be in 'vllm_xargs'", id="beside-vllm_xargs"),
        pytest.param(
            xargs(Read("resid_post", layers=[99])), "layers 0 to 5", id="layer-99"
        ),
        pytest.param(
            xargs(Read("embed", codec={"name": "topk8", "k": 257})), "a row has 256 values",
            id="codec",
        ),
        pytest.param(
            xargs(Read("embed", codec="rp8")), "rp8 keeps the projections", id="projections"
        ),
        pytest.param(
            xargs(Probe(WEIGHT, layer=3, name="a.positions")), "no name ends in", id="positions"
        ),
        pytest.param(
            xargs(Read("embed", to="filesystem", name="q")) | {"prompt": [TEXT, TEXT]},
            "more than one prompt", id="a-name-of-two",
        ),
        pytest.param(
            xargs(Read("resid_post", layers=[1], tokens=[9000])), "last position", id="position"
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_refused_with_400_and_a_sentence(more, sentence, stream, server):
    body = {"model": "toyworld", "prompt": TEXT, "max_tokens": 4, "stream": stream}
    if stream and "use_beam_search" in more:
        pytest.skip("vLLM refuses streams of beams itself")
    written = server.log.stat().st_size
    with server.http() as http:
        response = http.post("/v1/completions", json=body | more)
    assert response.status_code == 400, response.text
    assert sentence in response.json()["error"]["message"]
    assert b"Traceback" not in server.log.read_bytes()[written:]
