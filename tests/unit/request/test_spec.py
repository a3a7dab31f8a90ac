"""What a caller may ask for, and the sentence that answers what may not be asked."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
import weakref

import numpy as np
import pytest
from hypothesis import given

from tests.unit.programs import all_programs
from tests.unit.strategies import sentence, specs
from vllm_scope import (
    Ablate,
    Add,
    Except,
    Probe,
    Read,
    Replace,
    Spec,
    SpecError,
    TokenIds,
    Union,
    scope,
)
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.request import spec
from vllm_scope.request.arrays import Array
from vllm_scope.request.packed import Packed
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.resolved import ResolvedRead
from vllm_scope.request.selectors import MAX_ITEMS, Positions, Span, Word
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import MAX_READS, MAX_SPEC_BYTES, Meanings

#: A tap at every boundary of four layers.
EVERYWHERE = tuple(range(9))
SITES_OF_A_FULL_ENGINE = Sites(4, 8, "float32", EVERYWHERE)


def _nested(depth: int) -> object:
    form: object = "all"
    for _ in range(depth):
        form = {"union": [form]}
    return form


def _spec(**read: object) -> str:
    return json.dumps({"reads": [{"site": "resid_post", **read}]})


@pytest.mark.parametrize(
    ("arguments", "came", "allowed"),
    [
        pytest.param({"site": "attention"}, "'attention'", "resid_post", id="unknown-site"),
        pytest.param({"site": "logits"}, "'logits'", "Sites are embed", id="no-site"),
        pytest.param({"site": "pattern"}, "'pattern'", "follow from q and k", id="a-pattern"),
        pytest.param({"site": 7}, "7", "a site is a string", id="site-is-a-number"),
        pytest.param({"site": None}, "None", "a site is a string", id="site-is-none"),
        pytest.param({"layers": -1}, "-1", "site='embed'", id="layer-minus-one"),
        pytest.param({"layers": [1, -3]}, "-3", "count from 0", id="layer-minus-three"),
        pytest.param({"layers": True}, "True", "list of layer numbers", id="layers-is-a-bool"),
        pytest.param({"layers": [True]}, "True", "whole numbers from 0", id="a-bool-layer"),
        pytest.param({"layers": 1.5}, "1.5", "list of layer numbers", id="layers-is-a-float"),
        pytest.param({"layers": [2.0]}, "2.0", "whole numbers from 0", id="a-float-layer"),
        pytest.param({"layers": "3"}, "'3'", "'all'", id="layers-is-a-string"),
        pytest.param({"layers": b"3"}, "b'3'", "'all'", id="layers-is-bytes"),
        pytest.param({"layers": ["3"]}, "'3'", "whole numbers from 0", id="a-string-layer"),
        pytest.param({"layers": {1: 2}}, "{1: 2}", "'all'", id="layers-is-a-dict"),
        pytest.param({"layers": []}, "empty", "at least one layer", id="no-layers"),
        pytest.param({"layers": range(0)}, "empty", "at least one layer", id="an-empty-range"),
        pytest.param(
            {"site": "embed", "layers": [1]}, "[1]", "has no layers", id="embed-at-layer-1"
        ),
        pytest.param(
            {"site": "embed", "layers": False}, "False", "has no layers", id="embed-at-a-bool"
        ),
        pytest.param(
            {"site": "embed", "layers": [0.0]}, "[0.0]", "has no layers", id="embed-at-a-float"
        ),
        pytest.param({"tokens": "first"}, "'first'", "last_prompt", id="unknown-word"),
        pytest.param({"tokens": 1.5}, "1.5", "list of positions", id="tokens-is-a-float"),
        pytest.param({"tokens": None}, "None", "list of positions", id="tokens-is-none"),
        pytest.param({"tokens": True}, "True", "list of positions", id="tokens-is-a-bool"),
        pytest.param({"tokens": []}, "empty", "use 'all'", id="no-positions"),
        pytest.param({"tokens": [0, 1.5]}, "1.5", "whole numbers", id="a-float-position"),
        pytest.param({"tokens": [True]}, "True", "whole numbers", id="a-bool-position"),
        pytest.param({"tokens": ["0"]}, "'0'", "whole numbers", id="a-string-position"),
        pytest.param(
            {"tokens": range(MAX_ITEMS + 1)}, "65,537 items", "at most 65,536", id="many-positions"
        ),
        pytest.param({"tokens": slice(0, 9, 0)}, "step 0", "1 or more", id="slice-step-0"),
        pytest.param({"tokens": slice(0, 9, -1)}, "step -1", "1 or more", id="slice-backwards"),
        pytest.param({"tokens": slice(0.5, 9)}, "0.5", "whole numbers", id="slice-of-a-float"),
        pytest.param(
            {"tokens": {"slice": [0, 9]}}, "[0, 9]", "[start, stop, step]", id="slice-of-two"
        ),
        pytest.param({"tokens": {"slice": 9}}, "9", "[start, stop, step]", id="slice-of-a-number"),
        pytest.param({"tokens": {"token_ids": []}}, "empty", "at least one", id="no-token-ids"),
        pytest.param({"tokens": {"token_ids": ["a"]}}, "'a'", "whole numbers", id="a-word-as-id"),
        pytest.param(
            {"tokens": {"token_ids": [-1]}}, "-1", "must not be negative", id="a-negative-id"
        ),
        pytest.param({"tokens": {"token_ids": 5}}, "5", "TokenIds(...)", id="ids-not-a-list"),
        pytest.param({"tokens": {"union": []}}, "empty", "at least one", id="an-empty-union"),
        pytest.param({"tokens": {"except": ["all"]}}, "['all']", "Except(..., ...)", id="except-1"),
        pytest.param({"tokens": {"xor": ["all"]}}, "'xor'", "Union(...)", id="unknown-operator"),
        pytest.param({"tokens": {}}, "{}", "Union(...)", id="an-empty-object"),
        pytest.param({"tokens": _nested(20)}, "nested", "8 deep", id="nested-too-deep"),
    ],
)
def test_a_read_that_cannot_be_names_what_came_and_what_is_allowed(arguments, came, allowed):
    text = sentence(lambda: Read(**({"site": "resid_post"} | arguments)))
    assert came in text
    assert allowed in text


@pytest.mark.parametrize(
    ("text", "came", "allowed"),
    [
        pytest.param(None, "NoneType", "vllm_scope.scope(...)", id="none"),
        pytest.param({"reads": []}, "dict", "JSON string", id="not-yet-json"),
        pytest.param(b"{}", "bytes", "JSON string", id="bytes"),
        pytest.param(
            "a" * (MAX_SPEC_BYTES + 1), "8,388,609 characters", "at most 8,388,608",
            id="too-long",
        ),
        pytest.param("resid_post", "not JSON", "invalid character", id="not-json"),
        pytest.param("[" * 10_000, "not JSON", "recursion", id="a-tower-of-brackets"),
        pytest.param("[" * 100_000, "100,000 lists", "at most 16,384", id="many-brackets"),
        pytest.param("[" + "1," * 300_000 + "1]", "300,000 items", "at most 262,144", id="items"),
        pytest.param('{"reads": "\ud800"}', "not JSON", "surrogates", id="half-a-character"),
        pytest.param("[]", "the spec is []", "features, lens, moments, policy", id="a-list"),
        pytest.param("{}", "nothing", "at least one Read", id="no-fields"),
        pytest.param(
            '{"reads": [], "adds": []}', "the spec has 'adds'", "features, lens, moments, policy",
            id="an-unknown-field",
        ),
        pytest.param('{"read": []}', "the spec has 'read'", "reads, probes", id="a-wrong-field"),
        pytest.param('{"reads": 1}', "reads is 1", "a list", id="reads-is-a-number"),
        pytest.param('{"reads": []}', "nothing", "at least one Read", id="no-reads"),
        pytest.param('{"reads": [7]}', "reads[0] is 7", "an object", id="a-read-is-a-number"),
        pytest.param('{"reads": [{}]}', "reads[0] has no 'site'", "resid_post", id="no-site"),
        pytest.param(
            _spec(layer=1), "'layer'", "site, tag, to, tokens, when", id="a-misspelt-field"
        ),
        pytest.param(_spec(layers=[float("nan")]), "not JSON", "invalid", id="a-nan-layer"),
        pytest.param(_spec(layers=list(range(5000))), "5,000 layers", "at most 4,096", id="layers"),
        pytest.param(_spec(tokens=_nested(9)), "nested", "8 deep", id="nested-nine-deep"),
        pytest.param(
            json.dumps({"reads": [{"site": "embed"}] * (MAX_READS + 1)}),
            "33 reads", "at most 32", id="too-many-reads",
        ),
    ],
)  # fmt: skip
def test_a_spec_that_is_no_spec_names_what_came_and_what_is_allowed(text, came, allowed):
    said = sentence(lambda: Spec.from_json(text))
    assert came in said
    assert allowed in said


@pytest.mark.parametrize(
    ("read", "path"),
    [
        pytest.param({"site": "attention"}, "reads[1].site", id="site"),
        pytest.param({"layers": [-1]}, "reads[1].layers", id="layers"),
        pytest.param({"tokens": "first"}, "reads[1].tokens", id="word"),
        pytest.param({"tokens": [1.5]}, "reads[1].tokens", id="positions"),
        pytest.param({"tokens": {"slice": [0, 1, 0]}}, "reads[1].tokens", id="slice"),
        pytest.param({"tokens": {"union": ["all", "x"]}}, "reads[1].tokens.union", id="in-a-union"),
        pytest.param({"tokens": {"token_ids": ["x"]}}, "reads[1].tokens", id="token-ids"),
        pytest.param({"tokens": {"token_ids": [-1]}}, "reads[1].tokens", id="negative-token-id"),
        pytest.param({"tokens": {"union": []}}, "reads[1].tokens", id="empty-union"),
    ],
)
def test_an_error_in_json_names_the_path_that_was_written(read, path):
    text = json.dumps({"reads": [{"site": "embed"}, {"site": "resid_post", **read}]})
    assert sentence(lambda: Spec.from_json(text)).startswith(path)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(json.dumps({"reads": "x" * 1_000_000}), id="reads"),
        pytest.param(_spec(tokens="x" * 1_000_000), id="tokens"),
        pytest.param(_spec(layers="x" * 1_000_000), id="layers"),
        pytest.param(_spec(**{"x" * 1_000_000: 1}), id="field"),
    ],
)
def test_a_sentence_stays_a_sentence_when_a_megabyte_came(text):
    assert len(sentence(lambda: Spec.from_json(text))) < 2000


@pytest.mark.parametrize(
    ("actions", "came", "allowed"),
    [
        pytest.param((), "nothing", "at least one Read", id="nothing"),
        pytest.param(
            ("resid_post",), "argument 0 is 'resid_post'", "Read, Probe, Add", id="a-string"
        ),
        pytest.param((Read("embed"), 3), "argument 1 is 3", "Read, Probe, Add", id="a-number"),
        pytest.param(
            (Read("embed"),) * (MAX_READS + 1), "33 reads", "at most 32", id="too-many-reads"
        ),
    ],
)
def test_scope_refuses_what_is_no_action(actions, came, allowed):
    text = sentence(lambda: scope(*actions))
    assert came in text
    assert allowed in text


@pytest.mark.parametrize(
    ("boundaries", "read", "came", "allowed"),
    [
        pytest.param(
            EVERYWHERE,
            Read("resid_post", layers=[0, 99]),
            "reads[0].layers has 99",
            "layers 0 to 3",
            id="layer-99",
        ),
        pytest.param(
            EVERYWHERE, Read("resid_pre", layer=4), "has 4", "layers 0 to 3", id="one-too-far"
        ),
        pytest.param((0, 4), Read("resid_post", layer=2), "has 2", "'layers'", id="untapped-layer"),
        pytest.param(
            (0, 4), Read("resid_pre", layers=[0, 1]), "has 1", "'layers'", id="untapped-entry"
        ),
        pytest.param(
            (0, 2), Read("resid_mid", layer=0), "'resid_mid'", "'sites'", id="untapped-middle"
        ),
        pytest.param((2, 4), Read("embed"), "'embed'", "'sites'", id="untapped-embedding"),
        pytest.param((0,), Read("resid_post"), "'resid_post'", "does not tap", id="untapped-site"),
    ],
)
def test_a_stream_that_the_engine_lacks_is_refused(boundaries, read, came, allowed):
    sites = Sites(4, 8, "float32", boundaries)
    text = sentence(lambda: Spec((read,)).resolve(sites))
    assert came in text
    assert allowed in text


@pytest.mark.parametrize(
    ("boundaries", "read", "streams"),
    [
        pytest.param(EVERYWHERE, Read("embed"), [("embed", 0)], id="embed"),
        pytest.param(
            EVERYWHERE, Read("resid_post", layers=[3, 1]), [("resid_post", 1), ("resid_post", 3)],
            id="two-layers",
        ),
        pytest.param(
            (0, 4, 8), Read("resid_post"), [("resid_post", 1), ("resid_post", 3)],
            id="all-that-is-tapped",
        ),
        pytest.param(
            (0, 4, 8), Read("resid_pre"), [("resid_pre", 0), ("resid_pre", 2)],
            id="all-entries-that-are-tapped",
        ),
        pytest.param(
            (2, 3, 4, 7), Read("resid_mid"), [("resid_mid", 1), ("resid_mid", 3)],
            id="all-middles-that-are-tapped",
        ),
    ],
)  # fmt: skip
def test_a_read_becomes_the_streams_of_this_engine(boundaries, read, streams):
    (resolved,) = Spec((read,)).resolve(Sites(4, 8, "float32", boundaries)).reads
    assert resolved == ResolvedRead(tuple(streams), read.tokens, "after")


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        pytest.param("pre_attn", "resid_pre", id="pre_attn"),
        pytest.param("post_attn", "resid_mid", id="post_attn"),
        pytest.param("post_block", "resid_post", id="post_block"),
    ],
)
def test_an_alias_is_the_site_it_names(alias, name):
    assert Read(alias, layers=[1]) == Read(name, layers=[1])
    assert Spec.from_json(_spec().replace("resid_post", alias)).reads == (Read(name),)


@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        pytest.param([5, 2, 5, 2], (2, 5), id="duplicates"),
        pytest.param(3, (3,), id="one-number"),
        pytest.param(range(2, 5), (2, 3, 4), id="range"),
        pytest.param({4, 1}, (1, 4), id="set"),
        pytest.param((layer for layer in (1, 0)), (0, 1), id="generator"),
        pytest.param("all", "all", id="all"),
        pytest.param(None, "all", id="none"),
    ],
)
def test_layers_are_kept_sorted_and_once(layers, kept):
    assert Read("resid_post", layers=layers).layers == kept


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        pytest.param("last", Word("last"), id="word"),
        pytest.param(4, Positions((4,)), id="one-number"),
        pytest.param([5, -1, 5], Positions((-1, 5)), id="duplicates"),
        pytest.param(range(2, 4), Positions((2, 3)), id="range"),
        pytest.param(slice(3), Span(None, 3, None), id="slice"),
        pytest.param({"token_ids": [7]}, TokenIds(7), id="token-ids-object"),
        pytest.param({"union": ["all", [1]]}, Union("all", [1]), id="union-object"),
        pytest.param(
            {"except": ["all", {"slice": [0, 1, None]}]}, Except("all", slice(0, 1)),
            id="except-object",
        ),
    ],
)  # fmt: skip
def test_tokens_are_a_selector_in_any_spelling(tokens, kept):
    assert Read("embed", tokens=tokens).tokens == kept


@given(specs(num_layers=4))
def test_a_spec_survives_its_json(spec):
    assert Spec.from_json(spec.to_json()) == spec


def test_a_selector_as_deep_as_allowed_survives_its_json():
    tokens: object = "all"
    for _ in range(4):
        tokens = Except(Union(tokens, "last"), [0])
    spec = Spec((Read("embed", tokens=tokens),))
    assert Spec.from_json(spec.to_json()) == spec


def test_a_selector_that_is_too_deep_is_refused_where_it_is_written():
    # "A Spec that exists is well formed": what scope() takes, the engine takes.
    tokens: object = "all"
    try:
        for _ in range(12):
            tokens = Union(tokens, "last")
        spec = Spec((Read("embed", tokens=tokens),))
    except SpecError:
        return
    assert Spec.from_json(spec.to_json()) == spec


def test_scope_puts_all_reads_into_one_spec_beside_other_arguments():
    first, second = Read("resid_post", layers=[1]), Read("embed", tokens="prompt")
    extra = {"other": 1} | scope(first, second)
    assert set(extra) == {"other", "scope"}
    assert Spec.from_json(extra["scope"]) == Spec((first, second))


@given(specs(num_layers=4, hidden_size=8))
def test_every_action_at_known_layers_resolves_on_a_full_engine(spec):
    resolved = spec.resolve(SITES_OF_A_FULL_ENGINE)
    for read, found in zip(spec.reads, resolved.reads, strict=True):
        layers = range(4) if read.layers == "all" else read.layers
        assert found.streams == tuple((read.site, layer) for layer in layers)
        assert (found.tokens, found.when) == (read.tokens, read.when)
    for probe, found in zip(spec.probes, resolved.probes, strict=True):
        assert [cell.place for cell in found.cells] == [(probe.site, k) for k in probe.layers]
        for i, cell in enumerate(found.cells):
            if isinstance(probe.weight, Array):
                (one,) = cell.net.layers
                row = probe.weight.numpy.reshape(len(found.cells), -1)[i]
                assert (one[0].numpy.tolist(), one[1]) == ([row.tolist()], None)
            else:
                assert cell.net == probe.weight[i].net
        for name in ("name", "bias", "tokens", "activation", "pools", "aggregate", "to"):
            assert getattr(found, name) == getattr(probe, name)
    # One edit for each layer, in the order of the spec.
    expected = [(edit, layer) for edit in spec.edits for layer in edit.layers]
    for (edit, layer), found in zip(expected, resolved.edits, strict=True):
        assert (found.kind, found.stream, found.tokens) == (
            edit.kind, (edit.site, layer), edit.tokens,
        )  # fmt: skip
        values = getattr(edit, edit.fields[0]).numpy
        if values.ndim == (3 if edit.kind == "replace" else 2):
            values = values[edit.layers.index(layer)]
        assert found.values.numpy.tolist() == values.tolist()


def test_importing_vllm_scope_imports_neither_torch_nor_vllm():
    code = (
        "import sys, vllm_scope as v;"
        "read = v.Read('resid_post', layers=[1], tokens=v.Union('last', [0]));"
        "v.scope(read, v.Add([1.0], layer=1));"
        "print([m for m in ('torch', 'vllm', 'transformers', 'zmq') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_specs_that_were_parsed_are_remembered_up_to_so_many_bytes(monkeypatch):
    """And never more than they take: of short texts with long lists, too."""
    monkeypatch.setattr(spec, "_parsed", Remembered(4 << 20))
    texts = [
        scope(Read("embed", tokens=list(range(i, i + 5000))))["scope"] for i in range(60)
    ] + [scope(Add(np.full(4096, i + 1.0), layer=0))["scope"] for i in range(100)]  # fmt: skip
    Spec.from_json(texts[0])  # what the first one loads is no spec's
    tracemalloc.start()
    for text in texts:
        Spec.from_json(text).resolve(Sites(2, 4096, "float32", (0, 2, 4)))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1 << 20 < spec._parsed.num_bytes <= 4 << 20
    assert kept < 4 << 20
    assert spec._parsed.get(texts[0]) is None
    assert Spec.from_json(texts[-1]) is Spec.from_json(texts[-1])


def test_a_text_that_is_too_long_to_look_up_is_not_remembered(monkeypatch):
    monkeypatch.setattr(spec, "_parsed", Remembered(4 << 20))
    text = scope(Add(np.ones((70, 4096)), layers=list(range(70))))["scope"]
    assert len(text) > spec.LONGEST_REMEMBERED
    assert Spec.from_json(text) == Spec.from_json(text)
    assert len(spec._parsed) == 0


def _as_engine_core_gets_it(text: str) -> tuple[Packed, dict[bytes, Array]]:
    one = Spec.from_json(text)
    arrays = {
        digest: Array.known(array.shape, array.data, digest) for digest, array in one.arrays.items()
    }
    return one.packed, arrays


#: Short texts with edits at all layers, and with many positions.
MANY_EDITS = [
    scope(*(Ablate([i + 1.0], layers="all", tokens=[j, i]) for j in range(32)))["scope"]
    for i in range(41)
]
MANY_POSITIONS = [scope(Read("embed", tokens=list(range(i, i + 5000))))["scope"] for i in range(60)]


@pytest.mark.parametrize("texts", [MANY_EDITS, MANY_POSITIONS], ids=["edits", "positions"])
def test_what_specs_mean_and_compile_to_is_remembered_up_to_so_many_bytes(texts, monkeypatch):
    monkeypatch.setattr(spec, "REMEMBERED_BYTES", 4 << 20)
    sites = Sites(32, 1, "float32", tuple(range(65)))
    here, ids = frozenset(sites.boundaries), np.ones(4, np.int64)
    meanings, came = Meanings(sites), [_as_engine_core_gets_it(text) for text in texts]
    for i, each in enumerate(came):
        RequestProgram.compile(meanings.of(*each, {}), sites, here, 4, ids)
        if i == 0:  # what the first one loads is no spec's
            meanings.forget()
            tracemalloc.start()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1 << 20 < meanings.num_bytes <= 4 << 20
    assert kept < 4 << 20


def test_server_wide_edits_that_are_compiled_with_many_requests_are_normalised_once():
    sites = Sites(2, 4096, "float32", (0, 2, 4))
    edits = Spec(edits=(Ablate(np.ones((2, 4096)), layers=[0, 1]),)).resolve(sites).edits
    here, ids = frozenset(sites.boundaries), np.ones(4, np.int64)
    made = []
    for i in range(2):
        asked = Spec((Read("embed", tokens=[i]),)).resolve(sites).joined(edits=edits)
        program = all_programs(RequestProgram.compile(asked, sites, here, 4, ids), 4)[0]
        made.append([op.vector for _, ops in program.taps for op in ops if op.vector is not None])
    assert len(made[0]) == 2
    assert all(one is other for one, other in zip(*made, strict=True))


def test_meanings_with_modules_are_remembered_until_a_name_changes_and_bounded(monkeypatch):
    monkeypatch.setattr(spec, "REMEMBERED_BYTES", 1 << 20)
    meanings = Meanings(Sites(2, 4096, "float32", (0, 2, 4)))
    inline = Add(np.ones((2, 4096), np.float32), layers=[0, 1])
    kept = []
    for i in range(200):
        modules = {"m": {("resid_post", 0): Array.parse(np.full(4096, i + 1.0), "")}}
        came = _as_engine_core_gets_it(scope(Add("m", layer=0, scale=i), inline)["scope"])
        found = meanings.of(*came, modules, i)
        assert meanings.of(*came, modules, i) is found
        assert meanings.of(*came, modules, i + 1) is not found
        assert meanings.num_bytes <= 1 << 20
        kept.append(weakref.ref(found))
    del found
    # Each has 32 kB of its own, 16 kB of the module's, and as much of copies; each came twice.
    assert 3 <= sum(one() is not None for one in kept) <= 8
    meanings.forget()
    assert meanings.num_bytes == 0
    assert not any(one() for one in kept)


def test_meanings_are_remembered_until_one_of_their_vectors_is_dropped():
    meanings = Meanings(Sites(2, 8, "float32", (0, 2, 4)))
    vectors = [np.full(8, i + 1.0, np.float32) for i in range(3)]
    probes = [Probe(vectors[i], layer=0, name="p") for i in (0, 1)]
    edits = [Add(vectors[i], layer=0) for i in (2, 0)]
    came = [_as_engine_core_gets_it(scope(*some)["scope"]) for some in (*zip(probes), *zip(edits))]
    found = [meanings.of(*one, {}) for one in came]
    gone = frozenset(came[0][0].arrays)
    assert gone == frozenset(came[3][0].arrays), "the first probe and the last edit share a vector"
    meanings.forget_arrays(gone)
    stayed = [meanings.of(*one, {}) is each for one, each in zip(came, found, strict=True)]
    assert stayed == [False, True, True, False]


def test_a_spec_of_very_many_vectors_has_no_meaning_that_stays(monkeypatch):
    monkeypatch.setattr(spec, "LARGEST_REMEMBERED", 1 << 20)
    meanings = Meanings(Sites(128, 2048, "float32", tuple(range(257))))
    inline = Add(np.ones((127, 2048), np.float32), layers=list(range(127)))
    one = Spec(edits=(inline,))
    assert len(meanings.of(one.packed, one.arrays, {}).edits) == 127
    assert meanings.num_bytes == 0


def _many_parts(count: int) -> list[Read]:
    """Reads whose selectors have so many parts in all, each of its own slice."""
    slices = [slice(i, None) for i in range(count)]
    return [Read("embed", tokens=Union(*slices[i : i + 36])) for i in range(0, count, 36)]


def test_the_selectors_of_a_request_are_small_together():
    Spec(tuple(_many_parts(288)))
    text = sentence(lambda: Spec(tuple(_many_parts(289))))
    assert "selectors have 289 parts in all; at most 288" in text
    assert "send several requests" in text


def test_each_edit_and_each_read_may_have_positions_of_its_own():
    edits = [Add([1.0], layer=0, tokens=[i]) for i in range(256)]
    reads = [Read("embed", tokens=[i, i + 1]) for i in range(32)]
    probes = [Probe([1.0], layer=0, name=str(i), tokens="prompt") for i in range(256)]
    Spec(tuple(reads), tuple(probes), tuple(edits))


def test_equal_selectors_count_once():
    union = Union(*[slice(i, None) for i in range(64)])
    Spec(edits=tuple(Add([1.0], layer=i, tokens=union) for i in range(256)))


def test_a_vector_for_each_layer_of_a_large_model_and_a_long_replacement_are_let_in():
    layered = Add(np.ones((80, 8192), np.float32), layers=list(range(80)))
    replaced = Replace(np.ones((380, 4096), np.float32), positions=range(380), layer=0)
    for edit in (layered, replaced):
        assert Spec.from_json(scope(edit)["scope"]).edits == (edit,)
