"""Bodies of answers: base64 put into vLLM's JSON, and safetensors files with JSON in them."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import safetensors.torch
import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient

from vllm_scope import ScopeError
from vllm_scope.batch.sparse import SparseRows
from vllm_scope.client.frames import Frame, Frames
from vllm_scope.client.parsing import parse_scope
from vllm_scope.errors import FileError
from vllm_scope.request.media import BINARY
from vllm_scope.results.budget import asking
from vllm_scope.results.column import Column
from vllm_scope.server import encode
from vllm_scope.server.body import BinaryBody, JsonBody, body_for
from vllm_scope.server.limits import Door
from vllm_scope.server.settings import ServerSettings

NUM, SIZE = 300, 512
AT = np.arange(NUM)
ROWS = torch.randn(NUM, SIZE, generator=torch.Generator().manual_seed(3))
#: Large and small rows, of dtypes of 4, 2 and 1 bytes' alignment; and what is no rows.
COLUMNS = [
    Column(("resid_post", 1, "after"), ROWS.bfloat16(), AT, (SIZE,)),
    Column(("resid_post", 1, "before"), ROWS, AT, (SIZE,)),
    Column(("embed", 0, "after"), ROWS[:1, :3].half(), AT[:1], (3,)),
]
SPARSE = Column(
    "f", SparseRows(torch.tensor([[7, -1], [2, 9]]), torch.tensor([[1.5, 0], [2.5, 3]])), AT[:2]
)
LENS = Column(
    "l.5",
    SparseRows(torch.tensor([[7, 1], [2, 9]]), torch.tensor([[-1.5, -2], [-2.5, -3]]), ("l", 5)),
    AT[:2],
)


def scope_of(body, choice=0):
    """As choice.py does."""
    values = lambda column: body.values(choice, column)  # noqa: E731
    told = encode.told([SPARSE, LENS], values=values if body.binary else None)
    return {"rows": encode.rows(COLUMNS, values)} | told


class Host:
    """Answers through the Door, as vLLM's routes make them."""

    def __init__(self):
        self.app = FastAPI()
        settings = ServerSettings.from_environment({"VLLM_SCOPE_WRITE_TIMEOUT_S": "5"})
        self.app.add_middleware(Door, limits={}, settings=settings)
        self.app.get("/whole")(self.whole)
        self.app.get("/stream")(self.stream)
        self.http = TestClient(self.app)

    async def whole(self, status: int = 200, scoped: bool = True, choices: int = 1):
        exchange = asking.get()
        exchange.timed = True
        made = [{"text": 'ü"\\'} for _ in range(choices)]
        if scoped:
            exchange.body.begin()
            for i, choice in enumerate(made):
                choice["scope"] = await asyncio.to_thread(scope_of, exchange.body, i)
        return JSONResponse({"choices": made}, status)

    async def stream(self):
        exchange = asking.get()
        exchange.timed = True
        exchange.body.begin()

        async def events():
            yield ": keep-alive\n\n"
            for text in ("a", "b"):
                told = {"choices": [{"text": text, "scope": scope_of(exchange.body)}]}
                yield f"data: {json.dumps(told)}\n\n"
                yield ": keep-alive\n\n"
            yield 'data: {"choices": []}\n\ndata: [DONE]\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")

    def get(self, path, accept="*/*"):
        return self.http.get(path, headers={"Accept": accept})


@pytest.fixture
def host():
    return Host()


def check(scope, tensors=None):
    """The values are bit for bit those of COLUMNS."""
    data = parse_scope(scope, None, tensors)
    for column in COLUMNS:
        assert torch.equal(data.tensor(*column.label), column.values)
        assert data.positions(*column.label).tolist() == column.positions.tolist()
    assert data.features["f"].indices.tolist() == [7, 9, 2]
    assert data.features["f"].values.tolist() == [1.5, 3.0, 2.5]
    assert data.lens["l"][5].token_ids.tolist() == [[7, 1], [2, 9]]
    assert data.lens["l"][5].log_probs.tolist() == [[-1.5, -2.0], [-2.5, -3.0]]


@pytest.mark.parametrize("choices", [1, 3])
def test_base64_that_goes_around_the_encoder_is_where_it_would_be(host, choices):
    response = host.get(f"/whole?choices={choices}")
    assert response.headers["content-type"] == "application/json"
    expected = [{"text": 'ü"\\', "scope": scope_of(JsonBody())} for _ in range(choices)]
    assert response.json() == {"choices": expected}
    assert int(response.headers["content-length"]) == len(response.content)
    check(response.json()["choices"][-1]["scope"])


