"""The figure of features shows each context once, with its largest value."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_scope.saes.max_activating import MaxActivating


def test_of_equal_contexts_the_strongest_is_shown():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from examples.feature_figure import _write_contexts

    table = MaxActivating(1, k=4, before=2, after=2)
    for label, tokens, value in (("a", [7, 8], 5.0), ("b", [7, 8], 3.0), ("c", [7, 9], 4.0)):
        found = np.zeros((1, 1), np.int32), np.full((1, 1), value, np.float32)
        table.add(label, tokens, np.array([1]), *found)
    axes = Figure().add_axes((0, 0, 1, 1))
    _write_contexts(axes, table, [0], {}, str)
    texts = [text.get_text().strip() for text in axes.texts]
    assert [text for text in texts if "." in text] == ["5.0", "4.0"]
