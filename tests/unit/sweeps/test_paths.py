"""Receivers of path patching, and the requests that a cell is then made of."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.sweeps.test_plans import METRIC, Letters
from vllm_scope import Read, Replace, SpecError, Sweep, scope
from vllm_scope.request.selectors import MAX_ITEMS
from vllm_scope.request.sites import Heads, Place, Sites
from vllm_scope.request.spec import MAX_SPEC_BYTES
from vllm_scope.sweeps.paths import MAX_NUMBERS
from vllm_scope.sweeps.plan import Plan
from vllm_scope.sweeps.source import ReadRows

INNER = ("q", "k", "v", "z", "attn_out", "mlp_out", "attn_in", "mlp_in")
SITES = Sites(
    num_layers=3, hidden_size=6, dtype="float32", heads=Heads(2, 1, 3, 3),
    boundaries=(*range(7), *(Place(site, k).boundary for site in INNER for k in range(3))),
)  # fmt: skip


class Rows:
    """Rows that were read: a number of their own for each request, site, layer and position."""

    error, dropped = None, 0

    def __init__(self, job, seed, sites=SITES):
        self.sites = sites
        self.at = {(read.site, layer): list(read.tokens.positions)
                   for read in job.actions if isinstance(read, Read)
                   for layer in read.layer_numbers}  # fmt: skip
        self.random = np.random.default_rng(seed)
        self.rows = {}

    def positions(self, site, layer):
        import torch

        return torch.tensor(self.at[site, layer])

    def __getitem__(self, place):
        import torch

        shape = len(self.at[tuple(place)]), self.sites.row_size(place[0])
        return torch.from_numpy(
            self.rows.setdefault(tuple(place), self.random.normal(size=shape).astype(np.float32))
        )


def planned(**options):
    sweep = Sweep(**{"source": np.ones(6), "metric": METRIC, "mode": "add"} | options)
    return Plan(sweep, ["abcd"], SITES, Letters())


def run(plan, fail=lambda job: None):
    """Every request with its rows, answered in order."""
    found = []
    for job in plan.jobs():
        assert job is not None
        result = Rows(job, len(found)) if job.reads else None
        found.append((job, result))
        error = job.error or fail(job)
        rows = None if result is None else ReadRows(result)
        plan.take(job, None if error else np.array([-1.0, -3.0]), rows, error)
    return found


def test_a_cell_is_its_edit_then_the_streams_then_the_receivers():
    plan = planned(site="z", layers=0, positions=[2], receivers=[("q", 1, 1), ("mlp_out", 2)])
    (_, plain), (first, seen), (second, got), (third, _) = run(plan)
    assert plan.num_cells == 1
    assert not np.isnan(plan.table.values).any()
    edit, read = first.actions
    assert (edit.kind, read.site, read.layers, read.tokens.positions) == (
        "add", "resid_mid", (0,), (2,),
    )  # fmt: skip

    def own(place, at):
        return plain[place].numpy()[[plain.at[place].index(p) for p in at]]

    change = seen["resid_mid", 0].numpy() - own(("resid_mid", 0), [2])
    sets = {(s.site, *s.layers): s for s in second.actions if isinstance(s, Replace)}
    assert set(sets) == {("resid_pre", 1), ("resid_mid", 2)}
    for place, one in sets.items():
        assert one.positions == (2, 3, 4)
        wanted = own(place, [2, 3, 4])
        wanted[0] += change[0]
        np.testing.assert_array_equal(one.values.numpy, wanted)
    sets = {(s.site, *s.layers): s for s in third.actions}
    assert set(sets) == {("q", 1), ("mlp_out", 2)}
    np.testing.assert_array_equal(sets["mlp_out", 2].values.numpy, got["mlp_out", 2].numpy())
    queries = own(("q", 1), [2, 3, 4])  # head 0 is the prompt's own
    queries[:, 3:] = got["q", 1].numpy()[:, 3:]
    np.testing.assert_array_equal(sets["q", 1].values.numpy, queries)


def test_the_logits_need_no_third_request_and_no_other_positions():
    plan = planned(site="mlp_out", layers=[1], positions=[4], receivers="logits")
    (_, plain), (_, seen), (last, _) = run(plan)
    (one,) = last.actions
    assert (one.site, one.layers, one.positions) == ("resid_post", (2,), (4,))
    change = seen["resid_post", 1].numpy() - plain["resid_post", 1].numpy()
    np.testing.assert_array_equal(one.values.numpy, plain["resid_post", 2].numpy() + change)
    assert plan.table.mode == "add to logits"


def test_values_change_what_later_positions_get():
    plan = planned(
        source=np.ones(3), site="v", layers=[1], positions=[3], receivers=[("resid_pre", 2)]
    )
    (_, _), (first, _), (last, _) = run(plan)
    assert first.actions[-1].tokens.positions == (3, 4)
    assert last.actions[0].positions == (3, 4)


@pytest.mark.parametrize(
    ("site", "exit_", "at"),
    [
        pytest.param("attn_in", "resid_mid", (3, 4), id="through-keys-and-values"),
        pytest.param("mlp_in", "resid_post", (3,), id="through-the-mlp"),
    ],
)
def test_what_a_part_gets_leaves_the_layer_behind_that_part(site, exit_, at):
    plan = planned(site=site, layers=[0], positions=[3], receivers="logits")
    (_, plain), (first, seen), (last, _) = run(plan)
    read, (one,) = first.actions[-1], last.actions
    assert (read.site, read.layers, read.tokens.positions) == (exit_, (0,), at)
    assert (one.site, one.layers, one.positions) == ("resid_post", (2,), at)
    assert (exit_, 0) in seen.rows
    assert (exit_, 0) in plain.rows


@pytest.mark.parametrize(
    ("site", "entry", "layers"),
    [
        pytest.param("attn_in", "resid_pre", (0,), id="attention"),
        pytest.param("mlp_in", "resid_mid", (0, 1), id="mlp"),
    ],
)
def test_what_a_part_gets_follows_the_stream_before_that_part(site, entry, layers):
    plan = planned(site="attn_out", positions=[3], receivers=[(site, 1)])
    assert plan.table.layers == layers
    _, _, (second, got), (third, _), *_ = run(plan)
    sets, read = second.actions
    assert (sets.site, sets.layers, sets.positions) == (entry, (1,), (3,))
    assert (read.site, read.layers, read.tokens.positions) == (site, (1,), (3,))
    (one,) = third.actions
    assert (one.site, one.layers, one.positions) == (site, (1,), (3,))
    np.testing.assert_array_equal(one.values.numpy, got[site, 1].numpy())


def test_heads_beside_a_receiver_follow_what_their_attention_gets():
    plan = planned(layers=[0], positions=[3], receivers=[("attn_in", 1), ("q", 1, 0)])
    _, _, (_, got), (third, seen), (fourth, _) = run(plan)
    assert [(one.site, type(one)) for one in third.actions] == [("attn_in", Replace), ("q", Read)]
    sets = {one.site: one.values.numpy for one in fourth.actions}
    np.testing.assert_array_equal(sets["attn_in"], got["attn_in", 1].numpy())
    np.testing.assert_array_equal(sets["q"][:, :3], got["q", 1].numpy()[:, :3])
    np.testing.assert_array_equal(sets["q"][:, 3:], seen["q", 1].numpy()[:, 3:])


def test_layers_without_a_path_are_left_out_or_refused():
    assert planned(site="z", receivers=[("q", 1), ("v", 2)]).table.layers == (0, 1)
    assert planned(site="z", receivers=[("mlp_out", 2)]).table.layers == (0, 1, 2)
    assert planned(site="resid_post", receivers="logits").table.layers == (0, 1, 2)
    with pytest.raises(SpecError, match=r"Sweep.layers has 2; no direct path leads from z of that"):
        planned(site="z", layers=[0, 2], receivers=[("q", 1), ("v", 2)])
    with pytest.raises(SpecError, match="no direct path"):
        planned(site="mlp_out", receivers=[("mlp_out", 0)])


def test_a_receiver_gets_no_rows_that_come_from_behind_it():
    """Of two receivers only the later one is behind the sender."""
    plan = planned(site="z", layers=[1], positions=[4], receivers=[("q", 0), ("q", 2)])
    _, _, _, (last, _) = run(plan)
    assert [(one.site, one.layers) for one in last.actions] == [("q", (2,))]


@pytest.mark.parametrize("mode", ["add", "ablate"])
def test_one_head_of_a_sender_is_edited_along_its_own_numbers(mode):
    plan = planned(
        mode=mode, site="z", heads=[1], layers=[0], positions=[2], receivers="logits",
        source=[1, 2, 3, 4, 5, 6],
    )  # fmt: skip
    _, (first, _), _ = run(plan)
    edit = first.actions[0]
    assert getattr(edit, edit.fields[0]).numpy.reshape(-1).tolist() == [0, 0, 0, 4, 5, 6]
    assert not np.isnan(plan.table.values).any()


def test_a_request_of_a_path_that_fails_leaves_the_other_cells():
    plan = planned(site="z", positions=[-1], receivers=[("q", 2)])

    def fail(job):
        return "too large" if job.place == (1, 0) and job.actions[0].site == "resid_pre" else None

    run(plan, fail)
    assert plan.table.errors == {(0, 1, 0): "too large"}
    assert np.isnan(plan.table.values[0, :, 0]).tolist() == [False, True]


@pytest.mark.parametrize(
    ("site", "receiver", "is_taken"),
    [
        pytest.param("resid_post", "resid_pre", True, id="stream"),
        pytest.param("mlp_out", "q", True, id="mlp-to-attention"),
        pytest.param("mlp_in", "attn_out", True, id="mlp-to-its-output"),
        pytest.param("mlp_out", "mlp_out", False, id="to-mlp"),
        pytest.param("z", "q", False, id="from-attention"),
        pytest.param("attn_in", "resid_pre", False, id="from-what-the-attention-gets"),
    ],
)
def test_without_the_middle_senders_are_no_attention_and_receivers_no_mlp(site, receiver, is_taken):
    boundaries = tuple(b for b in SITES.boundaries if b not in (1, 3, 5))
    asked = Sweep(source=np.ones(6), metric=METRIC, mode="add", site=site, layers=[0],
                  receivers=[(receiver, 2)])  # fmt: skip
    with nullcontext() if is_taken else pytest.raises(SpecError, match="not tap 'resid_mid'"):
        Plan(asked, ["abcd"], replace(SITES, boundaries=boundaries), Letters())


WIDE = Sites(
    num_layers=9, hidden_size=4096, dtype="bfloat16", heads=Heads(32, 8, 128, 128),
    boundaries=(*range(19), *(Place(site, k).boundary for site in ("q", "z") for k in range(9))),
)  # fmt: skip
TO_QUERIES = [("q", layer) for layer in range(1, 9)]


def wide(length, **options):
    asked = {"source": np.ones(4096), "metric": METRIC, "layers": [0], "positions": [0]}
    prompt = {"prompt_token_ids": list(range(length))}
    return Plan(Sweep(**asked | options), [prompt], WIDE, Letters())


@pytest.mark.parametrize(
    ("length", "options"),
    [
        pytest.param(500, {"receivers": TO_QUERIES}, id="several-layers"),
        pytest.param(500, {"receivers": [("z", 1)]}, id="behind-the-attention"),
        pytest.param(500, {"receivers": "logits", "together": True, "positions": "all"}, id="all"),
        pytest.param(43, {"receivers": TO_QUERIES}, id="one-row-too-many"),
    ],
)
def test_a_sweep_whose_cells_are_too_large_is_refused_before_its_first_request(length, options):
    with pytest.raises(
        SpecError,
        match=r"^a cell of prompts\[0\] has .* at most 1,398,101 are allowed, so name receivers of",
    ):
        wide(length, **options)


DEEP = Sites(
    num_layers=300, hidden_size=6, dtype="float32",
    boundaries=(0, *(Place("resid_post", k).boundary for k in range(300))),
)  # fmt: skip


@pytest.mark.parametrize(("count", "is_taken"), [(256, True), (257, False)])
def test_receivers_are_as_many_as_a_request_may_have_edits(count, is_taken):
    receivers = [("resid_post", layer) for layer in range(1, count + 1)]
    asked = Sweep(np.ones(6), metric=METRIC, mode="add", layers=[0], positions=[-1],
                  receivers=receivers)  # fmt: skip
    said = "sets 257 receivers in one request; at most 256 are allowed, so name fewer receivers"
    with nullcontext() if is_taken else pytest.raises(SpecError, match=said):
        Plan(asked, ["ab"], DEEP, Letters())


@pytest.mark.parametrize(
    ("length", "positions", "is_taken"),
    [
        pytest.param(MAX_ITEMS, [0], True, id="all-tokens"),
        pytest.param(MAX_ITEMS + 1, [0], False, id="one-too-many"),
        pytest.param(MAX_ITEMS + 1, [1], True, id="from-the-second-on"),
    ],
)
def test_the_prompts_own_run_is_read_at_as_many_positions_as_a_request_may_name(
    length, positions, is_taken
):
    asked = Sweep(np.ones(6), metric=METRIC, mode="add", site="mlp_out", layers=[1],
                  positions=positions, receivers="logits")  # fmt: skip
    prompts = [{"prompt_token_ids": [1] * n} for n in (2, length)]
    said = r"names 65,537 positions of prompts\[1\]; at most 65,536 are allowed, so name later"
    with nullcontext() if is_taken else pytest.raises(SpecError, match=said):
        for job in Plan(asked, prompts, SITES, Letters()).jobs():
            if job is None or job.place is not None:
                break


@pytest.mark.parametrize(
    ("length", "options"),
    [
        pytest.param(500, {"receivers": [("q", 1, 0), ("q", 1, 1)]}, id="heads-of-one-layer"),
        pytest.param(500, {"receivers": "logits"}, id="logits"),
        pytest.param(500, {"receivers": TO_QUERIES, "positions": [460]}, id="late"),
        pytest.param(42, {"receivers": TO_QUERIES}, id="as-many-rows-as-fit"),
    ],
)
def test_the_requests_of_a_sweep_that_is_taken_fit(length, options):
    plan = wide(length, **options, mode="add")
    sizes = []
    for job in plan.jobs():
        sizes.append(len(scope(*job.actions)["scope"]))
        rows = ReadRows(Rows(job, len(sizes), WIDE)) if job.reads else None
        plan.take(job, np.array([-1.0, -3.0]), rows, None)
    assert not plan.table.errors
    assert max(sizes) <= MAX_SPEC_BYTES
    if length == 42:
        assert max(sizes) > 42 * 8 * 4096 * 16 / 3 > 0.98 * MAX_NUMBERS * 16 / 3


@pytest.mark.parametrize(
    ("receivers", "said"),
    [
        pytest.param("attention", "it must be 'logits', or a list of", id="word"),
        pytest.param([], "it must be 'logits', or a list of", id="none"),
        pytest.param(["q"], r"receivers\[0\] is 'q'; it must be \(site, layer\)", id="text"),
        pytest.param([("q",)], r"it must be \(site, layer\)", id="no-layer"),
        pytest.param([("q", -1)], r"it must be \(site, layer\)", id="negative"),
        pytest.param([("q", True)], r"it must be \(site, layer\)", id="true"),
        pytest.param([("q", 1, 0, 0)], r"it must be \(site, layer\)", id="four"),
        pytest.param([("nowhere", 1)], "sites are", id="site"),
        pytest.param([("embed", 0)], "a receiver must be at one of resid_pre", id="embed"),
        pytest.param([("ln_final", 0)], "a receiver must be at one of resid_pre", id="final"),
        pytest.param([("mlp_out", 1, 0)], "rows of 'mlp_out' have no heads", id="head-of-none"),
        pytest.param([("q", 7)], r"layers 0 to 2\.$", id="layer"),
        pytest.param([("v", 1, 1)], "head 1 of 'v', which has heads 0 to 0", id="head"),
        pytest.param([("mlp_post", 1)], "does not tap 'mlp_post'", id="untapped"),
    ],
)
def test_receivers_that_cannot_be_are_refused(receivers, said):
    with pytest.raises(SpecError, match=said):
        planned(receivers=receivers)
