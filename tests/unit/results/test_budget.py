"""What running requests may hold of a server's memory: who is let in, and who loses its rows."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from tests.unit.programs import runs
from vllm_scope import Add, CapacityError, Probe, Read, Spec, SpecError
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.request.heads import Scored
from vllm_scope.request.sites import Sites
from vllm_scope.results.budget import LABEL_BYTES, Asker, Budget, asking, bytes_of_prompt
from vllm_scope.results.inbox import Inbox
from vllm_scope.transport.messages import RowsMessage

HIDDEN_SIZE = 512
SITES = Sites(4, HIDDEN_SIZE, "float32", tuple(range(9)))
WIDTHS = Widths((4 * HIDDEN_SIZE,))
ROW = 4 * HIDDEN_SIZE
PROBE = Probe([1.0] * HIDDEN_SIZE, layer=1, name="p")


@pytest.fixture
def inbox():
    inbox = Inbox(num_copiers=0)
    yield inbox
    inbox.close()


def opened(inbox, spec, num_prompt, copies=1, owner="mine", **asker):
    """A request of the spec, let in as the front-end does it."""
    whole = spec.resolve(SITES)
    own = whole.going_to("memory")
    token = asking.set(Asker(owner, **asker))
    try:
        ids = list(range(num_prompt))
        return inbox.open(own, SITES, ids, 100, 1, bytes_of_prompt(own, whole, SITES, ids), copies)
    finally:
        asking.reset(token)


def room_for(num_bytes):
    """A budget of which one key may have so much, while there is no other."""
    return Budget(num_bytes * 4 // 3)


def deliver(inbox, pending, spec, num_prompt, first, count):
    """One message: what a worker sends of `count` tokens. A word is its place in the token."""
    ids = np.arange(num_prompt)
    everywhere = frozenset(SITES.boundaries)
    program = RequestProgram.compile(spec.resolve(SITES), SITES, everywhere, num_prompt, ids)
    for offset, length, one in runs(program, first, count):
        positions = first + offset + np.arange(length)
        words = torch.arange(4.0 * one.layout.slots(WIDTHS)).repeat(length)
        slots = words.view(torch.uint8).view(-1, SLOT_BYTES)
        inbox._on_rows(RowsMessage(
            np.full(length, pending.key), positions, np.zeros(length, np.int64), [one.layout],
            None, WIDTHS, slots,
        ))  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "num_bytes"),
    [
        (Spec((Read("resid_post"),)), 10 * 4 * (ROW + LABEL_BYTES)),
        (Spec((Read("resid_post", layers=[0], tokens="last_prompt"),)), ROW + LABEL_BYTES),
        (Spec((Read("resid_post", layers=[0], tokens="generated"),)), 0),
        (
            Spec((Read("resid_post", layers=[0]), Read("resid_post", layers=[0], tokens=[1, 2]))),
            10 * (ROW + LABEL_BYTES),
        ),
        (
            Spec((Read("resid_post", layers=[0]), Read("resid_pre", layers=[1]))),
            10 * (ROW + LABEL_BYTES),
        ),
        (
            Spec((Read("resid_post", layers=[0]), Read("resid_post", layers=[0], when="before"))),
            10 * (ROW + LABEL_BYTES),
        ),
        (
            Spec(
                (Read("resid_post", layers=[0]), Read("resid_post", layers=[0], when="before")),
                (),
                (Add([1.0] * HIDDEN_SIZE, layer=0),),
            ),
            10 * (2 * ROW + LABEL_BYTES),
        ),
        (Spec((), (PROBE,)), 10 * (4 + LABEL_BYTES)),
        (Spec((Read("resid_post", to="files"),), (PROBE,)), 10 * (4 + LABEL_BYTES)),
        (Spec((), (), (Add([1.0] * HIDDEN_SIZE, layer=0),)), 0),
    ],
    ids=[
        "all",
        "one token",
        "generated",
        "overlapping",
        "twins",
        "both sides",
        "both sides edited",
        "probe",
        "rows elsewhere",
        "edit",
    ],
)
def test_a_prompt_takes_the_bytes_that_it_delivers(spec, num_bytes, inbox):
    inbox.budget = Budget(1 << 30)
    pending = opened(inbox, spec, 10)
    assert inbox.budget.num_bytes == num_bytes
    deliver(inbox, pending, spec, 10, 0, 10)
    assert inbox.budget.num_bytes == num_bytes, "what was promised is not counted again"
    pending.finish(0, None)
    assert pending.snapshot([5], "length").status == "complete"
    inbox.forget(pending)
    assert inbox.budget.num_bytes == 0


def test_rows_that_are_kept_after_their_request_count_until_they_go(inbox):
    assert inbox.hold(1 << 40) is None, "there is no limit offline"
    inbox.budget = room_for(100)
    share = inbox.hold(60)
    assert inbox.budget.num_bytes == 60
    with pytest.raises(CapacityError):
        inbox.hold(60)
    del share
    gc.collect()
    assert inbox.budget.num_bytes == 0


def test_prompts_enter_while_there_is_room_and_keep_it(inbox):
    spec = Spec((Read("resid_post", layers=[0]),))
    inbox.budget = room_for(12 * 100 * (ROW + LABEL_BYTES))
    running = [opened(inbox, spec, 100) for _ in range(12)]
    sentence = r"three times the free part .*send the request again later"
    with pytest.raises(CapacityError, match=sentence):
        opened(inbox, spec, 1)
    edit = opened(inbox, Spec((), (), (Add([1.0] * HIDDEN_SIZE, layer=0),)), 100)
    assert edit.error is None
    for pending in running:
        deliver(inbox, pending, spec, 100, 0, 100)
        pending.finish(0, None)
        assert pending.snapshot([5], "length").status == "complete"
    held = inbox.budget.num_bytes
    del running[0], pending
    gc.collect()
    assert inbox.budget.num_bytes == held * 11 // 12, "who is gone has given back"
    opened(inbox, spec, 100)


def test_a_prompt_that_can_never_fit_is_refused_as_such(inbox):
    inbox.budget = room_for(1 << 20)
    spec = Spec((Read("resid_post", layers=[0]),))
    with pytest.raises(SpecError, match=r"delivers 2\.0 MiB.*most 1\.0 MiB.*VLLM_SCOPE_ROWS_MIB"):
        opened(inbox, spec, 1000)
    with pytest.raises(SpecError, match=r"of all its completions"):
        opened(inbox, spec, 100, copies=8)
    assert inbox.budget.num_bytes == 0
    opened(inbox, spec, 100, copies=4)


def test_of_completions_that_enter_one_by_one_a_refusal_names_the_bytes_of_one(inbox):
    """2.0 MiB of 1,000 tokens, and four times as much of all completions."""
    inbox.budget = room_for(9 << 20)
    spec = Spec((Read("resid_post", layers=[0]),))
    running = [opened(inbox, spec, 1000, copies=4) for _ in range(4)]
    with pytest.raises(CapacityError, match=r"delivers 2\.0 MiB .*requests hold 7\.9 MiB"):
        opened(inbox, spec, 1000, copies=4)
    assert len(running) == 4


def test_a_request_that_delivers_more_than_there_is_room_for_loses_only_its_own_rows(inbox):
    spec = Spec((Read("embed"),))
    inbox.budget = Budget(10 * (ROW + LABEL_BYTES))
    greedy, modest = (opened(inbox, spec, 1, owner=owner) for owner in ("greedy", "modest"))
    for position in range(12):
        deliver(inbox, greedy, spec, 1, position, 1)
        if position < 3:
            deliver(inbox, modest, spec, 1, position, 1)
    for pending in (greedy, modest):
        pending.finish(0, None)
    lost, kept = greedy.snapshot([0] * 12, "length"), modest.snapshot([0] * 3, "length")
    assert (lost.status, lost.delivered) == ("failed", 0)
    assert "have all rows that one key may have on this server" in lost.error
    assert "the rows of this request were dropped" in lost.error
    assert (kept.status, kept.delivered) == ("complete", 3)
    assert inbox.budget.num_bytes == 3 * (ROW + LABEL_BYTES)


def test_rows_and_scores_of_other_destinations_are_not_kept(inbox):
    """They come along: a worker reads a row once, for all. A bank is kept whole."""
    elsewhere = [Probe([2.0] * HIDDEN_SIZE, layer=k, name=f"q{k}", to="plugin") for k in (1, 3)]
    spec = Spec(
        (Read("resid_post", to="files"), Read("resid_post", layers=[2])), (*elsewhere, PROBE)
    )
    pending = opened(inbox, spec, 10)
    deliver(inbox, pending, spec, 10, 0, 10)
    sizes = {key.what: table._values.shape[1:] for key, table in pending._tables.items()}
    shared, other = (Scored.of([b""], count).nameless for count in (2, 1))
    assert sizes == {None: (1, ROW), shared: (1, 8), other: (0, 4)}
    alone = Spec((Read("resid_post", to="files"),), (PROBE,))
    other = opened(inbox, alone, 10)
    deliver(inbox, other, alone, 10, 0, 10)
    assert [t.columns for key, t in other._tables.items() if key.what is None] == [()]
    pending.finish(0, None)
    result = pending.snapshot([5], "length")
    assert result.keys() == [("resid_post", 2)]
    assert list(result.scores) == ["p"]
    assert (result.status, result.delivered) == ("complete", 20)
    assert (result["resid_post", 2][:, 0] == 2 * HIDDEN_SIZE).all(), "the third of four rows"
    # Of the two banks, which follow the rows, the one whose text comes first is the first.
    listed = sorted(spec.resolve(SITES).banks, key=lambda bank: bank.text)
    first = 4 * HIDDEN_SIZE + 4 * [bank.row_bytes for bank in listed].index(8)
    assert (result.scores["p"] == first + 1).all(), "the second of two scores"


def test_a_copy_for_a_forgotten_request_takes_no_bytes(inbox):
    spec = Spec((Read("embed"),))
    inbox.budget = Budget(1 << 20)
    pending = opened(inbox, spec, 5)
    inbox.forget(pending)
    inbox._pending[pending.key] = pending  # as it was when the message came
    deliver(inbox, pending, spec, 5, 0, 5)
    assert inbox.budget.num_bytes == 0
    assert not pending._tables


def test_a_key_that_takes_all_it_can_leaves_room_for_others(inbox):
    """What a key holds is at most three times what is free."""
    spec = Spec((Read("resid_post", layers=[0]),))
    inbox.budget = Budget(64 * (ROW + LABEL_BYTES))

    def take_all(owner):
        kept = []
        try:
            while True:
                kept.append(opened(inbox, spec, 1, owner=owner))
        except CapacityError:
            return kept

    held = [take_all(owner) for owner in ("first", "second", "third")]
    assert [len(kept) for kept in held] == [48, 12, 3]
    del held[0]
    gc.collect()
    assert len(take_all("third")) == 36, "of 39, with the 3 that it has"


def test_generated_tokens_of_a_key_leave_room_for_other_keys(inbox):
    spec = Spec((Read("embed"),))
    inbox.budget = Budget(64 * (ROW + LABEL_BYTES))
    streams = [opened(inbox, spec, 1, owner="never reads") for _ in range(6)]
    for position in range(60):
        for pending in streams:
            deliver(inbox, pending, spec, 1, position, 1)
    assert inbox.budget.num_bytes <= 48 * (ROW + LABEL_BYTES)
    other = opened(inbox, spec, 8, owner="other")
    deliver(inbox, other, spec, 8, 0, 8)
    other.finish(0, None)
    assert other.snapshot([5], "length").status == "complete"


def test_keys_that_hold_nothing_are_forgotten(inbox):
    inbox.budget = Budget(1 << 20)
    for i in range(50):
        inbox.forget(opened(inbox, Spec((Read("embed"),)), 1, owner=f"key {i}"))
    assert inbox.budget.num_bytes == 0
    assert not inbox.budget._held


def test_the_asker_is_told_the_bytes_of_a_prompt_before_it_enters(inbox):
    def refuse(num_bytes):
        assert num_bytes == 3 * (ROW + LABEL_BYTES)
        raise CapacityError("no room for its file")

    inbox.budget = Budget(1 << 20)
    with pytest.raises(CapacityError, match="no room for its file") as caught:
        opened(inbox, Spec((Read("embed"),)), 3, expect=refuse)
    assert caught.tb is not None  # the traceback keeps the frames, and what they hold, alive
    assert (len(inbox), inbox.budget.num_bytes) == (0, 0)
