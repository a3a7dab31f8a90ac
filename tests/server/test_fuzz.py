"""Whatever is sent as a spec or a module: never a 500, and the server goes on."""

from __future__ import annotations

import json
import struct
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from tests.server.conftest import ADMIN_KEY
from vllm_scope import Read
from vllm_scope.request.media import BINARY

FUZZ = settings(max_examples=150, deadline=None)
ADMIN = {"X-Scope-Admin-Key": ADMIN_KEY}
GOOD = '{"reads": [{"site": "resid_post", "layers": [1], "tokens": "last"}]}'

words = st.sampled_from([
    "all", "last", "resid_post", "post_block", "embed", "mlp_out", "../../etc/passwd", "\0",
    "\N{GRINNING FACE}e\N{COMBINING DIAERESIS}", "os.system", "__class__", "{{7*7}}", "",
])  # fmt: skip
numbers = st.one_of(
    st.integers(), st.sampled_from([2**31, 2**63, 2**64, -1, 10**400]), st.floats(), st.booleans()
)
anything = st.recursive(
    st.one_of(st.none(), numbers, words, st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(words | st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=12,
)
arrays = st.one_of(
    anything,
    st.lists(st.floats(-9, 9), min_size=256, max_size=256),
    st.fixed_dictionaries({
        "dtype": st.sampled_from(["float32", "bfloat16", "object", "float64"]),
        "shape": st.lists(st.sampled_from([0, 1, 256, -1, 2**40]), max_size=4),
        "data": st.sampled_from(["", "AAAA", "A" * 1368, "gASVaW1wb3J0IG9z"]),
    }),
    st.just({"module": "missing"}),
)  # fmt: skip
layers = st.one_of(anything, st.lists(st.integers(-1, 7), max_size=3), st.just("all"))
fields = {
    "site": words | anything, "layers": layers, "tokens": anything | st.lists(st.integers(-9, 30)),
    "when": words, "name": words, "bias": numbers, "scale": numbers, "lo": numbers, "hi": numbers,
    "weight": arrays, "vector": arrays, "direction": arrays, "values": arrays, "positions": layers,
    "kind": st.sampled_from(["add", "ablate", "clamp", "replace", "read", "eval"]),
    "after": words | anything, "threshold": numbers,
    "action": st.sampled_from(["flag", "stop", "escalate"]),
}  # fmt: skip
actions = st.fixed_dictionaries({}, optional=fields)
near_read = st.fixed_dictionaries(
    {"site": st.sampled_from(["resid_post", "embed"]), "layers": st.lists(st.integers(0, 5))},
    optional={"tokens": fields["tokens"], "when": words},
)
near_edit = st.fixed_dictionaries(
    {"kind": fields["kind"], "site": st.just("resid_post"), "layers": st.lists(st.integers(0, 5))},
    optional={name: fields[name] for name in ("vector", "direction", "scale", "lo", "hi", "values",
                                              "positions", "tokens")},
)  # fmt: skip
specs = st.one_of(
    anything,
    st.fixed_dictionaries(
        {},
        optional={
            "reads": st.lists(near_read | actions, max_size=3) | anything,
            "probes": st.lists(actions, max_size=3) | anything,
            "edits": st.lists(near_edit | actions, max_size=3) | anything,
            "other": anything,
        },
    ),
)


@pytest.fixture(scope="module")
def http(server):
    with server.http() as found:
        yield found


def ask(http, scope, accept="*/*", **more):
    body = {"model": "toyworld", "prompt": "Hello", "max_tokens": 2} | more
    body |= {"vllm_xargs": {"scope": scope}}
    return http.post("/v1/completions", json=body, headers={"Accept": accept})


def still_serving(http):
    response = ask(http, GOOD)
    assert response.status_code == 200
    assert response.json()["choices"][0]["scope"]["status"] == "complete"


@FUZZ
@given(specs, st.sampled_from(["*/*", BINARY]))
def test_any_spec_is_answered_or_refused(http, spec, accept):
    response = ask(http, json.dumps(spec), accept)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        message = response.json()["error"]["message"]
        assert 5 < len(message) < 1000
    elif accept == BINARY:
        assert load(response.content)["answer"].size


@settings(FUZZ, max_examples=30)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)).map(lambda x: f"{BINARY}{x}"))
def test_any_accept_is_answered(http, accept):
    response = ask(http, GOOD, accept)
    assert response.status_code == 200
    if response.headers["content-type"] == BINARY:
        assert load(response.content)["answer"].size
    else:
        assert response.json()["choices"][0]["scope"]["status"] == "complete"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 100_000, id="deep-list"),
        pytest.param('{"reads":' * 50_000, id="deep-object"),
        pytest.param('{"reads": [{"site": "embed", "tokens": ' + '{"union": [' * 500, id="union"),
        pytest.param('{"probes": [{"bias": 1e999}]}', id="infinity"),
        pytest.param('{"edits": [{"kind": "add", "scale": NaN}]}', id="nan"),
        pytest.param('{"reads": [{"layers": [' + "9" * 5000 + "]}]}", id="a-number-of-5000-digits"),
        pytest.param('{"reads": [' + ",".join(["{}"] * 100_000) + "]}", id="100000-reads"),
        pytest.param(
            '{"reads": [{"site": "embed", "tokens": [' + ",".join(map(str, range(70_000))) + "]}]}",
            id="70000-positions",
        ),
        pytest.param('{"reads": "\\ud800"}', id="half-a-surrogate"),
        pytest.param("\0" * 1000, id="null-bytes"),
        pytest.param("x" * (70 << 20), id="70-megabytes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_extreme_specs_are_refused_with_a_sentence(text, stream, http):
    if stream and len(text) > 1 << 20:
        pytest.skip("once is enough")
    response = ask(http, text, stream=stream)
    assert response.status_code == 400
    assert len(response.json()["error"]["message"]) < 1000


@pytest.mark.parametrize(
    "field", ["scope_ticket", "scope_", "scope_tensors", "scope_stream", "scope_key"]
)
def test_a_field_of_ours_cannot_be_forged(field, http):
    body = {"model": "toyworld", "prompt": "x", "vllm_xargs": {"scope": GOOD, field: "x"}}
    assert http.post("/v1/completions", json=body).status_code == 400


def header(entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def tensor(dtype="F32", shape=(256,), offsets=(0, 1024)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BOMBS = [
    pytest.param(struct.pack("<Q", 2**63) + b"{}", id="a-header-of-2-to-63"),
    pytest.param(header({"resid_post.1": tensor(shape=[2**40], offsets=(0, 2**42))}), id="4-TiB"),
    pytest.param(header({"resid_post.1": tensor(shape=[2**32, 2**32])}), id="overflow"),
    pytest.param(header({"a": tensor(), "b": tensor()}) + bytes(1024), id="overlap"),
    pytest.param(
        header({f"direction.{i}": tensor(shape=[0], offsets=(0, 0)) for i in range(50_000)}),
        id="50000-tensors",
    ),
    pytest.param(header({"__metadata__": {"site": "../x"}, "direction.1": tensor()}) + bytes(1024),
                 id="a-path-as-site"),
    pytest.param(save({"direction.1": np.zeros(256, np.float32)}), id="zeros"),
    pytest.param(save({"direction.99": np.ones(256, np.float32)}), id="layer-99"),
    pytest.param(b"\x80\x04\x95\x1c\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93.", id="a-pickle"),
    pytest.param(b"PK\x03\x04" + bytes(4096), id="a-zip"),
    pytest.param(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63), id="a-gguf"),
]  # fmt: skip


@pytest.mark.parametrize("content", BOMBS)
def test_a_module_that_is_a_bomb_is_refused(content, http):
    response = http.put("/v1/scope/modules/bomb", content=content, headers=ADMIN)
    assert response.status_code == 400, response.text
    assert http.get("/v1/scope/modules").json() == {"modules": []}


@FUZZ
@given(st.binary(max_size=200) | anything.map(lambda x: header({"direction.1": x})))
def test_any_bytes_as_a_module_are_refused(http, content):
    response = http.put("/v1/scope/modules/fuzz", content=content, headers=ADMIN)
    assert response.status_code == 400, response.text


@FUZZ
@given(anything)
def test_any_json_as_edits_is_refused_or_clears_up(http, body):
    response = http.put("/v1/scope/edits", content=json.dumps(body), headers=ADMIN)
    assert response.status_code in (400, 422), response.text


near_monitor = st.fixed_dictionaries(
    {"weight": st.just([0.5] * 256), "layers": st.just([2]), "threshold": st.just(-1e30)},
    optional={
        "after": st.sampled_from(["a", "b", "c"]) | fields["after"], "action": fields["action"],
        "tokens": st.sampled_from(["all", "prompt", "generated", "last", [1]]),
    },
)  # fmt: skip
some_monitors = st.dictionaries(st.sampled_from(["a", "b", "c"]), near_monitor, max_size=3)


@FUZZ
@given(some_monitors | st.dictionaries(words, st.one_of(actions, anything), max_size=3) | anything)
def test_any_monitors_are_set_or_refused_and_requests_go_on(http, monitors):
    body = json.dumps({"monitors": monitors})
    response = http.put("/v1/scope/monitors", content=body, headers=ADMIN)
    try:
        assert response.status_code in (200, 400, 422), response.text
        if response.status_code == 200:
            told = response.json()
            afters = {name: one.get("after") for name, one in monitors.items()}
            assert {name: one.get("after") for name, one in told.items()} == afters
            still_serving(http)
        else:
            assert 5 < len(response.json()["error"]["message"]) < 1000
    finally:
        assert http.put("/v1/scope/monitors", json={"monitors": {}}, headers=ADMIN).json() == {}


def test_a_crafted_pickle_runs_nowhere(http, server, tmp_path):
    import pickle

    mark = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (open, (str(mark), "w"))

    data = pickle.dumps(Payload())
    text = data.decode("latin-1")
    assert http.put("/v1/scope/modules/p", content=data, headers=ADMIN).status_code == 400
    http.put("/v1/scope/edits", content=data, headers=ADMIN)
    ask(http, text)
    for value in ({"dtype": "object", "shape": [1], "data": text}, {"module": text}):
        edit = {"kind": "add", "site": "resid_post", "layers": [1], "vector": value}
        assert ask(http, json.dumps({"edits": [edit]})).status_code == 400
    http.get(f"/v1/scope/results/{quote(text)}")
    assert not mark.exists()
    still_serving(http)


def test_refusals_leave_memory_flat(http, server):
    bad = json.dumps({"reads": [{"site": "resid_post", "layers": [99]}], "x": "y" * 100_000})

    def some(count):
        for _ in range(count):
            assert ask(http, bad).status_code == 400
            assert http.put("/v1/scope/modules/b", content=b"x" * 100_000,
                            headers=ADMIN).status_code == 400  # fmt: skip
        return server.memory()

    before = some(50)
    after = some(150)
    # Half of what was sent, if it stayed.
    assert after - before < 15 << 20


def test_after_all_of_it_the_server_serves(http, server):
    still_serving(http)
    assert server.at_rest()["requests"] == 0
    assert server.process.is_running()
    with server.client() as client:
        assert client.complete("Hello", Read("embed"), max_tokens=2).scope.status == "complete"
    with httpx.Client() as plain:
        assert plain.get(f"{server.url}/health").status_code == 200
