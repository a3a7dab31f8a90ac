"""Layers with taps: the model computes what it did, or what an edit makes of it, and the
arena has the streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vllm_scope import CompatError, ConfigError
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.hooked import install_calls
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.tapped import install_taps
from vllm_scope.graph.tap import op
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import Widths
from vllm_scope.program.operations import OP_ADD, Op, Program, build_program
from vllm_scope.request.arrays import Array
from vllm_scope.request.sites import BRANCH_SITES, Place, Sites, point_of
from vllm_scope.worker.arena import Arena

HIDDEN_SIZE = 4
NUM_LAYERS = 3
EVERYWHERE = tuple(range(2 * NUM_LAYERS + 1))
CPU = torch.device("cpu")


class Norm(nn.Module):
    """As vLLM's: adds the residual where it gets one."""

    def forward(self, x: Tensor, residual: Tensor | None = None):
        if residual is None:
            return x * 0.5
        residual = x + residual
        return residual * 0.5, residual


class Part(nn.Module):
    """An attention or an MLP."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.add = nn.Parameter(torch.full((HIDDEN_SIZE,), number))

    def forward(self, x: Tensor):
        return x * 0.75 + self.add


class SumLayer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.input_norm, self.post_norm = Norm(), Norm()
        self.attn, self.mlp = Part(number + 1.0), Part(-number - 0.5)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_norm(hidden_states)
        else:
            hidden_states, residual = self.input_norm(hidden_states, residual)
        hidden_states = self.attn(hidden_states)
        hidden_states, residual = self.post_norm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    @staticmethod
    def stream(out) -> Tensor:
        return out[0] + out[1]


class TensorLayer(SumLayer):
    def forward(self, positions: Tensor, hidden_states: Tensor):
        residual = hidden_states
        hidden_states = self.input_norm(hidden_states)
        hidden_states = self.attn(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states

    @staticmethod
    def stream(out) -> Tensor:
        return out


class DeadLayer(SumLayer):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        residual = hidden_states
        hidden_states = self.input_norm(hidden_states)
        hidden_states = self.attn(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states, residual

    @staticmethod
    def stream(out) -> Tensor:
        return out[0]


class NamelessLayer(TensorLayer):
    def forward(self, positions: Tensor, x: Tensor):
        return x * 1.5 + self.attn.add


CONVENTIONS = {
    "sum": (SumLayer, Convention.SUM),
    "tensor": (TensorLayer, Convention.TENSOR),
    "dead-residual": (DeadLayer, Convention.DEAD_RESIDUAL),
    "another-name": (NamelessLayer, Convention.TENSOR),
}


def _run(
    layers: list[nn.Module], embedding: Tensor, by_name: bool = True, added: dict | None = None
) -> list[Tensor]:
    """The stream at every boundary, seen by hand.

    Args:
        added: boundary -> what is added to the stream there.
    """
    streams: dict[int, Tensor] = {}

    def see(boundary: int, stream: Tensor, into: Tensor) -> None:
        streams[boundary] = stream.clone()
        if added is not None and boundary in added:
            streams[boundary] += added[boundary]
            into += added[boundary]

    handles = []
    for number, layer in enumerate(layers):

        def middle(module, args, boundary=2 * number + 1):
            see(boundary, sum(args[1:], args[0]), args[0])

        handles.append(layer.post_norm.register_forward_pre_hook(middle))
    arguments = {"positions": torch.arange(len(embedding)), "hidden_states": embedding.clone()}
    if not isinstance(layers[0], TensorLayer):
        arguments["residual"] = None
    see(0, embedding, arguments["hidden_states"])
    for number, layer in enumerate(layers):
        out = layer(**arguments) if by_name else layer(*arguments.values())
        see(2 * number + 2, layer.stream(out), out[0] if isinstance(out, tuple) else out)
        if isinstance(out, tuple):
            arguments["hidden_states"], arguments["residual"] = out
        else:
            arguments["hidden_states"] = out
    for handle in handles:
        handle.remove()
    return [streams[boundary] for boundary in EVERYWHERE]


@pytest.fixture
def tapped():
    """Builds layers with taps at some boundaries."""
    op.register()

    def build(layer_class: type, convention: Convention, boundaries: tuple[int, ...]):
        layers = {i: layer_class(i) for i in range(NUM_LAYERS)}
        arena = Arena(40, torch.float32, CPU)
        arena.slots.fill_(torch.nan)
        sizes = Sites(NUM_LAYERS, HIDDEN_SIZE, "float32", boundaries).row_sizes
        widths = Widths(tuple(4 * size for size in sizes))
        tables = Tables(boundaries, 8, HIDDEN_SIZE, widths, CPU)
        anatomy = Anatomy(layers, NUM_LAYERS, convention, "layers")
        here = install_taps(anatomy, arena.slots, tables)
        return list(layers.values()), arena, tables, here

    return build


def _plan(tables: Tables, program: Program, rows: list[int], slots: list[int]) -> None:
    found = tables.program_id(program, hold=True)
    ids = np.full(len(rows), found, np.int32)
    tables.load_step(np.array(rows), ids, np.zeros_like(ids), np.array(slots))


PLACES = [
    pytest.param(EVERYWHERE, id="everywhere"),
    pytest.param((0,), id="the-embedding"),
    pytest.param((6,), id="the-last-exit"),
    pytest.param((2, 6), id="two-exits"),
    pytest.param((1, 5), id="two-middles"),
]


@pytest.mark.parametrize("boundaries", PLACES)
@pytest.mark.parametrize("by_name", [True, False], ids=["by-name", "by-place"])
@pytest.mark.parametrize("kind", ["sum", "tensor", "dead-residual"])
def test_taps_read_the_stream_and_leave_the_model_as_it_was(kind, by_name, boundaries, tapped):
    layer_class, convention = CONVENTIONS[kind]
    embedding = torch.randn(5, HIDDEN_SIZE)
    streams = _run([layer_class(i) for i in range(NUM_LAYERS)], embedding, by_name)

    layers, arena, tables, here = tapped(layer_class, convention, boundaries)
    assert here == boundaries
    rows, slots = [1, 3], [20, 2]  # of five: the others are not asked for
    _plan(tables, Program.reading(tuple(point_of(b, 0) for b in boundaries)), rows, slots)
    again = _run(layers, embedding, by_name)
    assert all(torch.equal(a, b) for a, b in zip(streams, again, strict=True))

    touched = set()
    for row, slot in zip(rows, slots, strict=True):
        for j, boundary in enumerate(boundaries):
            assert torch.equal(arena.slots[slot + j], streams[boundary][row])
            touched.add(slot + j)
    untouched = sorted(set(range(40)) - touched)
    assert arena.slots[untouched].isnan().all()


@pytest.mark.parametrize("boundaries", PLACES)
@pytest.mark.parametrize("kind", ["sum", "tensor", "dead-residual"])
def test_an_edit_goes_on_through_the_model_as_if_the_stream_had_been_so(kind, boundaries, tapped):
    layer_class, convention = CONVENTIONS[kind]
    embedding, row = torch.randn(5, HIDDEN_SIZE), 3
    vectors = {b: torch.randn(HIDDEN_SIZE) for b in boundaries}
    added = {b: torch.zeros(5, HIDDEN_SIZE) for b in boundaries}
    for boundary, vector in vectors.items():
        added[boundary][row] = vector
    plain = _run([layer_class(i) for i in range(NUM_LAYERS)], embedding)
    streams = _run([layer_class(i) for i in range(NUM_LAYERS)], embedding, added=added)

    layers, arena, tables, _ = tapped(layer_class, convention, boundaries)
    edits = {(b, 0): [Op(OP_ADD, 0, Array.parse(v, ""), 1.0)] for b, v in vectors.items()}
    reads = tuple(point_of(b, 1) for b in boundaries)
    _plan(tables, build_program(reads, edits), [row], [4])
    found = _run(layers, embedding)
    torch.testing.assert_close(found[-1], streams[-1])
    for j, boundary in enumerate(boundaries):
        torch.testing.assert_close(arena.slots[4 + j], streams[boundary][row])
    others = [r for r in range(5) if r != row]
    assert torch.equal(found[-1][others], plain[-1][others])
    assert not torch.allclose(found[-1][row], plain[-1][row])


def test_a_layer_that_nobody_taps_keeps_its_class(tapped):
    layers, *_ = tapped(SumLayer, Convention.SUM, (4,))
    assert [type(layer) is SumLayer for layer in layers] == [True, False, True]
    assert isinstance(layers[1], SumLayer)
    assert all(type(layer.post_norm) is Norm for layer in layers)


def test_a_tap_in_the_middle_is_in_the_norm_and_not_in_the_layer(tapped):
    layers, *_ = tapped(SumLayer, Convention.SUM, (3,))
    assert all(type(layer) is SumLayer for layer in layers)
    assert [type(layer.post_norm) is Norm for layer in layers] == [True, False, True]
    assert all(type(layer.input_norm) is Norm for layer in layers)


def test_taps_add_nothing_to_the_weights(tapped):
    layers, *_ = tapped(SumLayer, Convention.SUM, EVERYWHERE)
    weights = ["attn.add", "mlp.add"]
    assert all(list(layer.state_dict()) == weights for layer in layers)
    assert all([name for name, _ in layer.named_parameters()] == weights for layer in layers)


def test_without_hidden_states_the_embedding_cannot_be_tapped(tapped):
    layer_class, convention = CONVENTIONS["another-name"]
    with pytest.raises(CompatError, match=r"NamelessLayer\.forward has no hidden_states"):
        tapped(layer_class, convention, (0, 2))
    layers, *_, here = tapped(layer_class, convention, (2, 4))
    assert here == (2, 4)
    assert len(layers) == NUM_LAYERS


def test_a_layer_without_a_middle_is_refused_where_one_is_asked_for(tapped):
    layer_class, convention = CONVENTIONS["another-name"]
    words = (
        r"sites has 'resid_mid', .*calls nothing that is attention\. Leave it out of the sites\."
    )
    with pytest.raises(ConfigError, match=words):
        tapped(layer_class, convention, (2, 3))


@pytest.mark.parametrize("edited", [(), (0,), EVERYWHERE], ids=["plain", "embedding", "everywhere"])
@pytest.mark.parametrize("sites", [BRANCH_SITES, ("attn_out",), ("mlp_out",)], ids=str)
def test_attention_and_mlp_outputs_are_read_without_the_edits_of_the_stream(sites, edited, tapped):
    embedding, row = torch.randn(5, HIDDEN_SIZE), 3
    added = {b: torch.zeros(5, HIDDEN_SIZE) for b in edited}
    edits = {}
    for boundary in edited:
        vector = added[boundary][row] = torch.randn(HIDDEN_SIZE)
        edits[boundary, 0] = [Op(OP_ADD, 0, Array.parse(vector, ""), 1.0)]
    plain, expected = [SumLayer(i) for i in range(NUM_LAYERS)], {}
    for number, layer in enumerate(plain):
        for site, part in (("attn_out", layer.attn), ("mlp_out", layer.mlp)):

            def see(module, args, out, stream=(site, number)):
                expected[Place(*stream).boundary] = out.clone()

            part.register_forward_hook(see)
    streams = _run(plain, embedding, added=added)

    reads = tuple(sorted(Place(site, i).boundary for site in sites for i in range(NUM_LAYERS)))
    layers, arena, tables, here = tapped(SumLayer, Convention.SUM, (*edited, *reads))
    assert here == (*edited, *reads)
    _plan(tables, build_program(tuple(point_of(b, 0) for b in reads), edits), [row], [4])
    torch.testing.assert_close(_run(layers, embedding)[-1], streams[-1])
    for j, boundary in enumerate(reads):
        torch.testing.assert_close(arena.slots[4 + j], expected[boundary][row])
    assert arena.slots[4 + len(reads) :].isnan().all()


@pytest.mark.parametrize("kind", ["tensor", "dead-residual"])
def test_the_branches_of_a_layer_that_adds_by_itself_cannot_be_tapped(kind, tapped):
    layer_class, convention = CONVENTIONS[kind]
    for site in BRANCH_SITES:
        words = rf"sites has '{site}', .*: {layer_class.__name__} adds .* Leave it out"
        with pytest.raises(ConfigError, match=words):
            tapped(layer_class, convention, (2, Place(site, 1).boundary))


class ParallelLayer(SumLayer):
    """Attention and MLP side by side: what is left to add is both."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        hidden_states, residual = self.input_norm(hidden_states, residual)
        attn_output = self.attn(hidden_states)
        hidden_states = attn_output + self.mlp(hidden_states)
        return hidden_states, residual


