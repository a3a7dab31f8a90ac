"""Features that go to sinks equal those that come back, and SAELens's encode of the rows."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import vllm_scope
from tests import sparse
from tests.asking import run
from tests.clts import write_clt
from tests.conftest import local_engine, preempted_in
from tests.engine.test_edits import params
from tests.engine.test_sparse_features import INDICES, PROMPTS, READ, WIDTH, config
from tests.sparse import ARCHITECTURES, TOLERANCE
from vllm_scope import Features, SpecError
from vllm_scope.files import export_features
from vllm_scope.saes.max_activating_files import load_max_activating

SIZES = {"k": 4, "before": 3, "after": 2}
LAYER = dict(zip(ARCHITECTURES, [0, 1, 2, 0, 1], strict=True))


@pytest.fixture(scope="module")
def saes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saes")
    return {
        name: sparse.write(folder / name, name, WIDTH, layer=layer)
        for name, layer in LAYER.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def llm(llama, saes, root):
    """In chunks of 32 tokens."""
    sinks = {
        "filesystem": {"root": str(root), "codec": "fp16"},
        "max_activating": {"root": str(root / "strongest"), **SIZES},
    }
    with local_engine(
        llama, dtype="float32", max_num_batched_tokens=32, max_num_seqs=8,
        additional_config=config(saes, sinks=sinks),
    ) as llm:  # fmt: skip
        yield llm


def test_features_in_files_are_those_that_come_back(llm, saes, root, tmp_path):
    asked = [
        Features(name, top_k=8, name=f"{name} {to}", to=to)
        for name in ARCHITECTURES
        for to in ("memory", "filesystem")
    ]
    some = Features("jumprelu", indices=INDICES, name="some", to="filesystem", tokens="generated")
    outputs = run(llm, PROMPTS, params(*asked, some, READ))
    capture = {one.manifest.request_id: one for one in vllm_scope.open(root)}
    assert len(capture) == len(PROMPTS)
    for output in outputs:
        result = output.scope
        assert result.status == "complete", (result, result.error)
        manifest = result.manifests["filesystem"]
        assert (manifest.status, manifest.dropped) == ("ok", 0), manifest
        request = capture[output.request_id]
        for name, sae in saes.items():
            here, there = result.features[f"{name} memory"], request.features(f"{name} filesystem")
            for field in ("positions", "indices", "values", "tokens"):
                assert torch.equal(getattr(here, field), getattr(there, field))
            assert (there.num_features, there.asked) == (here.num_features, None)
            rows = result["resid_post", sae.layer]
            sparse.check(there, sae, rows, TOLERANCE[torch.float32], top_k=8)
        found = request.features("some")
        assert (found.num_features, found.asked) == (None, tuple(INDICES))
        with pytest.raises(KeyError, match=r"feature 4 was not read; the read named \[3, 900"):
            found.dense(4)
        first = len(output.prompt_token_ids)
        assert found.tokens.tolist() == list(
            range(first, first + len(output.outputs[0].token_ids) - 1)
        )
        rows = result["resid_post", saes["jumprelu"].layer][first:]
        sparse.check(found, saes["jumprelu"], rows, TOLERANCE[torch.float32], indices=INDICES)
    pytest.importorskip("pyarrow")
    export_features(vllm_scope.open(root), tmp_path / "x.parquet", "gated filesystem")
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "x.parquet")
    values = [one.features("gated filesystem").values for one in vllm_scope.open(root)]
    kept = table.filter(table["index"].is_valid())
    assert torch.equal(torch.tensor(kept["value"].to_pylist()), torch.cat(values))


def test_a_sink_that_does_not_take_an_action_says_what_it_takes(llm):
    probe = vllm_scope.Probe(torch.ones(WIDTH), layer=0, name="p", to="filesystem")
    with pytest.raises(SpecError, match="takes reads and features, not probes"):
        run(llm, PROMPTS[:1], params(probe))


# --- The strongest tokens ---

EVERY = 96


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """SAEs of which all features are delivered."""
    folder = tmp_path_factory.mktemp("small")
    some = {"jumprelu": 0, "topk": 1, "gated": 2}
    return {
        name: sparse.write(folder / name, name, WIDTH, layer=layer, d_sae=EVERY)
        for name, layer in some.items()
    }  # fmt: skip


def check_table(table, sae, outputs, asked="all"):
    """The table is that of the float64 features of all rows that the requests read."""
    exact, jumps, labels, positions, ids = [], [], [], [], {}
    for output in outputs:
        result, label = output.scope, output.request_id
        ids[label] = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        at = result.positions("resid_post", sae.layer)
        first = len(output.prompt_token_ids) if asked == "generated" else 0
        values, jump = sae.encode(result["resid_post", sae.layer][at >= first])
        exact.append(values)
        jumps.append(jump)
        positions += at[at >= first].tolist()
        labels += [label] * len(values)
    exact, jumps = np.concatenate(exact), np.concatenate(jumps)
    assert table.num_tokens == len(exact)
    assert table.num_documents == len(outputs)
    near = TOLERANCE[torch.float32] * max(1.0, exact.max())
    where = {one: i for i, one in enumerate(zip(labels, positions, strict=True))}
    num_checked = 0
    for feature in range(table.num_features):
        own, got = exact[:, feature], table.top(feature)
        unsure = int((jumps[:, feature] <= near).sum())
        assert abs(int(table.num_active[feature]) - int((own > 0).sum())) <= unsure
        assert int(table.histogram(feature)[1].sum()) == table.num_active[feature]
        best = np.sort(own[own > 0])[::-1][: table.k]
        if not unsure:
            assert len(got) == len(best)
            np.testing.assert_allclose([one.value for one in got], best, atol=near)
        assert len({(one.label, one.position) for one in got}) == len(got)
        for one in got:
            assert abs(one.value - own[where[one.label, one.position]]) <= near
            first = one.position - one.at
            assert one.tokens.tolist() == ids[one.label][max(0, one.position - table.before) :][
                : one.at + 1 + table.after
            ]  # fmt: skip
            for i, value in enumerate(one.values.tolist()):
                row = where.get((one.label, first + i))
                assert np.isnan(value) if row is None else abs(value - own[row]) <= near
                num_checked += 1
    assert num_checked > 100, "the test shows nothing"


def read_table(llm, folder, name):
    assert llm.collective_rpc("scope_flush")[0]["max_activating"] is None
    return load_max_activating(folder, name)


def test_tokens_that_were_not_asked_for_are_context_alone(llm, saes, root):
    asked = Features("topk", top_k=32, tokens="generated", to="max_activating")
    outputs = run(llm, PROMPTS, params(asked, READ))
    table = read_table(llm, root / "strongest", "topk")
    check_table(table, saes["topk"], outputs, "generated")
    values = np.concatenate([one.values for i in range(1024) for one in table.top(i)])
    assert np.isnan(values).any()
    assert table.num_full == table.num_tokens


def test_what_the_table_cannot_take_is_said(llm):
    with pytest.raises(SpecError, match=r"reads\[0\].to is 'max_activating', which takes features"):
        run(llm, PROMPTS[:1], params(vllm_scope.Read("resid_post", to="max_activating")))
    edit = vllm_scope.Add([1e30] * WIDTH, layer=0)
    said = r"features\[0\].to is 'max_activating', which takes no results of a request with edits"
    with pytest.raises(SpecError, match=said):
        run(llm, PROMPTS[:1], params(Features("topk", to="max_activating"), edit))
    for name in ("max_activating", "filesystem"):
        with pytest.raises(SpecError, match=rf"lens\[0\].to is '{name}', .* not tokens of a lens"):
            run(llm, PROMPTS[:1], params(vllm_scope.LensTopK(layers=[1], to=name)))
    for chosen in ({"indices": [1, 2]}, {"threshold": 0.1}, {"indices": [1], "threshold": 0.1}):
        asked = Features("topk", **chosen, name="two", to="max_activating")
        with pytest.raises(
            SpecError, match=r"features\[0\].to is .* leave out indices and threshold"
        ):
            run(llm, PROMPTS[:1], params(asked))


# --- Engines of their own: last, because they clean up after the one above ---


def test_the_table_is_that_of_all_rows_also_after_a_preemption(llama, small, tmp_path):
    sinks = {"max_activating": {"root": str(tmp_path), "threads": 2, **SIZES}}
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3, additional_config=config(small, sinks=sinks),
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        ids = [list(range(i, i + 30)) for i in (10, 50, 90, 10)]
        asked = [Features(name, top_k=EVERY, to="max_activating") for name in small]
        outputs = run(llm, ids, params(*asked, READ, max_tokens=60))
        for name, sae in small.items():
            check_table(read_table(llm, tmp_path, name), sae, outputs)
        assert preempted, "the cache was large enough; the test shows nothing"
        assert {o.scope.manifests["max_activating"].status for o in outputs} == {"ok"}
        more = run(llm, ids[:2], params(asked[0], READ, max_tokens=20))
        check_table(read_table(llm, tmp_path, "jumprelu"), small["jumprelu"], outputs + more)


@pytest.mark.long
def test_a_transcoders_features_are_those_of_its_input(llama, tmp_path):
    written = sparse.write(tmp_path / "t", "jumprelu", WIDTH, layer=1)
    hooks = {"hook_name": "blocks.1.hook_resid_mid", "hook_name_out": "blocks.1.hook_mlp_out"}
    body = json.loads((written.path / "cfg.json").read_text())
    body |= {"architecture": "jumprelu_transcoder", "d_out": WIDTH, "metadata": hooks}
    (written.path / "cfg.json").write_text(json.dumps(body))
    # A transcoder's b_dec is of its output.
    encoder = replace(written, weights=written.weights | {"b_dec": np.zeros(WIDTH)})
    clt = write_clt(tmp_path / "clt", 3, WIDTH, 1024, jumps=True)
    asked = (
        Features("t", top_k=8), Features("t", indices=INDICES, name="some"),
        *(Features(f"clt.{layer}", top_k=16) for layer in range(3)),
    )  # fmt: skip
    for sites, is_tapped in ((["resid_mid"], True), (["resid_post"], False)):
        options = config({"t": written, "clt": clt}, sites=sites)
        with local_engine(llama, dtype="float32", additional_config=options) as llm:
            if not is_tapped:
                with pytest.raises(SpecError, match="does not tap 'resid_mid' there"):
                    run(llm, PROMPTS[:1], params(asked[0]))
                continue
            (output,) = run(llm, PROMPTS[:1], params(*asked, vllm_scope.Read("resid_mid")))
            rows, near = output.scope["resid_mid", 1], TOLERANCE[torch.float32]
            sparse.check(output.scope.features["t"], encoder, rows, near, top_k=8)
            sparse.check(output.scope.features["some"], encoder, rows, near, indices=INDICES)
            for layer in range(3):
                rows = output.scope["resid_mid", layer].double()
                best = torch.from_numpy(clt.encode(layer, rows.numpy())).topk(16).values
                values = output.scope.features[f"clt.{layer}"].values
                assert (best > 0).all()
                torch.testing.assert_close(values.view(-1, 16).double(), best, rtol=1e-4, atol=1e-4)
