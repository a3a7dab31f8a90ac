"""The sink of strongest tokens: what it counts, what it writes, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_scope.errors import ConfigError
from vllm_scope.saes.max_activating_files import load_max_activating
from vllm_scope.sinks import Block, Ending, RequestInfo, max_activating
from vllm_scope.sinks.max_activating import MaxActivatingOptions, MaxActivatingSink
from vllm_scope.sinks.options import parse_sinks

INDICES = torch.tensor([[1, 0], [2, -1]], dtype=torch.int32)


def sink_of(root, **options):
    return MaxActivatingSink(MaxActivatingOptions.parse({"root": str(root), **options}))


def info(key, **more):
    return RequestInfo(key, f"r{key}", f"u{key}", (5, 6), **more)


def block(request, values, name="toy", sae="toy", num_features=3):
    place = "resid_post", 0
    return Block(request, *place, np.arange(2), values, name, INDICES, sae, num_features)


def ending(request, status="ok"):
    return Ending(request, (7,), "stop", 2, 2, status, None)


def test_each_request_counts_once_and_one_that_failed_does_not(tmp_path):
    sink = sink_of(tmp_path, k=4)
    values = torch.tensor([[2.0, 1.0], [3.0, 0]])
    for key in (0, 1):
        sink.write(block(info(key), values + key * torch.tensor([[1.0, 1], [1, 0]])))
        sink.write(block(info(key), values * 100, name="again"))
        assert sink.finish(ending(info(key))).details == {"toy": 2 * key + 2}
    sink.write(block(info(2), values * 1000))
    assert sink.finish(ending(info(2), "error")) is None
    child = info(3, child=1)
    rows = values + 10
    sink.write(block(child, rows))
    rows.fill_(torch.nan)  # the memory is used again
    sink.finish(ending(child))
    assert list(tmp_path.glob("*.safetensors")) == []
    sink.flush()
    table = load_max_activating(tmp_path)
    assert (table.sae, table.num_documents, table.num_tokens) == ("toy", 3, 6)
    assert [(one.value, one.label) for one in table.top(1)] == [
        (12, "r3.1"), (3, "r1"), (2, "r0"),
    ]  # fmt: skip
    (best, *_) = table.top(2)
    assert (best.tokens.tolist(), best.position, best.at) == ([5, 6, 7], 1, 1)
    sink.close()
    other = sink_of(tmp_path, k=4)
    other.write(block(info(9), values))
    other.finish(ending(info(9)))
    other.flush()
    assert load_max_activating(tmp_path, "toy").num_documents == 4


def test_features_that_were_chosen_are_refused(tmp_path):
    sink = sink_of(tmp_path)
    with pytest.raises(ConfigError, match="'some' are not all features of an SAE; the sink"):
        sink.write(block(info(0), torch.ones(2, 2), name="some", sae=None))


def test_a_request_with_too_many_places_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(max_activating, "MAX_PLACES", 8)
    sink, values = sink_of(tmp_path), torch.ones(2, 2)
    for sae in ("a", "b", "b"):
        sink.write(block(info(0), values, sae=sae))
    with pytest.raises(ConfigError, match=r"take 12 places \(tokens x top_k\); .* takes 8 at most"):
        sink.write(block(info(0), values, sae="c"))
    sink.write(block(info(1), values, sae="c"))


def test_the_memory_of_all_tables_has_a_limit(tmp_path):
    sink = sink_of(tmp_path, tables_mib=1)
    sink.write(block(info(0), torch.ones(2, 2), num_features=170))
    sentence = r"tables_mib is 1; with the SAE 'b' the tables take 1\.1 MiB\. Raise tables_mib"
    with pytest.raises(ConfigError, match=sentence):
        sink.write(block(info(0), torch.ones(2, 2), sae="b", num_features=30))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, r"sinks.max_activating: root is missing; it must be given\."),
        ({"root": "x", "k": 0}, r"sinks.max_activating: k is 0; it must be at least 1\."),
        (
            {"root": "x", "kk": 1},
            r"kk is no option; did you mean k\? The options are root, k, before, after",
        ),
    ],
)
def test_a_wrong_option_is_said_at_start(options, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        parse_sinks({"max_activating": options}, "sinks", False)


def test_a_global_sink_of_this_name_is_refused():
    body = {"max_activating": {"root": "x", "reads": [{"site": "resid_post"}]}}
    with pytest.raises(ConfigError, match="this sink takes features, and a global sink gets reads"):
        parse_sinks(body, "global_sinks", True)
