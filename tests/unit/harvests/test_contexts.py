"""Every token that is kept is in one context, in its document's order."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope.harvests.contexts import contexts_of, prefetched
from vllm_scope.harvests.documents import Document

LENGTHS = st.lists(st.integers(0, 25), max_size=30)


def documents_of(lengths):
    numbers = iter(range(10_000))
    return [Document(f"d{i}", [next(numbers) for _ in range(n)]) for i, n in enumerate(lengths)]


def encode(texts):
    return [list(text.encode()) for text in texts]


@given(LENGTHS, st.integers(1, 12), st.sampled_from(["truncate", "split", "pack"]))
def test_contexts_hold_every_token_once(lengths, size, long):
    documents = documents_of(lengths)
    found = list(contexts_of(documents, encode, size, long, None))
    whole = {}
    for context in found:
        at = 0
        for span in context.spans:
            of_document = whole.setdefault(span.document, [])
            assert span.first == len(of_document)
            of_document += context.token_ids[at : at + span.num_tokens]
            at += span.num_tokens
        assert 0 < at == len(context.token_ids) <= size
    kept = slice(size) if long == "truncate" else slice(None)
    assert whole == {d.id: d.content[kept] for d in documents if d.content}
    assert len({context.key for context in found}) == len(found)
    assert len({context.name for context in found}) == len(found)
    if long == "pack":
        assert all(len(context.token_ids) == size for context in found[:-1])
    else:
        assert all(len(context.spans) == 1 for context in found)


def test_a_packed_text_ends_with_the_end_of_text_and_token_ids_stay_as_they_are():
    documents = [Document("a", "xy"), Document("b", ""), Document("c", [7]), Document("d", "z")]
    (packed,) = contexts_of(documents, encode, 100, "pack", 0)
    assert packed.token_ids == [120, 121, 0, 7, 122, 0]
    assert [(s.document, s.num_tokens) for s in packed.spans] == [("a", 3), ("c", 1), ("d", 2)]
    alone = list(contexts_of(documents, encode, 100, "split", 0))
    assert [context.token_ids for context in alone] == [[120, 121], [7], [122]]


def test_the_name_of_a_later_part_says_where_it_begins():
    found = contexts_of([Document("a", range(5))], encode, 2, "split", None)
    assert [context.name for context in found] == ["a", "a:2", "a:4"]


def test_items_are_made_ahead_but_not_more_than_said():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    ahead = prefetched(items(), 5)
    assert next(ahead) == 0
    time.sleep(0.3)
    assert len(made) <= 8
    assert list(ahead) == list(range(1, 100))


def test_an_error_of_the_items_reaches_the_reader_and_an_end_ends_the_thread():
    def items():
        yield 1
        raise ValueError("broken")

    ahead = prefetched(items(), 5)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="broken"):
        next(ahead)
    early = prefetched(iter(range(10**9)), 5)
    assert next(early) == 0
    early.close()
    deadline = time.monotonic() + 5
    while any(t.name == "vllm-scope-documents" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
