"""EngineCore knows exactly which scores the workers hold, and that is never more than allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope.core.score_index import _BLOCK_BYTES, ENDS_A_STEP, TURNS, ScoreIndex, ScoreKey
from vllm_scope.request.remembered import Remembered

SIZE, TOKEN_BYTES = 4, 16
BLOCK_BYTES = SIZE * TOKEN_BYTES + _BLOCK_BYTES
P, Q = b"probes", b"other probes"


def chain(name: str, count: int) -> list[bytes]:
    """The hashes of a prompt's blocks."""
    return [f"{name}{i}".encode() for i in range(count)]


def index_of(num_blocks: int) -> ScoreIndex:
    return ScoreIndex(SIZE, num_blocks * BLOCK_BYTES)


def run(index: ScoreIndex, hashes: list[bytes], *chunks: int, probes: bytes = P) -> None:
    """A whole request; `chunks`: how many blocks are filled after each of its steps."""
    index.begin("r", 0)
    for count in chunks or (len(hashes),):
        index.fill("r", hashes, count * SIZE, probes, TOKEN_BYTES)
    index.finish_request("r", None)


def test_blocks_are_known_from_the_first_on_and_for_their_probes_alone():
    index, hashes = index_of(9), chain("a", 4)
    run(index, hashes[:3])
    assert index.num_known(hashes, P) == 3
    assert index.num_known([hashes[0], b"x", hashes[1]], P) == 1
    assert index.num_known([b"x", *hashes], P) == index.num_known([], P) == 0
    assert index.num_known(hashes, Q) == 0


@pytest.mark.parametrize(
    ("num_cached", "num_tokens", "filled"),
    [
        pytest.param(0, [3, 4, 7], [None, (0, 1), None], id="as-blocks-fill"),
        pytest.param(0, [13], [(0, 3)], id="several-at-once"),
        pytest.param(2, [8, 11, 12], [None, None, (2, 3)], id="not-those-from-the-cache"),
        pytest.param(0, [24, 28], [(0, 5), None], id="not-those-without-a-hash"),
        pytest.param(0, [8, 4, 8, 12], [(0, 2), None, None, (2, 3)], id="once-after-a-preemption"),
    ],
)
def test_each_block_that_a_request_fills_is_named_once(num_cached, num_tokens, filled):
    index, hashes = index_of(9), chain("a", 5)
    index.begin("r", num_cached)
    found = [index.fill("r", hashes, count, P, TOKEN_BYTES) for count in num_tokens]
    assert found == [some and (some[0], hashes[slice(*some)]) for some in filled]
    assert index.num_told("r") == max(num_cached, *(some[1] for some in filled if some))


def test_a_request_is_known_while_it_runs():
    index = index_of(9)
    assert index.num_told("r") is None
    index.begin("r", 3)
    assert (index.running, index.num_told("r")) == (["r"], 3)
    index.finish_request("r", None)
    index.finish_request("r", None)
    assert (index.running, index.num_told("r")) == ([], None)


def test_the_blocks_of_a_few_ended_requests_are_marked_a_step():
    """To mark those of all requests that end together would delay their last outputs."""
    index, chains = index_of(999), [chain(str(i), 2) for i in range(2 * ENDS_A_STEP + 1)]
    for i, hashes in enumerate(chains):
        index.begin(f"{i}", 0)
        index.fill(f"{i}", hashes, 8, P, TOKEN_BYTES)
    marked = []
    index.num_known = lambda hashes, probes: marked.append(hashes)
    for i in range(len(chains)):
        index.finish_request(f"{i}", None)
    assert marked == []
    for count in (ENDS_A_STEP, 2 * ENDS_A_STEP, len(chains), len(chains)):
        index.due()
        assert marked == chains[:count]