def test_base64_is_in_the_event_that_names_it(host):
    response = host.get("/stream")
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
    for event in events[:2]:
        check(json.loads(event)["choices"][0]["scope"])
    assert response.text.count(": keep-alive\n\n") == 3
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("choices", [1, 3])
def test_a_binary_answer_is_a_safetensors_file(host, choices):
    response = host.get(f"/whole?choices={choices}", BINARY)
    assert response.headers["content-type"] == BINARY
    assert int(response.headers["content-length"]) == len(response.content)
    found = safetensors.torch.load(response.content)  # the format's own library
    answer = json.loads(bytes(found.pop("answer").numpy()))
    assert [choice["text"] for choice in answer["choices"]] == ['ü"\\'] * choices
    for i, choice in enumerate(answer["choices"]):
        items = choice["scope"]["rows"]
        for item, column in zip(items, COLUMNS, strict=True):
            assert torch.equal(found[item["tensor"]], column.values)
        assert found[f"choices.{i}.embed.0.positions"].tolist() == [0]
        check(choice["scope"], Frame.parse(response.content).of_choice(i))
    size = int.from_bytes(response.content[:8], "little")
    for name, one in json.loads(response.content[8 : 8 + size]).items():
        assert one["data_offsets"][0] % {"F32": 4, "BF16": 2, "I64": 8}.get(one["dtype"], 1) == 0
        assert (8 + size) % 8 == 0, name


@pytest.mark.parametrize("piece", [1, 7, 1 << 16, 1 << 30])
def test_a_binary_stream_is_a_file_for_each_event_however_it_is_cut(host, piece):
    content = host.get("/stream", BINARY).content
    if piece < 8:  # the last events alone, which are small
        content = content[content.rindex(b'{"answer"', 0, -100) - 8 :]
    frames, found = Frames(), []
    for i in range(0, len(content), piece):
        assert not frames.done
        found += frames.feed(content[i : i + piece])
    assert frames.done
    events = [json.loads(frame.answer) for frame in found]
    assert events[-1] == {"choices": []}
    for frame, event in zip(found[:-1], events[:-1], strict=True):
        check(event["choices"][0]["scope"], frame.of_choice(0))


@pytest.mark.parametrize("accept", ["*/*", BINARY])
def test_an_error_and_an_answer_without_a_scope_stay_json(host, accept):
    for path, status in (("/whole?status=400", 400), ("/whole?scoped=false", 200)):
        response = host.get(path, accept)
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        assert response.json()["choices"][0]["text"] == 'ü"\\'


@pytest.mark.parametrize(
    ("accept", "binary"),
    [
        pytest.param("", False, id="none"),
        pytest.param("*/*", False, id="anything"),
        pytest.param("application/json", False, id="json"),
        pytest.param(BINARY, True, id="alone"),
        pytest.param(f"{BINARY.upper()}; q=0.5", True, id="case-and-weight"),
        pytest.param(f"application/json;q=0.1, {BINARY}", True, id="among-others"),
        pytest.param(f"{BINARY};q=0, */*", False, id="refused"),
        pytest.param(f"{BINARY};q=0.000", False, id="refused-in-full"),
        pytest.param(f"{BINARY}x, ;;q=,,=", False, id="nonsense"),
    ],
)
def test_accept_decides(accept, binary):
    assert body_for(accept).binary is binary


def test_a_header_in_two_lines_is_one_list(host):
    """HTTP allows both forms of a header, and a proxy can change one into the other."""
    lines = [("Accept", "application/json;q=0.5"), ("Accept", BINARY)]
    assert host.http.get("/whole", headers=lines).headers["content-type"] == BINARY


def test_a_tensor_is_not_copied_before_it_is_sent():
    body = BinaryBody()
    body.begin()
    scope = encode.rows(COLUMNS[:1], lambda column: body.values(0, column))
    start = {"type": "http.response.start", "status": 200}
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    assert list(body.messages(start | {"headers": headers})) == []
    sent = list(body.messages({"type": "http.response.body", "body": json.dumps(scope).encode()}))
    assert [one["type"][14:] for one in sent] == ["start", "body", "body", "body"]
    view = np.frombuffer(sent[2]["body"], np.uint8)
    assert view.ctypes.data == COLUMNS[0].values.data_ptr()
    assert [one.get("more_body", False) for one in sent[1:]] == [True, True, False]


@pytest.mark.parametrize("accept", ["*/*", BINARY])
def test_a_response_without_tensors_is_never_collected(accept):
    """A result's file may have gigabytes, and its length is known."""
    body = body_for(accept)
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"2000000")]
    messages = [{"type": "http.response.start", "status": 200, "headers": headers}]
    messages += [{"type": "http.response.body", "body": bytes(1000), "more_body": True}] * 3
    for message in messages:
        assert list(body.messages(message)) == [message]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"\xff" * 64, id="a-header-of-2-to-63"),
        pytest.param((2).to_bytes(8, "little") + b"[]", id="no-object"),
        pytest.param((8).to_bytes(8, "little") + b'{"a": 1}', id="no-tensor"),
        pytest.param((2).to_bytes(8, "little") + b"{x", id="no-json"),
    ],
)
def test_bytes_that_are_no_files_are_an_error(bad):
    with pytest.raises((ScopeError, FileError)):
        Frames().feed(bad)