@pytest.mark.parametrize("site", BRANCH_SITES)
def test_the_branches_of_a_parallel_layer_cannot_be_tapped(site, tapped):
    with pytest.raises(ConfigError, match=r"ParallelLayer\.forward has none where one norm"):
        tapped(ParallelLayer, Convention.SUM, (2, Place(site, 1).boundary))
    assert tapped(ParallelLayer, Convention.SUM, (2, 4))[3] == (2, 4)


class SkippingLayer(SumLayer):
    """Leaves out its attention at times."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        if len(positions) > 1:
            hidden_states, residual = self.input_norm(hidden_states, residual)
            hidden_states = self.attn(hidden_states)
        hidden_states, residual = self.post_norm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


class ChoosingLayer(SumLayer):
    """One of two attentions, or none at all, which it does not stand."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        hidden_states, residual = self.input_norm(hidden_states, residual)
        if len(positions) > 1:
            hidden_states = self.linear_attn(hidden_states)
        elif len(positions) == 1:
            hidden_states = self.self_attn(hidden_states)
        else:
            raise ValueError(positions)
        hidden_states, residual = self.post_norm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


@pytest.mark.parametrize("site", BRANCH_SITES)
def test_the_branches_of_a_layer_that_may_skip_its_attention_cannot_be_tapped(site, tapped):
    place = Place(site, 1).boundary
    with pytest.raises(ConfigError, match=r"SkippingLayer\.forward may leave out its attention"):
        tapped(SkippingLayer, Convention.SUM, (2, place))
    assert tapped(ChoosingLayer, Convention.SUM, (2, place))[3] == (2, place)


