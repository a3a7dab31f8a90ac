"""The features of the example: each country's feature is strongest at the country's name, and the
table is that of the SAE's own encode."""

from __future__ import annotations

import numpy as np
import pytest

from examples.feature_figure import write_features_figure
from examples.features import (
    NUM_DOCUMENTS,
    named_features,
    shares,
    strongest_tokens,
    texts_of_facts,
)
from tests.asking import run
from tests.conftest import TOYWORLD, local_engine
from tests.engine.test_edits import params
from vllm_scope import Read
from vllm_scope.saes.load import load_sae

pytestmark = pytest.mark.long

TEXTS = texts_of_facts(NUM_DOCUMENTS // 4)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strongest")
    options = {
        "saes": {"toy": str(TOYWORLD / "sae")}, "sinks": {"max_activating": {"root": str(folder)}},
    }  # fmt: skip
    with local_engine(
        TOYWORLD, dtype="float32", skip_tokenizer_init=None, additional_config={"scope": options}
    ) as llm:  # fmt: skip
        table, tokenizer = strongest_tokens(llm, folder, TEXTS), llm.get_tokenizer()
        ids = [tokenizer(text).input_ids for text in TEXTS]
        outputs = run(llm, ids, params(Read("resid_post", layer=0, tokens="prompt"), max_tokens=1))
        rows = [output.scope["resid_post", 0][1:] for output in outputs]
        yield table, tokenizer, rows


def test_the_strongest_tokens_of_a_countrys_feature_are_its_name(found):
    table, tokenizer, _ = found
    names = named_features()
    assert len(names) == 40
    share = shares(table, names, lambda token: tokenizer.decode([token]))
    assert sum(one == 1 for one in share.values()) >= 33, share
    assert table.num_full == 0


def test_the_table_is_that_of_the_saes_own_encode(found):
    table, _, rows = found
    sae = load_sae(TOYWORLD / "sae")
    exact = np.concatenate([sae.encode(some).numpy() for some in rows])
    assert table.num_tokens == len(exact)
    assert table.num_documents == len(TEXTS)
    np.testing.assert_allclose(table.num_active, (exact > 0).sum(0), atol=2)
    for feature in range(sae.d_sae):
        best = np.sort(exact[:, feature])[::-1][: table.k]
        got = [one.value for one in table.top(feature)]
        np.testing.assert_allclose(got, best[: len(got)], atol=1e-3)
        # Rounding decides about a value that equals its threshold.
        assert abs(len(got) - int((best > 0).sum())) <= 1


def test_the_figure_is_made(found, tmp_path):
    table, tokenizer, _ = found
    path = tmp_path / "f.png"
    write_features_figure(path, table, named_features(), lambda i: tokenizer.decode([i]))
    assert path.read_bytes().startswith(b"\x89PNG")