def test_the_blocks_of_many_ended_requests_do_not_wait_long():
    """In each step more than ENDS_A_STEP requests end."""
    index, ends = index_of(99_999), 5 * ENDS_A_STEP
    most = 0
    for step in range(20 * TURNS):
        for i in range(ends):
            index.begin(f"{i}", 0)
            index.fill(f"{i}", chain(f"{step}-{i}-", 2), 8, P, TOKEN_BYTES)
            index.finish_request(f"{i}", None)
        index.due()
        most = max(most, len(index._ended_chains))
    assert most <= (TURNS + 1) * ends


@pytest.mark.parametrize("num_others", [1, 5])
def test_the_blocks_that_wait_to_be_marked_take_a_part_of_the_room(num_others):
    """Else a chain's beginning would be forgotten before its end."""
    index, hashes = index_of(12), chain("a", 6)
    run(index, hashes, *range(1, 7))
    assert not index._ended_chains
    run(index, chain("x", 6 + num_others))
    assert index.num_known(hashes, P) == 6 - num_others


def test_what_waits_to_be_marked_is_forgotten_with_everything():
    index = index_of(99)
    run(index, chain("a", 2))
    assert index._ended_chains
    index.clear()
    assert (len(index._ended_chains), index._ended_bytes) == (0, 0)


def test_workers_are_told_once_what_was_used_longest_ago():
    index, (a, b, c) = index_of(2), chain("a", 3)
    for one in (a, b):
        run(index, [one])
    index.num_known([a], P)
    run(index, [c])
    assert index.take_forgotten() == [(b, P)]
    assert index.take_forgotten() == []
    assert [index.num_known([one], P) for one in (a, b, c)] == [1, 0, 1]


def test_what_is_kept_again_before_workers_are_told_is_not_forgotten():
    index, (a, b) = index_of(1), chain("a", 2)
    for one in (a, b, a):
        run(index, [one])
    assert index.take_forgotten() == [(b, P)]


@pytest.mark.parametrize("chunks", [(6,), (2, 4, 6), (1, 2, 3, 4, 5, 6)], ids=str)
def test_of_a_chain_its_end_is_forgotten_first(chunks):
    """A block is of use only with all blocks before it."""
    for num_others in range(7):
        index, hashes = index_of(6), chain("a", 6)
        run(index, hashes, *chunks)
        run(index, chain("x", num_others))
        assert index.num_known(hashes, P) == 6 - num_others


def test_of_a_request_that_runs_the_end_is_forgotten_first():
    index, hashes = index_of(6), chain("a", 6)
    index.begin("running", 0)
    index.fill("running", hashes, 6 * SIZE, P, TOKEN_BYTES)
    run(index, chain("x", 2))
    assert index.num_known(hashes, P) == 4


