"""Gates with states, in CUDA graphs."""

from __future__ import annotations

import pytest

from tests.engine.test_states import check_values
from tests.gpu.test_edits import llm  # noqa: F401

pytestmark = pytest.mark.gpu


def test_values_follow_from_the_embeddings_of_the_generated_tokens(llm):  # noqa: F811
    for _ in range(2):  # the second time with tables that others have used
        check_values(llm)
