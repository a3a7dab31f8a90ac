"""What a face registers for HTTP: its words, its routes, and what it adds to an answer."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi import APIRouter, Request
from fastapi.testclient import TestClient

from tests.unit.server.test_routes import ADMIN, Remembering, app_with
from vllm_scope.errors import SpecError
from vllm_scope.server import faces
from vllm_scope.server.access import asked, engine_of
from vllm_scope.server.answer import Answer
from vllm_scope.server.faces import HttpFace, Reply, Words
from vllm_scope.server.options import ScopeOptions
from vllm_scope.server.settings import MAX_OPERATOR_BYTES

reading = APIRouter(prefix="/v1/toy")
changing = APIRouter(prefix="/v1/toy")


@reading.get("")
async def get_modules(request: Request):
    return await asked(engine_of(request).modules())


@changing.post("/set")
async def set_edits(request: Request):
    return await asked(engine_of(request).set_edits((await request.body()).decode()))


class Toy(Reply):
    """Says which choices it has seen."""

    def __init__(self):
        self.seen = []

    def choice(self, number, of, completion):
        self.seen.append((number, of))
        return {"toy": completion.text}

    def whole(self):
        return {"toys": list(self.seen)}


@pytest.fixture
def toy():
    face = HttpFace(
        "toy", frozenset({"toy", "toy_key"}), frozenset({"toy"}), lambda values, keep: Toy(),
        (reading,), (changing,),
    )  # fmt: skip
    faces.register(face)
    yield face
    faces.unregister("toy")


@pytest.mark.parametrize(
    ("xargs", "body", "values", "fields"),
    [
        pytest.param({"toy": 1}, {}, {"toy": 1}, {}, id="within"),
        pytest.param({"other": 1}, {"toy": {}}, {"toy": {}}, {"toy": {}}, id="beside"),
        pytest.param({"toy_key": 1}, {"toy": 2}, {"toy_key": 1, "toy": 2}, {"toy": 2}, id="both"),
        pytest.param({}, {"toy_key": 1, "toy": None}, None, {}, id="no-field-and-null"),
    ],
)
def test_words_are_found_in_vllm_xargs_and_beside_it(xargs, body, values, fields, toy):
    words = Words.find(xargs, body, toy.keys)
    assert words.values == ({"toy": values} if values is not None else {})
    assert words.fields == fields
    assert len(words.begin(lambda tensors, metadata: None)) == len(words.values)


def test_words_that_no_face_understands_are_refused(toy):
    with pytest.raises(SpecError, match="'lonely', which is understood offline only"):
        Words.find({"toy": 1, "lonely": 2}, None, {"toy", "lonely"})
    with pytest.raises(SpecError, match="'toy' is both in vllm_xargs and in the body"):
        Words.find({"toy": 1}, {"toy": 1}, toy.keys)
    assert faces.has_fields({"toy": 1})
    assert not faces.has_fields({"toy_key": 1})


def test_a_face_cannot_claim_a_field_that_is_no_key_or_a_path_without_authentication():
    with pytest.raises(ValueError, match="fields that are not among its keys"):
        HttpFace("bad", frozenset(), frozenset({"x"}))
    for prefix in ("", "/toy", "/v1x"):
        with pytest.raises(ValueError, match="not below /v1/"):
            HttpFace("bad", changing=(APIRouter(prefix=prefix),))


@pytest.mark.parametrize("key", ["operator", None])
def test_routes_that_change_something_need_the_operators_key(key, toy, tmp_path, monkeypatch):
    engine = Remembering()
    app = app_with(tmp_path, monkeypatch, key, engine)
    http = TestClient(app, raise_server_exceptions=False)
    assert http.get("/v1/toy").json() == {}
    status = 404 if key is None else 401
    assert http.post("/v1/toy/set", content="e").status_code == status
    wrong = http.post("/v1/toy/set", content="e", headers={"X-Scope-Admin-Key": "x"})
    assert wrong.status_code == (404 if key is None else 403)
    assert engine.text is None
    if key is not None:
        assert http.post("/v1/toy/set", content="e", headers=ADMIN).status_code == 200
        assert engine.text == "e"
        refused = http.post("/v1/toy/set", content="bad", headers=ADMIN)
        assert refused.status_code == 400
        assert "make it good" in refused.json()["error"]["message"]
        large = {"Content-Length": str(MAX_OPERATOR_BYTES + 1)}
        assert http.post("/v1/toy/set", content="e", headers=ADMIN | large).status_code == 413
    app.state.scope.store.close()


def answer_of(num_prompts, n, options=None):
    answer = Answer(options, None, 0, "owner", n, True)
    answer.replies = [Toy()]
    for prompt in range(num_prompts):
        assert answer.add_prompt() == prompt
        for index in range(n):
            answer.open_one(lambda: None, True)
            answer.take(prompt, SimpleNamespace(index=index, text=f"{prompt}.{index}", scope=None))
    assert answer.opened.is_set()
    return answer


def test_a_whole_answer_has_each_choices_fields_and_its_own():
    async def main():
        response = SimpleNamespace(choices=[SimpleNamespace(index=i) for i in range(4)])
        await answer_of(2, 2).fill(response)
        return response

    response = asyncio.run(main())
    assert [choice.toy for choice in response.choices] == ["0.0", "0.1", "1.0", "1.1"]
    assert response.toys == [(number, 4) for number in range(4)]
    assert not hasattr(response.choices[0], "scope")


def test_a_stream_has_a_faces_fields_where_choices_end():
    async def main():
        answer = answer_of(1, 2)
        found = []
        for index, reason in ((0, None), (1, "stop"), (0, None), (0, "length")):
            choice = {"index": index, "finish_reason": reason}
            found.append(await answer.chunk(f"data: {json.dumps({'choices': [choice]})}\n\n"))
        assert await answer.chunk("data: [DONE]\n\n") == "data: [DONE]\n\n"
        return [json.loads(text.removeprefix("data: ")) for text in found]

    first, one, middle, last = asyncio.run(main())
    assert all("toy" not in chunk["choices"][0] for chunk in (first, middle))
    assert [chunk["choices"][0]["toy"] for chunk in (one, last)] == ["0.1", "0.0"]
    assert [chunk.get("toys") for chunk in (first, one, middle)] == [None] * 3
    assert last["toys"] == [[1, 2], [0, 2]]


def test_a_request_without_words_has_no_options_and_needs_none():
    assert ScopeOptions.parse({"toy": 1}) is None
    with pytest.raises(SpecError, match="options of a scope and no 'scope'"):
        ScopeOptions.parse({"scope_tensors": "handle"})
