"""Rows of several widths in one token: each comes back as its tap saw it, whatever is
read beside it, raw and encoded, whole programs and tap by tap, in memory and at sinks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.delivered import keep
from tests.unit.oracle import numbers_of
from tests.unit.planned import held
from tests.unit.strategies import selectors
from vllm_scope import Add, Mlp, Probe, Read, Spec, SpecError
from vllm_scope.batch.by_request import by_key, by_layout
from vllm_scope.batch.labels import StepBatch
from vllm_scope.codecs.packed import packing_of
from vllm_scope.engine.worker.canary import rows_at, silent_taps
from vllm_scope.graph.tap.definition import tap_rows
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths, boundaries_of
from vllm_scope.request.heads import Bank, Encoding, Scored
from vllm_scope.request.sites import (
    EDIT_SITES,
    INNER_SITES,
    KINDS,
    MODEL_SITES,
    SITES,
    STREAM_SITES,
    Heads,
    Place,
    Sites,
    kind_of,
    kind_of_point,
    point_of,
)
from vllm_scope.results.buffer import Pending, pieces_of
from vllm_scope.results.result import ScopeResult
from vllm_scope.sinks import RequestInfo
from vllm_scope.sinks.request import Delivery
from vllm_scope.worker.packer import Packer
from vllm_scope.worker.plan import Planner

CPU = torch.device("cpu")
NUM_LAYERS, HIDDEN_SIZE = 2, 6
LAYER_SITES = [site for site in SITES if site not in MODEL_SITES]
EVERYWHERE = tuple(sorted(
    {Place(site, k).boundary for site in LAYER_SITES for k in range(NUM_LAYERS)}
    | {Place("ln_final", 0).boundary}
))  # fmt: skip
MLP_SIZE, NUM_EXPERTS = 8, 5
HEADS = Heads(num_heads=4, num_kv_heads=2, head_size=3, head_size_v=5)
WIDTHS_OF_ROWS = Sites(
    NUM_LAYERS, HIDDEN_SIZE, "float32", EVERYWHERE, HEADS, MLP_SIZE, num_experts=NUM_EXPERTS
).row_sizes
#: Three rows of each request: a step of one prompt, or of three decodes.
TOKENS = 3

points_of_any_kind = st.sets(
    st.sampled_from([point_of(b, 0) for b in EVERYWHERE] + [point_of(2, 1), point_of(2, 2)])
).map(lambda some: tuple(sorted(some)))


sizes = st.integers(1, 70)
kinds = st.integers(0, len(KINDS) - 1)
banks = st.sampled_from([None, Bank, Scored])


@st.composite
def layouts(draw: Any) -> Layout:
    encoded = tuple(
        (bank.of([bytes([kind])], size) if bank else Encoding(f"{kind} {size}", size), points)
        for kind, size, bank in draw(st.sets(st.tuples(kinds, sizes, banks), max_size=5))
        if (points := tuple(p for p in draw(points_of_any_kind) if kind_of_point(p) == kind))
    )  # fmt: skip
    return Layout(draw(points_of_any_kind), encoded)


@settings(max_examples=100, deadline=None)
@given(layouts(), st.lists(sizes, min_size=len(KINDS), max_size=len(KINDS)))
def test_no_two_parts_of_a_token_share_a_slot_and_none_is_spare(layout, row_bytes):
    widths = Widths(tuple(row_bytes))
    for one in (layout, layout.arena, *(layout.at(b) for b in boundaries_of(layout))):
        taken: list[int] = []
        for point, first in one.row_slots(widths).items():
            assert one.slot_of(point, widths) == first
            taken += range(first, first + -(-row_bytes[kind_of_point(point)] // SLOT_BYTES))
        assert len(taken) == one.plain_slots(widths)
        for head, points, first, num_slots in one.encoded_at(widths):
            assert 0 <= num_slots * SLOT_BYTES - head.row_bytes < SLOT_BYTES
            taken += range(first, first + len(points) * num_slots)
        assert sorted(taken) == list(range(one.slots(widths)))


def sites_of(dtype: str) -> Sites:
    return Sites(
        NUM_LAYERS, HIDDEN_SIZE, dtype, EVERYWHERE, HEADS, MLP_SIZE, num_experts=NUM_EXPERTS
    )


def test_a_layer_has_ten_places_beside_the_stream_and_all_are_distinct():
    streams = [(site, layer) for site in INNER_SITES for layer in range(300)]
    places = [Place(*stream).boundary for stream in streams]
    assert len({*places, *range(601)}) == len(places) + 601
    assert [KINDS[kind_of(place)] for place in places] == [site for site, _ in streams]
    # In the order in which they were added.
    assert KINDS[-4:] == ("ln_final", "router_logits", "attn_in", "mlp_in")
    assert {kind_of(Place(site, 299).boundary) for site in STREAM_SITES} == {0}
    sites = sites_of("float32")
    assert {s: sites.row_shape(s) for s in ("embed", *INNER_SITES)} == {
        "embed": (6,), "q": (4, 3), "k": (2, 3), "v": (2, 5), "z": (4, 5),
        "attn_out": (6,), "mlp_out": (6,), "mlp_post": (8,), "router_logits": (5,),
        "attn_in": (6,), "mlp_in": (6,),
    }  # fmt: skip
    assert sites.row_sizes == (6, 12, 6, 10, 20, 6, 6, 8, 6, 5, 6, 6)
    attention = tuple(b for b in EVERYWHERE if kind_of(b) <= KINDS.index("z"))
    assert replace(sites, boundaries=attention).row_sizes == (6, 12, 6, 10, 20)
    # Where no heads are known, none are tapped.
    branches = (2, Place("attn_out", 0).boundary)
    assert Sites(NUM_LAYERS, HIDDEN_SIZE, "float32", branches).row_sizes == (6, 0, 0, 0, 0, 6)
    final = Place("ln_final", 0).boundary
    last = Sites(NUM_LAYERS, HIDDEN_SIZE, "float32", (final,))
    assert last.row_sizes == (6, 0, 0, 0, 0, 6, 6, 0, 6)
    assert Place("q", 1).point("after") == Place("q", 1).point("before") + 1
    assert sites.vector_size == 20


_READS = st.lists(
    st.builds(
        Read,
        st.sampled_from(LAYER_SITES),
        layers=st.sampled_from([[0], [1], [0, 1]]),
        tokens=selectors(),
        codec=st.sampled_from([None, None, "int8", "fp16", {"name": "topk8", "k": 2}]),
    ),
    min_size=1,
    max_size=6,
)
_PROBES = st.lists(
    st.tuples(
        st.sampled_from(LAYER_SITES),
        st.sampled_from([[0], [1], [1, 0]]),
        st.booleans(),
    ),
    max_size=5,
)
_WIDTH_OF = {site: WIDTHS_OF_ROWS[kind_of(Place(site, 0).boundary)] for site in SITES}


@st.composite
def specs(draw: Any) -> Spec:
    """Probes at any site, of rows of any width; those of one layer go to a sink too."""
    probes = []
    for i, (site, layers, is_mlp) in enumerate(draw(_PROBES)):
        width, linear = _WIDTH_OF[site], []
        for layer in layers:
            weight = np.linspace(-1, i + 1, width) + layer
            linear.append(weight)
        mlps = [Mlp([(np.stack([w, -w]), [0.5, i]), ([[1, -2]], [3])], "tanh") for w in linear]
        weights = mlps if is_mlp else np.stack(linear)
        probes.append(Probe(weights, site=site, layers=layers, name=f"p{i}", bias=i / 4))
    if draw(st.booleans()):  # more than taps score at one place
        weights = np.linspace(-2, 2, 5 * HIDDEN_SIZE).reshape(5, HIDDEN_SIZE)
        site, layer = draw(st.sampled_from(["resid_pre", "resid_post"])), draw(st.integers(0, 1))
        probes += [Probe(w, site=site, layer=layer, name=f"q{i}") for i, w in enumerate(weights)]
    reads, known = [], {}
    for read in draw(_READS):  # a stream has one codec
        if all(known.setdefault((read.site, k), read.codec) == read.codec for k in read.layers):
            reads.append(read)
    return Spec(tuple(reads), tuple(probes))


class Step:
    """One prefill step of some requests: taps, packer, and what front-ends and sinks get."""

    def __init__(self, asked: list[Spec], dtype: torch.dtype, seed: int) -> None:
        self.sites = sites_of(str(dtype).removeprefix("torch."))
        self.dtype, self.widths = dtype, Widths(
            tuple(size * dtype.itemsize for size in self.sites.row_sizes)
        )  # fmt: skip
        self.tables = Tables(EVERYWHERE, 64, HIDDEN_SIZE, self.widths, CPU, 0.01, 64, 2048)
        planner = Planner(self.tables)
        self.asked = [spec.resolve(self.sites) for spec in asked]
        ids = np.arange(5, 5 + TOKENS)
        for key, resolved in enumerate(self.asked):
            program = RequestProgram.compile(
                resolved, self.sites, frozenset(EVERYWHERE), TOKENS, ids
            )
            planner.add_request(f"r{key}", key, program, held(program, TOKENS + 1))
        starts = np.arange(len(asked) + 1) * TOKENS
        names = [f"r{key}" for key in range(len(asked))]
        self.plan, failures = planner.begin_step(StepBatch(names, starts, starts[:-1] * 0))
        assert not failures
        torch.manual_seed(seed)
        num_rows = len(asked) * TOKENS
        #: Rows are slices of wider ones, as v is of what the projection gives.
        self.hidden = {
            boundary: torch.randn(num_rows, size + 7).to(dtype)[:, 3 : 3 + size]
            for boundary in EVERYWHERE
            for size in [self.sites.row_sizes[kind_of(boundary)]]
        }
        self.pending = [
            Pending(key, resolved, self.sites, ids.tolist(), 1, 1)
            for key, resolved in enumerate(self.asked)
        ]
        info = RequestInfo(0, "", "", tuple(ids.tolist()))
        #: A sink takes probes of one layer.
        self.at_sinks = [
            Delivery(
                info, replace(one, probes=tuple(p for p in one.probes if len(p.cells) == 1)),
                "memory", self.sites, EVERYWHERE,
            )
            for one in self.asked
        ]  # fmt: skip
        #: By request, (site, layer, probe) -> position -> row, or score.
        self.blocks: list[dict[tuple[str, int, str | None], Any]] = [{} for _ in asked]
        self.packer = Packer(dtype, CPU, self.widths)
        for key, one in enumerate(self.asked):
            self.packer.hold(key, (), one.banks_on_rows())

    def tap(self, boundary: int, arena: torch.Tensor, base: int, per_token: int) -> None:
        tables, tap = self.tables, EVERYWHERE.index(boundary)
        tap_rows(
            self.hidden[boundary], None, arena, tables.tokens, tables.programs, tables.ops,
            tables.vectors, tables.taps[tap], tables.host, base, per_token,
        )  # fmt: skip

    def arena(self, num_slots: int) -> torch.Tensor:
        return torch.full((num_slots, SLOT_BYTES // self.dtype.itemsize), torch.nan).to(self.dtype)

    def run(self, tap_by_tap: bool) -> None:
        plan = self.plan
        if plan is None:
            return
        assert plan.num_slots == sum(
            plan.labels.layouts[i].arena.slots(self.widths) for i in plan.labels.layout_of
        )
        if not tap_by_tap:
            arena = self.arena(plan.num_slots + 5)
            self.tables.load_step(plan.rows, plan.program_ids, plan.owners, plan.offsets + 2)
            for boundary in EVERYWHERE:
                self.tap(boundary, arena, 0, 0)
            assert arena[:2].isnan().all()
            assert arena[-3:].isnan().all()
            self.deliver(arena[2:-3], None)
            return
        numbers = np.cumsum(plan.delivers) - plan.delivers
        self.tables.load_step(plan.rows, plan.program_ids, plan.owners, numbers)
        for boundary in EVERYWHERE:
            here = [layout.arena.at(boundary) for layout in plan.labels.layouts]
            most = max(layout.slots(self.widths) for layout in here)
            if most:
                arena = self.arena(1 + most * len(plan.labels.rows))
                self.tap(boundary, arena, 1, most)
                assert arena[:1].isnan().all()
                self.deliver(arena[1:], boundary)

    def deliver(self, region: torch.Tensor, boundary: int | None) -> None:
        labels = self.plan.labels
        slots = region.view(torch.uint8)
        if labels.encodes:
            slots = torch.full(
                (self.packer.num_slots(labels, boundary), SLOT_BYTES), 7, dtype=torch.uint8
            )
            self.packer.pack(region, labels, boundary, slots)
        for layout, tokens, data in by_layout(
            labels.layouts, labels.layout_of, boundary, self.widths, slots
        ):
            local = layout if boundary is None else layout.at(boundary)
            pieces = pieces_of(layout, local, data, self.widths)
            numbered = np.stack([labels.positions[tokens], tokens])
            for key, some in by_key(labels.keys[tokens]):
                keep(self.pending[key], pieces, numbered, some)
                positions = numbered[0, some]
                arrival = self.at_sinks[key].arrival(local, positions, data[some], self.widths)
                if arrival is not None:
                    for block in self.at_sinks[key].live_blocks(arrival):
                        name = (block.site, block.layer, block.probe)
                        named = self.blocks[key].setdefault(name, {})
                        named |= dict(zip(positions.tolist(), block.rows, strict=True))

    def expected(self, key: int, site: str, layer: int) -> torch.Tensor:
        """[TOKENS, numbers of a row], as its tap saw them; then as its codec leaves them."""
        rows = self.hidden[Place(site, layer).boundary][key * TOKENS :][:TOKENS]
        encoding = next(
            read.encoding for read in self.asked[key].reads if (site, layer) in read.streams
        )
        if encoding is None:
            return rows
        codec = packing_of(encoding).codec
        return codec.decode(codec.encode(rows), TOKENS)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(specs(), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.integers(0, 1 << 20),
)  # fmt: skip
def test_every_row_comes_back_as_its_tap_saw_it(asked, dtype, tap_by_tap, seed):
    step = Step(asked, dtype, seed)
    step.run(tap_by_tap)
    for key, pending in enumerate(step.pending):
        pending.finish(0, None)
        result = pending.snapshot([9], "length")
        assert (result.status, result.dropped) == ("complete", 0)
        for site, layer in result.keys():
            positions = result.positions(site, layer)
            expected = step.expected(key, site, layer)[positions]
            rows = result[site, layer]
            assert rows.shape == (len(positions), *step.sites.row_shape(site))
            assert torch.equal(rows.flatten(1), expected)
            at_sink = step.blocks[key].get((site, layer, None), {})
            for position, row in zip(positions.tolist(), expected, strict=True):
                assert torch.equal(at_sink[position], row)
        check_scores(step, key, result)
        for probe in step.asked[key].probes:
            if len(probe.cells) == 1:
                at_sink = step.blocks[key][*probe.cells[0].place, probe.name]
                assert [at_sink[p] for p in range(TOKENS)] == result.scores[probe.name].tolist()


def check_scores(step: Step, key: int, result: ScopeResult) -> None:
    for probe in step.asked[key].probes:
        rows = [step.hidden[cell.place.boundary][key * TOKENS :][:TOKENS] for cell in probe.cells]
        numbers = [
            numbers_of(cell.net, some.double())
            for cell, some in zip(probe.cells, rows, strict=True)
        ]
        expected = torch.from_numpy(sum(numbers)[:, 0] + probe.bias).float()
        torch.testing.assert_close(result.scores[probe.name], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copies", [1, 5], ids=["scored", "on-rows"])
@pytest.mark.parametrize("tap_by_tap", [False, True])
def test_probes_of_two_sites_that_share_a_row_have_scores_of_their_own(tap_by_tap, copies):
    """The exit of layer 0 is the entry of layer 1."""
    weights = np.linspace(-1, 1, HIDDEN_SIZE), np.linspace(3, 2, HIDDEN_SIZE)
    probes = (
        Probe(weights[0], site="resid_post", layer=0, name="exit"),
        Probe(weights[1], site="resid_pre", layer=1, name="entry"),
        Probe(np.stack(weights), site="resid_post", layers=[1, 0], name="both"),
    )
    for some in (probes, probes[:2]):
        each = (replace(one, name=f"{one.name} {i}") for one in some for i in range(copies))
        step = Step([Spec(probes=tuple(each))] * 2, torch.float32, 0)
        step.run(tap_by_tap)
        for key, pending in enumerate(step.pending):
            pending.finish(0, None)
            result = pending.snapshot([9], "length")
            assert (result.status, result.dropped) == ("complete", 0)
            check_scores(step, key, result)


@pytest.mark.parametrize("deaf", ["q", "v", "z", "resid_post"])
def test_the_canary_names_a_tap_that_wrote_nothing_whatever_its_width(deaf):
    step = Step([Spec((Read("resid_post", layer=0),))], torch.float32, 0)
    silent = Place(deaf, 1).boundary
    num_slots = sum(step.widths.row_slots[kind_of(boundary)] for boundary in EVERYWHERE)
    arena = step.arena(num_slots + 3)

    def forward(plan: Any) -> None:
        plan()
        for boundary in EVERYWHERE:
            if boundary != silent:
                step.tap(boundary, arena, 0, 0)

    found = rows_at(EVERYWHERE, step.tables, arena[3:], 3, False, forward)
    assert silent_taps(found) == [silent]


@pytest.mark.parametrize("site", EDIT_SITES)
def test_an_edit_of_another_width_than_the_rows_of_its_site_is_refused(site):
    width, at = _WIDTH_OF[site], {} if site == "embed" else {"layer": 0}
    edit = Add([1.0] * width, site=site, **at)
    (found,) = Spec(edits=(edit,)).resolve(sites_of("float32")).edits
    assert found.stream == Place(site, 0)
    words = rf"edits\[0\]\.vector has {width + 1} numbers; rows of '{site}' have {width}\."
    with pytest.raises(SpecError, match=words):
        Spec(edits=(Add([1.0] * (width + 1), site=site, **at),)).resolve(sites_of("float32"))


@pytest.mark.parametrize("site", SITES)
def test_a_probe_of_another_width_than_the_rows_of_its_site_is_refused(site):
    width = _WIDTH_OF[site]
    probe = Probe([1.0] * (width + 1), site=site, layer=0, name="p")
    words = rf"probes\[0\]\.weight has {width + 1} numbers; rows of '{site}' have {width}\."
    with pytest.raises(SpecError, match=words):
        Spec(probes=(probe,)).resolve(sites_of("float32"))


def test_a_site_that_is_not_tapped_is_refused_with_the_option_to_set():
    sites = Sites(2, 6, "float32", (0, 2, 4))
    assert sites.row_sizes == (6,)
    for read in (Read("q"), Read("z", layer=1), Read("k", codec="int8")):
        with pytest.raises(SpecError, match=f"'{read.site}'.* additional_config"):
            Spec((read,)).resolve(sites)


def test_what_is_no_site_is_refused_with_where_it_is_and_the_sites():
    with pytest.raises(
        SpecError, match=r"not a site: vLLM itself returns logits.*Sites are.*q, k, v, z"
    ):
        Read("logits")
