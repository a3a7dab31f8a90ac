"""What a text is counted as before it is parsed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope import SpecError
from vllm_scope.request import bounded_json
from vllm_scope.request.bounded_json import decode, decode_counted

_VALUES = st.recursive(
    st.integers(-9, 9) | st.text("a,:[{é字😀", max_size=4),
    lambda some: st.lists(some, max_size=4) | st.dictionaries(st.text("b:é"), some, max_size=4),
)


@given(_VALUES, st.booleans())
def test_a_text_is_parsed_up_to_its_number_of_nodes_and_items(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    num_nodes = sum(map(text.count, "[{:"))
    assert decode_counted(text, "it") == (value, text.count(","))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "MOST_NODES", num_nodes)
        assert decode(text, "it", text.count(",") - num_nodes) == value
        with pytest.raises(SpecError, match="items; at most"):
            decode(text, "it", text.count(",") - num_nodes - 1)
        patch.setattr(bounded_json, "MOST_NODES", num_nodes - 1)
        with pytest.raises(SpecError, match="lists, objects and fields; at most"):
            decode(text, "it")


@pytest.mark.parametrize("text", ['"\ud800"', '["a\udfff', "[1,"])
def test_other_texts_are_refused(text):
    with pytest.raises(SpecError, match="it is not JSON"):
        decode(text, "it")