class SparseLayer(SumLayer):
    """As vLLM's DeciLM: some layers have no attention."""

    missing = False

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.no_attention = self.missing and number == 1

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None):
        if not self.no_attention:
            hidden_states, residual = self.input_norm(hidden_states, residual)
            hidden_states = self.attn(hidden_states)
        hidden_states, residual = self.post_norm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


def test_the_layers_with_attention_are_tapped_if_others_have_none(tapped, monkeypatch):
    places = (2, Place("attn_out", 0).boundary, Place("attn_out", 1).boundary)
    assert tapped(SparseLayer, Convention.SUM, places)[3] == places
    monkeypatch.setattr(SparseLayer, "missing", True)
    assert tapped(SparseLayer, Convention.SUM, places[:2])[3] == places[:2]
    with pytest.raises(ConfigError, match=r"SparseLayer\.forward calls nothing that is attention"):
        tapped(SparseLayer, Convention.SUM, places)


def test_a_layer_without_the_norm_is_refused_by_its_number(tapped):
    class Bare(SumLayer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            if number == 1:
                del self.post_norm

        forward = SumLayer.forward

    with pytest.raises(ConfigError, match=r"layer 1 \(Bare\) has no post_norm"):
        tapped(Bare, Convention.SUM, (3,))


def test_branches_are_read_before_functions_change_the_stream(tapped):
    embedding, expected = torch.randn(5, HIDDEN_SIZE), {}
    for number, layer in enumerate(plain := [SumLayer(i) for i in range(NUM_LAYERS)]):
        layer.mlp.register_forward_hook(
            lambda module, args, out, number=number: expected.update({number: out.clone()})
        )
    _run(plain, embedding)
    reads = tuple(Place("mlp_out", i).boundary for i in range(NUM_LAYERS))
    layers, arena, tables, _ = tapped(SumLayer, Convention.SUM, (0, 2, *reads))
    calls = []

    def call(number: int, before: bool, hidden: Tensor, residual: Tensor | None) -> None:
        calls.append((number, before))
        if residual is not None and not before:  # as a function that returns what it got
            residual += hidden
            hidden.zero_()

    install_calls(Anatomy(dict(enumerate(layers)), NUM_LAYERS, Convention.SUM, "layers"), call)
    _plan(tables, Program.reading(tuple(point_of(b, 0) for b in reads)), [3], [4])
    _run(layers, embedding)
    assert calls == [(i, before) for i in range(NUM_LAYERS) for before in (True, False)]
    for i in range(NUM_LAYERS):
        torch.testing.assert_close(arena.slots[4 + i], expected[i][3])