def test_a_block_of_many_bytes_takes_the_room_of_many():
    index, hashes = index_of(4), chain("a", 4)
    run(index, hashes)
    index.begin("large", 0)
    index.fill("large", [b"x"], SIZE, Q, TOKEN_BYTES + 2 * BLOCK_BYTES // SIZE)
    assert (index.num_known(hashes, P), index.num_known([b"x"], Q)) == (1, 1)


def test_scores_that_one_worker_lost_are_forgotten_by_all():
    """Other stages hold their part of them, and the one that lost them may hold them again."""
    index, hashes = index_of(9), chain("a", 3)
    run(index, hashes)
    index.lose([(hashes[1], P), (b"x", P)])
    assert index.num_known(hashes, P) == 1
    assert (hashes[1], P) in index.take_forgotten()
    run(index, hashes)
    assert index.num_known(hashes, P) == 3


def test_a_step_without_losses_looks_at_no_block(monkeypatch: pytest.MonkeyPatch):
    """EngineCore reports the losses of each step, and a full index has some 100,000 blocks."""
    index = index_of(9)
    monkeypatch.setattr(Remembered, "drop", lambda *_: pytest.fail("it looked at all of them"))
    index.lose([])


def test_after_a_reset_nothing_is_known_and_running_requests_begin_again():
    index, hashes = index_of(9), chain("a", 3)
    run(index, hashes)
    index.begin("s", 2)
    index.clear()
    assert index.num_known(hashes, P) == 0
    assert index.fill("s", hashes, 2 * SIZE, P, TOKEN_BYTES) == (0, hashes[:2])
    assert index.take_forgotten() == [(hashes[2], P)]


#: The hashes of requests: two have the same first 3 blocks of 6, and other probes.
CHAINS = [chain("a", 6), [*chain("a", 3), *chain("b", 3)], chain("a", 6), chain("c", 6)]
PROBES = [P, P, Q, P]
EVENTS = ["computes"] * 5 + ["ends", "loses", "lost-late", "resets", "step", "step"]


@given(
    st.lists(
        st.tuples(st.sampled_from(EVENTS), st.integers(0, 3), st.integers(1, 3 * SIZE)),
        min_size=10, max_size=80,
    ),
    st.integers(1, 12),
)  # fmt: skip
def test_after_each_step_the_workers_hold_what_is_known_and_no_more_than_allowed(events, most):
    index, held, kept = index_of(most), set[ScoreKey](), set[ScoreKey]()
    num_tokens = [0] * 4

    def scheduled() -> None:
        """Workers keep the blocks of ended requests, then those of others, then forget."""
        nonlocal held, kept
        ended = {
            (one, PROBES[int(request)])
            for request, (_, hashes) in index.take_ended().items()
            for one in hashes
        }
        held, kept = (held | ended | kept) - set(index.take_forgotten()), set()
        every = {(one, p) for some in CHAINS for one in some for p in (P, Q)}
        assert held == {(one, p) for one, p in every if index.num_known([one], p)}
        assert len(held) <= most

    for event, i, count in [*events, ("step", 0, 0)]:
        request, hashes, probes = str(i), CHAINS[i], PROBES[i]
        keys = {(one, probes) for one in hashes}
        if event == "computes":
            begins = request not in index.running
            if begins:
                num_known = index.num_known(hashes, probes)
                index.begin(request, num_known)
                num_tokens[i] = num_known * SIZE
            num_tokens[i] += count
            if count % 2:  # else its turn has not come
                found = index.fill(request, hashes, num_tokens[i], probes, TOKEN_BYTES)
                kept |= {(one, probes) for one in found[1]} if found else set()
            if begins:
                scheduled()
        elif event == "ends":
            found = None
            if request in index.running:
                found = index.fill(request, hashes, num_tokens[i], probes, TOKEN_BYTES)
            index.finish_request(request, found)
        elif event in ("loses", "lost-late"):  # if late, they were kept again
            held -= keys if event == "loses" else set()
            index.lose(keys)
        elif event == "resets":
            index.clear()
            num_tokens = [0] * 4
        else:
            scheduled()
    for name in index.running:
        index.finish_request(name, None)
    assert not index.running, "an ended request leaves something behind"


def test_of_a_request_whose_next_tokens_have_other_scores_no_more_blocks_are_kept():
    index, hashes = index_of(9), chain("a", 4)
    index.freeze("unknown", 1)
    index.begin("r", 0)
    assert index.fill("r", hashes, SIZE, P, TOKEN_BYTES) == (0, hashes[:1])
    index.freeze("r", 3 * SIZE - 1)
    index.freeze("r", 4 * SIZE)  # another stage
    assert index.fill("r", hashes, 4 * SIZE, P, TOKEN_BYTES) == (1, hashes[1:2])
    assert index.fill("r", hashes, 4 * SIZE, P, TOKEN_BYTES) is None
    index.finish_request("r", None)
    assert index.num_known(hashes, P) == 2
    run(index, hashes)
    assert index.num_known(hashes, P) == 4


@pytest.mark.parametrize("step_tokens", [1, 3])
@given(st.data())
def test_workers_are_told_of_blocks_of_known_tokens_in_the_step_that_fills_them_and_of_others_soon(
    step_tokens, data
):
    """As vLLM's scheduler: a step computes tokens that are known, and its outputs add new ones some
    steps later. Requests are preempted, wait, and lose all blocks."""
    index, draw = ScoreIndex(SIZE, 1 << 20, step_tokens), data.draw
    hashes, lag = chain("a", 99), draw(st.integers(0, 1))
    num_prompt = draw(st.integers(1, 3 * SIZE))
    num_tokens, num_computed, told = num_prompt, 0, 0
    for name in range(draw(st.integers(0, TURNS - 1))):  # requests take turns to be late
        index.begin(f"{name}", 0)
        index.finish_request(f"{name}", None)
    index.begin("r", 0)
    #: New tokens of the steps whose outputs have not come.
    flying: list[int] = []
    #: The number of tokens that were known when the request was looked at last; the number of steps
    #: since workers could have been told about its next block.
    known_then, num_late = num_prompt, 0
    for _ in range(60):
        chance = draw(st.integers(0, 19))
        while len(flying) > lag * (chance > 1):
            num_tokens += flying.pop(0)
        if chance == 2:
            index.clear()
            told, known_then = 0, num_tokens
        if chance == 3:  # preempted: what is under way still comes
            num_computed = 0
        scheduled = chance != 4
        decodes = num_computed >= num_tokens - 1
        if scheduled and decodes:
            num_computed += 1
            flying.append(draw(st.integers(1, step_tokens)))
        elif scheduled:
            num_computed = min(num_computed + draw(st.integers(1, 9)), num_tokens)
            if num_computed == num_tokens:
                flying.append(1)
        full = min(num_computed, num_tokens) // SIZE
        due = index.due()
        if scheduled and full > told:
            if (told + 1) * SIZE <= known_then:
                assert due == ["r"], "known tokens fill a block, and nobody looks"
            num_late = 0 if due else num_late + 1
            # With async scheduling, the known tokens can be two steps old. The index then estimates
            # the step that fills the block up to two steps too late.
            most_late = TURNS - 1 + 2 * lag
            assert num_late <= most_late, "nobody tells workers about a block of generated tokens"
        for request in due:
            if scheduled:
                count = min(num_computed, num_tokens)
                index.fill(request, hashes, count, P, TOKEN_BYTES)
                told = max(told, full)
            index.look_again(request, num_tokens)
            known_then = num_tokens
        assert index.num_told("r") == told
    last = index.fill("r", hashes, min(num_computed, num_tokens), P, TOKEN_BYTES)
    index.finish_request("r", last)
    assert index.has_news or last is None
    assert index.take_ended() == ({} if last is None else {"r": last})
    assert index.take_ended() == {}


def test_requests_that_fill_blocks_with_the_same_steps_take_turns():
    index, most = ScoreIndex(16, 1 << 20), 0
    hashes = {f"{i}": chain(f"{i}", 99) for i in range(64)}
    for request in hashes:
        index.begin(request, 0)
    for num_tokens in range(160, 800):
        named = 0
        for request in index.due():
            found = index.fill(request, hashes[request], num_tokens, P, TOKEN_BYTES)
            named += found is not None
            index.look_again(request, num_tokens)
        most = max(most, named) if num_tokens > 160 else 0
    assert most == 64 // TURNS


def test_a_request_that_generates_is_looked_at_a_few_times_a_block():
    index, hashes = ScoreIndex(16, 1 << 20), chain("a", 99)
    index.begin("r", 0)
    num_looked = 0
    for num_tokens in range(160, 800):
        for request in index.due():
            num_looked += 1
            index.fill(request, hashes, num_tokens, P, TOKEN_BYTES)
            index.look_again(request, num_tokens)
    assert index.num_told("r") == 799 // 16
    assert num_looked <= 2 * 40
    index.freeze("r", 800)
    for num_tokens in range(800, 900):
        for request in index.due():
            index.fill(request, hashes, num_tokens, P, TOKEN_BYTES)
            index.look_again(request, num_tokens)
    assert index.num_told("r") == 50
    assert index.due() == [], "no more of its blocks are kept"
