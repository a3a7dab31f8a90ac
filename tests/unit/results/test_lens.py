"""Tokens of lenses in a result: by name and layer, as a table, and what is missing of them."""

from __future__ import annotations

import pickle

import pytest
import torch

from vllm_scope import LensTopK, Probe
from vllm_scope.batch.sparse import SparseRows, sparse_rows
from vllm_scope.program.layout import Layout
from vllm_scope.request.heads import Likeliest
from vllm_scope.request.resolved import Cell, ResolvedFeatures
from vllm_scope.request.selectors import Word
from vllm_scope.request.sites import Place
from vllm_scope.results.cursor import Cursor
from vllm_scope.results.lens import LensTokens, TopTokens


def words(ids: list[list[int]], values: list[list[float]]) -> torch.Tensor:
    bits = torch.tensor(ids, dtype=torch.int32).view(torch.float32)
    return torch.cat([bits, torch.tensor(values)], dim=1)


def test_all_log_probabilities_are_kept():
    cell = Cell(Place("resid_post", 1), None, Likeliest.of_lens(3), 0)
    asked = ResolvedFeatures("n.1", Word("all"), (cell,), lens=("n", 0))
    made = words([[7, 0, 5], [1, 2, 3]], [[0.0, -1, -torch.inf], [torch.nan, -2, -3]])
    found = sparse_rows(asked, made)
    assert found.lens == found[torch.tensor([0])].lens == ("n", 1)
    assert found.indices.tolist() == [[7, 0, 5], [1, 2, 3]]
    assert torch.equal(found.values[0], torch.tensor([0, -1, -torch.inf]))
    assert found.values[1, 0].isnan()


@pytest.fixture
def tokens() -> LensTokens:
    def of(ids, positions):
        rows = SparseRows(torch.tensor(ids, dtype=torch.int32), torch.full((2, 3), -1.0))
        return TopTokens.of_rows(rows, torch.tensor(positions))

    return LensTokens({5: of([[3, 1, -1], [2, 9, -1]], [4, 6]), 0: of([[8, 7, -1]] * 2, [4, 5])})


def test_tokens_are_found_by_layer_and_position(tokens):
    assert list(tokens) == [0, 5]
    assert tokens[5].token_ids.tolist() == [[3, 1], [2, 9]]  # the vocabulary has two tokens
    assert tokens[5].top(6) == [(2, -1.0), (9, -1.0)]
    with pytest.raises(KeyError, match="position 5 has no tokens of this lens"):
        tokens[5].top(5)
    with pytest.raises(KeyError, match="not applied at layer 3; it has: 0, 5"):
        tokens[3]
    assert repr(tokens) == "LensTokens(layers 0, 5; 2 positions)"


def test_the_table_shows_the_likeliest_token_of_each_position_and_layer(tokens):
    class Tokenizer:
        def decode(self, ids):
            return f" <{ids[0]}>"

    plain, decoded = tokens._repr_html_(), tokens.decoded(Tokenizer())._repr_html_()
    assert '<th scope="col">position</th><th scope="col">0</th><th scope="col">5</th>' in plain
    # The corner, position 5 at layer 5, position 6 at layer 0.
    assert plain.count("<td></td>") == 3
    assert ">3</td>" in plain
    assert "&#x27; &lt;3&gt;&#x27;</td>" in decoded
    assert "<3>" not in decoded


def test_a_result_has_lenses_beside_features(road):
    pending = road.open(Probe([1.0] * 4, layer=1, name="p"), LensTopK(top_k=2, layers=[0, 1]))
    one, two = (each.cells[0] for each in pending.asked.features)
    assert one.bank == two.bank
    points = tuple(cell.place.point() for cell in (one, two))
    (bank,) = pending.asked.banks
    layout = Layout((), ((bank, points[1:]), (one.bank, points)))
    cursor, seen = Cursor(rows=False), []
    for first, last in ((0, 2), (2, 4)):
        road.send([(pending.key, p, layout, 0) for p in range(first, last)])
        road.settle()
        cursor.look(pending.snapshot([5] * last, None))
        seen += [c for c in cursor.take() if isinstance(c.source, SparseRows)]
    road.finish(pending)
    result = pending.snapshot([5, 6], "stop")
    assert (result.status, result.expected, result.delivered) == ("complete", 12, 12)
    assert (list(result.scores), list(result.features), list(result.lens)) == (["p"], [], ["lens"])
    assert "1 lenses, " in repr(result)
    alone, whole = (pickle.loads(pickle.dumps(one)) for one in (result.lens, result))
    found = result.lens["lens"]
    assert [one.positions.tolist() for one in found.values()] == [[0, 1, 2, 3]] * 2
    assert [one.token_ids.shape for one in found.values()] == [(4, 2)] * 2
    for again in (alone["lens"][1], whole.lens["lens"][1]):
        assert torch.equal(again.token_ids, found[1].token_ids)
    with pytest.raises(KeyError, match="no lens of this request is called 'p'; it has: lens"):
        result.lens["p"]
    told = [(c.source.lens, c.positions.tolist()) for c in seen]
    assert told == [(("lens", k), some) for some in ([0, 1], [2, 3]) for k in (0, 1)]
