"""Bodies that are far too large are refused at the cost of counting them.

The measure is `json.loads` of the same text, which a server pays for any body.
"""

from __future__ import annotations

import base64
import json
import time

import numpy as np
import pytest

from tests.collector import collector_off
from vllm_scope.compat.bounds import MOST, Room, parsed
from vllm_scope.compat.steering_http import keys as steering
from vllm_scope.compat.steering_http.tiers import Wanted
from vllm_scope.compat.vllm_lens import keys as lens
from vllm_scope.compat.vllm_lens.steering import SteeringVector
from vllm_scope.compat.vllm_lens.wire import deserialize_tensor
from vllm_scope.errors import SpecError
from vllm_scope.request.sites import Sites

LAYERS, HIDDEN = 32, 4096
SITES = Sites(LAYERS, HIDDEN, "bfloat16", tuple(range(2 * LAYERS + 1)))
SIZE = 4 << 20
#: Seconds of CPU. To refuse an object takes 0.3 ms, on a busy machine more.
QUICK = 0.05


@pytest.fixture(autouse=True)
def _collector_off():
    with collector_off():
        yield


def many(item, size=SIZE):
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def fields(value, size=SIZE):
    return "{" + ",".join(f'"{i}":{value}' for i in range(size // (len(value) + 10))) + "}"


def base64_of(num_bytes):
    return "A" * (4 * -(-num_bytes // 3))


def vector(**given):
    some = {"activations": "[[1]]", "layer_indices": "[1]"} | given
    return "[{" + ",".join(f'"{name}":{value}' for name, value in some.items()) + "}]"


def wire(shape, data="", dtype="float32", **more):
    rest = "".join(f',"{name}":"{value}"' for name, value in more.items())
    return f'{{"dtype":"{dtype}","shape":{shape},"data":"{data}"{rest}}}'


#: The largest number that Python parses. Python prints no number with more digits.
NINES = "9" * 4300
ROW = "[" + ",".join("1" * HIDDEN) + "]"
#: What stands where vectors are expected: (key, JSON).
LENS = {
    "layers": ("output_residual_stream", many("1")),
    "layers-as-fields": ("output_residual_stream", fields("1")),
    "layers-of-queries": ("output_qk", many("1")),
    "numbers": ("apply_steering_vectors", many("1")),
    "objects": ("apply_steering_vectors", many("{}")),
    "an-object": ("apply_steering_vectors", fields("1")),
    "vectors": ("apply_steering_vectors", "[" + ",".join([vector()[1:-1]] * 100_000) + "]"),
    "rows": ("apply_steering_vectors", vector(activations=many("[1]"))),
    "rows-and-layers": (
        "apply_steering_vectors",
        vector(activations=many("[1]", SIZE // 2), layer_indices=many("1", SIZE // 4)),
    ),
    "a-long-row": ("apply_steering_vectors", vector(activations=f"[{many('1')}]")),
    "a-long-row-behind-good-ones": (
        "apply_steering_vectors",
        vector(activations=f"[{ROW},{many('1')}]", layer_indices="[1,2]"),
    ),
    "a-list-among-numbers": (
        "apply_steering_vectors", vector(activations=f"[{ROW[:-2]}{many('1')}]]"),
    ),
    "positions-of-a-row": ("apply_steering_vectors", vector(activations=f"[{many(ROW)}]")),
    "fields-of-a-vector": ("apply_steering_vectors", f"[{fields('1')}]"),
    "fields-of-activations": ("apply_steering_vectors", vector(activations=fields("1"))),
    "bytes": (
        "apply_steering_vectors",
        vector(activations=wire(f"[1,{HIDDEN}]", base64_of(SIZE * 3 // 4))),
    ),
    "a-shape": ("apply_steering_vectors", vector(activations=wire(many("1")))),
    "layer-indices": ("apply_steering_vectors", vector(layer_indices=many("1"))),
    "position-indices": ("apply_steering_vectors", vector(position_indices=many("1"))),
    "position-indices-of-many": (
        "apply_steering_vectors",
        json.dumps([
            {"activations": [[1] * HIDDEN], "layer_indices": [1],
             "position_indices": list(range(60_000))}
        ] * 8),
    ),
    "three-dimensions": (
        "apply_steering_vectors",
        vector(activations=wire(f"[1,512,{HIDDEN}]", base64_of(512 * HIDDEN), "int8")),
    ),
    "hooks": ("apply_hooks", many("1")),
}  # fmt: skip


def at(layers):
    return f'{{"post_block":{layers}}}'


def clamp(entry):
    return at(f'{{"1":[{entry}]}}')


def capture(hooks, more=""):
    return f'{{"filesystem":{{"hooks":{{"post_block":{hooks}}}{more}}}}}'


def gate(packed, scope='"this_token"'):
    source = f'{{"kind":"inline","packed":{packed}}}'
    when = f'{{"kind":"probe","probe":{source},"threshold":0}}'
    return f'[{{"when":{when},"scope":{scope},"apply":{{"kind":"add","steer":{source}}}}}]'


PACKED = wire("[1,4096]", base64_of(4 * HIDDEN))[1:-1] + ',"layer_indices":[1]'
FORK = {
    "layers": ("steering_vectors", at(fields("[1]"))),
    "hooks": ("steering_vectors", fields("1")),
    "a-long-vector": ("steering_vectors", at(f'{{"1":{many("1")}}}')),
    "a-nested-vector": ("decode_steering_vectors", at(f'{{"1":{many("[1]")}}}')),
    "a-list-among-numbers": ("steering_vectors", at(f'{{"1":{ROW[:-2]}{many("1")}]}}')),
    "fields-of-an-entry": ("steering_vectors", at(f'{{"1":{fields("1")}}}')),
    "fields-of-a-vector": ("steering_vectors", at(f'{{"1":{{"vector":{fields("1")}}}}}')),
    "packed-fields": ("steering_vectors", at(f"{{{PACKED},{fields('1')[1:]}")),
    "packed-layers": ("steering_vectors", at(f'{{{PACKED[:-3]}{many("1")}}}')),
    "packed-scales": ("steering_vectors", at(f'{{{PACKED},"scales":{many("1")}}}')),
    "packed-shape": ("steering_vectors", at(wire(many("1"))[:-1] + ',"layer_indices":[1]}')),
    "packed-rows": (
        "steering_vectors", at(wire("[256,4096]", base64_of(SIZE))[:-1] + ',"layer_indices":[]}'),
    ),
    "packed-bytes": ("steering_vectors", at(wire("[1,4096]", base64_of(SIZE * 3 // 4)))),
    "clamps": ("steering_clamps", clamp(many('{"vector":[1],"max":1}')[1:-1])),
    "clamps-that-are-none": ("steering_clamps", clamp(many("1")[1:-1])),
    "layers-of-clamps": ("steering_clamps", at(fields("[]"))),
    "fields-of-a-clamp": ("steering_clamps", clamp(fields("1"))),
    "a-long-direction": ("prefill_steering_clamps", clamp(f'{{"max":1,"vector":{many("1")}}}')),
    "packed-clamps": (
        "steering_clamps", at(wire("[300,4096]", base64_of(1200 << 12), "float32")),
    ),
    "consumers": ("capture", fields('{"hooks":{"post_block":[1]}}')),
    "hooks-of-a-capture": ("capture", f'{{"filesystem":{{"hooks":{fields("1")}}}}}'),
    "fields-of-a-capture": ("capture", f'{{"filesystem":{fields("1")}}}'),
    "layers-of-a-capture": ("capture", capture(many("1"))),
    "ranges-of-a-capture": ("capture", capture(f'{{"ranges":{many("[0,9999]", 30_000)}}}')),
    "a-range-from-afar": ("capture", capture('{"ranges":[[-9000000,1]]}')),
    "positions-of-a-capture": ("capture", capture("[1]", f',"positions":{many("1")}')),
    "a-module": ("steering_module_ref", many("1")),
    "gates": ("steering", many("{}")),
    "fields-of-a-gate": ("steering", f"[{fields('1')}]"),
    "a-scope": ("steering", gate("{}", many("1"))),
    "hooks-of-a-probe": ("steering", gate(fields("1"))),
    "layers-of-a-probe": ("steering", gate(at(fields("[1]")))),
    "a-long-probe": ("steering", gate(at(f'{{"1":{many("1")}}}'))),
    "bytes-of-a-probe": ("steering", gate(at(wire("[1,4096]", base64_of(SIZE * 3 // 4))))),
}  # fmt: skip


def refused(face, key, value):
    """Seconds of CPU that a refusal takes, and its sentence."""
    begun = time.thread_time()
    with pytest.raises(SpecError) as caught:
        face.translate({key: value}, SITES)
    return time.thread_time() - begun, str(caught.value)


@pytest.mark.parametrize(
    ("face", "case"),
    [
        *(pytest.param(lens, one, id=f"lens-{name}") for name, one in LENS.items()),
        *(pytest.param(steering, one, id=f"fork-{name}") for name, one in FORK.items()),
    ],
)
def test_a_body_that_is_too_large_is_refused_at_the_cost_of_counting_it(face, case):
    key, text = case
    begun = time.thread_time()
    body = json.loads(text)
    unit = time.thread_time() - begun
    for value, most in ((body, QUICK + unit / 4), (text, 2 * unit + QUICK)):
        took, said = refused(face, key, value)
        assert key in said
        assert len(said) < 500
        assert took < most, f"{took:.3f} s, {unit:.3f} s for its JSON: {said}"


def test_zstd_bombs_are_not_unpacked():
    zstd = pytest.importorskip("backports.zstd")
    data = base64.b64encode(zstd.compress(bytes(4 * 128 * HIDDEN))).decode()
    one = vector(activations=wire(f"[1,128,{HIDDEN}]", data, compression="zstd"))[1:-1]
    took, said = refused(lens, "apply_steering_vectors", f"[{one},{one}]")
    assert "zstd may make at most 64 times as many" in said
    assert took < QUICK


def test_a_body_of_a_set_is_bounded_as_a_request_is():
    for field, text in (("vectors", FORK["layers"][1]), ("clamps", FORK["clamps"][1])):
        body = json.loads(text)
        begun = time.thread_time()
        with pytest.raises(SpecError, match=r"layers; at most 32|edits; at most 256"):
            Wanted.parse({field: body}, SITES)
        assert time.thread_time() - begun < QUICK


def test_a_request_has_256_edits_whichever_words_bring_them():
    three = SteeringVector(np.ones((1, 200, HIDDEN), np.float32), [1])
    one = SteeringVector(np.ones((1, HIDDEN), np.float32), [1])
    assert (
        len(lens.translate({"apply_steering_vectors": [three, *[one] * 56]}, SITES).actions) == 256
    )
    with pytest.raises(SpecError, match=r"\[57\] brings the request to 257 edits; at most 256"):
        lens.translate({"apply_steering_vectors": [three, *[one] * 57]}, SITES)
    clamps = [{"vector": np.ones(HIDDEN), "max": 1.0}] * 128
    said = {"steering_clamps": {"post_block": {1: clamps}}}
    said["decode_steering_clamps"] = {"post_block": {1: clamps}}
    assert len(steering.translate(said, SITES).actions) == 256
    said["steering_vectors"] = {"post_block": {1: np.ones(HIDDEN)}}
    with pytest.raises(SpecError, match="brings the request to 257 edits"):
        steering.translate(said, SITES)


def test_vectors_that_fit_the_model_pass_in_every_form():
    row = [0.5] * HIDDEN
    layers = {str(i): row for i in range(LAYERS)}
    data = base64.b64encode(np.full((LAYERS, HIDDEN), 0.5, "<f4").tobytes()).decode()
    packed = {"dtype": "float32", "shape": [LAYERS, HIDDEN], "data": data,
              "layer_indices": list(range(LAYERS))}  # fmt: skip
    one = base64.b64encode(bytes(4 * HIDDEN)).decode()
    single = {"dtype": "float32", "shape": [HIDDEN], "data": one}
    hooks = {"pre_attn": layers, "post_attn": packed, "post_block": {"3": {"vector": single}}}
    adds = steering.translate({"steering_vectors": json.dumps(hooks)}, SITES).actions
    assert [len(add.layers) for add in adds] == [LAYERS, LAYERS, 1]
    assert np.array_equal(adds[0].vector.numpy, adds[1].vector.numpy)
    body = {"activations": [row] * LAYERS, "layer_indices": list(range(LAYERS))}
    (add,) = lens.translate({"apply_steering_vectors": json.dumps([body])}, SITES).actions
    assert np.array_equal(add.vector.numpy, adds[0].vector.numpy)
    whole = {"hooks": {"post_block": {"ranges": [[0, LAYERS - 1]]}}, "positions": [1, 2]}
    (read,) = steering.translate({"capture": {"filesystem": whole}}, SITES).actions
    assert read.layers == tuple(range(LAYERS))


@pytest.mark.parametrize(
    ("translate", "given"),
    [
        pytest.param(
            steering.translate,
            {"steering_clamps": {"post_block": json.loads(wire(f"[{NINES},{NINES},{HIDDEN}]"))}},
            id="clamps",
        ),
        pytest.param(
            lens.translate,
            {"apply_steering_vectors": vector(activations=wire(f"[1,{NINES},{HIDDEN}]"))},
            id="vectors",
        ),
        pytest.param(
            lens.translate,
            {"apply_steering_vectors": [SteeringVector(np.ones((1, HIDDEN)), [1]),
                json.loads(vector(activations=wire(f"[1,{NINES},{HIDDEN}]")))[0]]},
            id="vectors-after-another",
        ),
    ],
)  # fmt: skip
def test_a_number_that_python_cannot_print_is_refused(translate, given):
    with pytest.raises(SpecError, match=r"edits; at most 256|at most 63 bits"):
        translate(given, SITES)


def test_a_tensor_with_more_bytes_than_python_can_print_is_refused():
    with pytest.raises(SpecError, match="at most 63 bits"):
        deserialize_tensor(json.loads(wire(f"[{NINES},{NINES}]")), 1 << 20)


def test_room_is_counted_over_a_whole_request():
    room = Room()
    room.take("positions", MOST["positions"] - 1, "a")
    room.take("positions", 1, "b")
    with pytest.raises(SpecError, match="c brings the request to 65,537 positions; at most 65,536"):
        room.take("positions", 1, "c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("[1", "word is not JSON", id="no-json"),
        pytest.param("[" * 9000, "word is not JSON", id="deep"),
        pytest.param('"[1]"', "JSON string in a JSON string", id="twice"),
        pytest.param("[" * 20_000, "20,000 lists, objects and fields", id="deeper"),
        pytest.param("," * 2_000_000, "2,000,000 items", id="commas"),
    ],
)
def test_texts_that_are_not_json_are_refused(text, words):
    with pytest.raises(SpecError, match=words):
        parsed(text, "word")
    assert parsed([1], "word") == [1]
    assert parsed('{"a": [1]}', "word") == {"a": [1]}
