"""Path patching equals Hugging Face's model in which hooks hold every other branch at the rows of
the prompt's own run."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import vllm_scope
from tests.conftest import local_engine, long_except
from tests.engine.test_sweeps import texts
from vllm_scope import LogitDifference, SpecError, Sweep

SITES = [
    "embed", "resid_mid", "resid_post", "z", "q", "k", "v", "attn_out", "mlp_out", "attn_in",
    "mlp_in",
]  # fmt: skip
ENGINE = {
    "dtype": "float32", "max_num_seqs": 8, "block_size": 32,
    "additional_config": {"scope": {"sites": SITES}},
}  # fmt: skip
#: Two prompts of different lengths, one of them longer than a block of KV.
CLEAN = [list(range(30, 42)), list(range(200, 240))]
CORRUPTED = [list(range(60, 72)), list(range(300, 340))]
A, B = [5, 6], [50, 60]
METRIC = LogitDifference(A, B)
#: The branch that a site is a part of.
BRANCH = dict.fromkeys(["attn_in", "q", "k", "v", "z"], "attn_out") | {"mlp_in": "mlp_out"}


@pytest.fixture(scope="module")
def llm(llama):
    with local_engine(llama, **ENGINE) as llm:
        yield llm


def set_rows(rows, positions, own=slice(None)):
    def edit(x):
        x = x.clone()
        for p in positions:
            x[p, own] = rows[p, own]
        return x

    return edit


class Paths:
    """Path patching as its papers define it: two runs of a model, and hooks on all of its branches.

    Args:
        ids, source: the prompt that runs, and the one that the sender's rows are from.
    """

    def __init__(self, ref, ids, source):
        self.ref, self.ids = ref, ids
        self.clean, self.source = (ref.edited(one, [])[0] for one in (ids, source))

    def value(self, i, sender, positions, receivers, head=None):
        """The metric of one cell."""
        site, layer = ("resid_pre", 0) if sender[0] == "embed" else sender
        rows = self.source[site, layer]
        edits = [(site, layer, set_rows(rows, positions, self._own(site, head)))]
        branches = {}

        def held(place):
            def edit(x):
                branches[place] = x.clone()
                return self.clean[place]

            return edit

        for place in product(["attn_out", "mlp_out"], range(3)):
            if place != (BRANCH.get(site, site), layer):
                edits.append((*place, held(place)))
        streams, logits = self.ref.edited(self.ids, edits)
        if receivers != "logits":
            found = streams | branches
            logits = self.ref.edited(self.ids, [self._set(found, *one) for one in receivers])[1]
        last = logits[-1].double()
        return float(last[A[i]] - last[B[i]])

    def _set(self, found, site, layer, head=None):
        every = range(len(self.ids))
        return site, layer, set_rows(found[site, layer], every, self._own(site, head))

    def _own(self, site, head):
        size = self.ref.model.config.head_dim
        return slice(None) if head is None else slice(head * size, (head + 1) * size)


@pytest.fixture(scope="module", params=long_except(["noising", "denoising"], "noising"))
def pair(request):
    """(prompts, sources): noising runs the clean prompt, denoising the corrupted one."""
    return (CLEAN, CORRUPTED) if request.param == "noising" else (CORRUPTED, CLEAN)


TO_HEADS = [("q", 2, 1), ("q", 2, 3), ("k", 1), ("z", 2, 0)]


#: What is swept: the site, the receivers, and the options of the sweep.
CASES = {
    "stream-to-logits": ("resid_pre", "logits", {"positions": [3, -1]}),
    "mlp-to-logits": ("mlp_out", "logits", {"positions": [3, -1]}),
    "head-to-logits": ("z", "logits", {"heads": "all", "positions": [-1]}),
    "values-to-later-positions": ("v", "logits", {"positions": [4]}),
    "head-to-heads": ("z", TO_HEADS, {"heads": [0, 2], "positions": [-1, 4]}),
    "keys-to-two-kinds": ("k", [("v", 2), ("mlp_out", 1)], {"positions": [4]}),
    "attention": ("attn_out", [("attn_out", 2)], {"positions": [4]}),
    "embed": ("embed", [("mlp_out", 0), ("mlp_out", 2)], {"positions": [4]}),
    "to-the-stream": ("mlp_out", [("resid_mid", 1)], {"positions": [-2]}),
    "all-positions": ("z", [("q", 2)], {"heads": [1], "together": True}),
    "what-the-attention-gets": ("attn_in", "logits", {"positions": [4]}),
    "what-the-mlp-gets": ("mlp_in", "logits", {"positions": [-1]}),
    "to-the-attention": ("mlp_out", [("attn_in", 1)], {"positions": [4]}),
    "to-the-mlp": ("attn_out", [("mlp_in", 1)], {"positions": [4]}),
    "to-the-attention-and-a-head": (
        "resid_pre",
        [("attn_in", 1), ("q", 1, 0), ("mlp_in", 2)],
        {"positions": [4]},
    ),
}


@pytest.mark.parametrize("case", long_except(CASES, "head-to-heads"))
def test_cells_equal_hooks_that_hold_all_other_branches(case, pair, llm, ref):
    site, receivers, options = CASES[case]
    prompts, sources = pair
    sweep = Sweep(texts(sources), metric=METRIC, site=site, receivers=receivers, **options)
    table = vllm_scope.sweep(llm, texts(prompts), sweep, progress=False)
    assert not table.errors
    assert not np.isnan(table.values).any()
    assert not np.allclose(table.values, table.plain.reshape(-1, *[1] * (table.values.ndim - 1)))
    for i, (ids, source) in enumerate(zip(prompts, sources, strict=True)):
        paths = Paths(ref, ids, source)
        for at in np.ndindex(table.values.shape[1:]):
            positions = range(len(ids))
            if not sweep.together:
                positions = [table.positions[at[1]] % len(ids)]
            head = None if table.heads is None else table.heads[at[-1]]
            sender = (site, table.layers[at[0]])
            wanted = paths.value(i, sender, positions, receivers, head)
            assert table.values[i, *at] == pytest.approx(wanted, abs=3e-6)


def test_only_layers_with_a_path_are_swept(llm):
    asked = {"metric": METRIC, "site": "z", "positions": [-1], "receivers": [("q", 1)]}
    table = vllm_scope.sweep(llm, texts(CLEAN), Sweep(texts(CORRUPTED), **asked), progress=False)
    assert table.layers == (0,)
    with pytest.raises(
        SpecError, match=r"Sweep\.layers has 1; no direct path leads from z of that"
    ):
        vllm_scope.sweep(
            llm, texts(CLEAN), Sweep(texts(CORRUPTED), layers=[0, 1], **asked), progress=False
        )


def test_an_ended_path_sweep_leaves_nothing(llm):
    seen = []

    def stop(cell):
        seen.append(cell)
        if len(seen) == 5:
            raise KeyboardInterrupt

    sweep = Sweep(texts(CORRUPTED), metric=METRIC, site="z", receivers=TO_HEADS)
    with pytest.raises(KeyboardInterrupt):
        vllm_scope.sweep(llm, texts(CLEAN), sweep, progress=False, on_cell=stop)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(seen) == 5
