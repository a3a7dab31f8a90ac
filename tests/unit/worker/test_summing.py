"""Each accepted position is added to the sums once, whatever the scheduler does; sums are exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.delivered import ROW_BYTES
from vllm_scope.batch import sums as batch_sums
from vllm_scope.batch.labels import Labels
from vllm_scope.batch.sums import Sums, bytes_of, num_waiting
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.heads import Summed
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.request.selectors import Word
from vllm_scope.request.sites import Place
from vllm_scope.worker import summing
from vllm_scope.worker.device_sums import DeviceSums
from vllm_scope.worker.packer import first_slots
from vllm_scope.worker.summing import Summing

CPU = torch.device("cpu")
WIDTHS = Widths((ROW_BYTES,))
WIDTH = ROW_BYTES // 4
PLACES = Place("resid_post", 0), Place("resid_post", 1)
POINTS = tuple(place.point() for place in PLACES)
#: Tokens at even positions also deliver a raw row, so that a step has two layouts.
LAYOUTS = (
    Layout((), ((Summed.of(0), POINTS),)),
    Layout((POINTS[0],), ((Summed.of(0), POINTS),)),
)
#: In rows that must not be added.
POISON = 1e9


@cache
def row_of(key: int, position: int, layer: int) -> np.ndarray:
    return np.random.default_rng([key, position, layer]).standard_normal(WIDTH).astype(np.float32)


@dataclass
class Run:
    """A request in a simulated engine.

    Attributes:
        tokens: accepted ones after each step; its last is the truth.
        computed: where the next step begins.
    """

    key: int
    num_prompt: int
    num_tokens: int
    label: str
    target: float
    tokens: int
    computed: int = 0
    known: list[int] = field(default_factory=list)
    over: bool = False


class Engine:
    """Steps as vLLM makes them: chunks of prompts, drafts of which some are rejected, preemptions,
    and with a lag steps that begin before the outcome of the last one is known.

    Args:
        lag: steps whose outcome is not known when a step is scheduled, besides the last.
        drafts: of each decode step.
        taps: True to drain steps tap by tap.
    """

    def __init__(self, lag: int, drafts: int, taps: bool, rng: np.random.Generator) -> None:
        self.summing = Summing(torch.float32, CPU, WIDTHS, 1 << 20)
        self.lag, self.drafts, self.taps, self.rng = lag, drafts, taps, rng
        self.optimistic = lag > 0 and drafts > 0
        self.runs: list[Run] = []

    def add(self, key: int, num_prompt: int, num_tokens: int, label: str, target: float) -> None:
        asked = ResolvedMoments("m", PLACES, Word("all"), label, target)
        self.summing.add_request(key, num_prompt, [asked])
        self.runs.append(Run(key, num_prompt, num_tokens, label, target, num_prompt))

    def step(self, chunk: int) -> None:
        """One step of all running requests."""
        tokens: list[tuple[int, int, int, bool]] = []  # key, true, claimed, whether it counts
        for run in [one for one in self.runs if not one.over]:
            told = run.known[-1 - self.lag] if len(run.known) > self.lag else run.num_prompt
            self.summing.accept(run.key, told)
            if run.known and told >= run.num_tokens:
                self.summing.finish_request(run.key)
                run.over = True
                continue
            first, ahead = run.computed, 0
            if run.tokens - first > 1 or run.tokens == run.num_prompt:  # a chunk of known tokens
                count = good = min(chunk, run.tokens - first)
            else:
                count = 1 + self.drafts
                good = int(self.rng.integers(1, count + 1))  # the others are rejected
                ahead = int(self.rng.integers(0, self.drafts + 1)) if self.optimistic else 0
            for position in range(first, first + count):
                right = position < min(first + good, run.num_tokens - 1)
                tokens.append((run.key, position, position + ahead, right))
            run.computed = first + good
            # After the last known token the step samples one.
            run.tokens = max(run.tokens, run.computed + 1)
            run.known.append(min(run.tokens, run.num_tokens))
        if tokens:
            self._deliver(tokens)

    def preempt(self, run: Run) -> None:
        """Once its last outcomes are known; its tokens are computed again from the first."""
        if run.over or run.tokens > run.num_tokens or not run.known:
            return
        run.known += [min(run.tokens, run.num_tokens)] * (self.lag + 1)
        run.computed = 0

    def _deliver(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        keys, true, claimed, right = (np.array(x) for x in zip(*tokens, strict=True))
        layout_of = (true % 2 == 0).astype(np.int32)
        rows = np.arange(len(keys))
        labels = Labels(keys, claimed if self.optimistic else true, layout_of, LAYOUTS, rows)
        for place in PLACES if self.taps else (None,):
            boundary = None if place is None else place.boundary
            firsts = first_slots(labels, boundary, WIDTHS)
            size = int(firsts[-1]) + 4
            words = torch.full((size, WIDTH), torch.nan)
            for i, (key, position, good) in enumerate(zip(keys, true, right, strict=True)):
                layout = LAYOUTS[layout_of[i]]
                local = layout if boundary is None else layout.at(boundary)
                for point, slot in local.arena.row_slots(WIDTHS).items():
                    row = row_of(key, position, POINTS.index(point))
                    words[firsts[i] + slot] = torch.from_numpy(row if good else row + POISON)
            positions = torch.from_numpy(true) if self.optimistic else None
            self.summing.add(words.view(torch.int64), labels, boundary, firsts, positions)


def device_sums(width: int, dtype: torch.dtype, covariance: bool, targets: bool) -> DeviceSums:
    size = bytes_of(width, dtype.itemsize, covariance, targets)
    room = torch.full((size,), 255, dtype=torch.uint8)
    return DeviceSums(room, width, dtype, covariance, targets)


def read(summing: Summing, place: Place = PLACES[0], label: str = "a") -> Sums | None:
    found = summing.read("m", place, label)
    return None if found is None else Sums.of_packed(found)


@given(
    lag=st.integers(0, 1), drafts=st.integers(0, 3), taps=st.booleans(),
    chunk=st.integers(1, 9), seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 15)), min_size=1, max_size=4),
    preempted=st.lists(st.integers(0, 40), max_size=4), small=st.booleans(),
)  # fmt: skip
def test_each_accepted_position_is_added_once(
    lag, drafts, taps, chunk, seed, sizes, preempted, small
):
    rng = np.random.default_rng(seed)
    engine = Engine(lag, drafts, taps, rng)
    with pytest.MonkeyPatch.context() as patch:
        if small:  # settled in nearly every step
            patch.setattr(summing, "MOST_STEPS", 2)
        for i, (num_prompt, more) in enumerate(sizes):
            engine.add(i, num_prompt, num_prompt + more, "ab"[i % 2], float(i) - 0.5)
        for number in range(500):
            for one in preempted:
                if one == number:
                    engine.preempt(engine.runs[number % len(engine.runs)])
            engine.step(chunk)
            if all(run.over for run in engine.runs):
                break
        else:
            raise AssertionError("the simulated engine does not end")
        for layer, place in enumerate(PLACES):
            for label in {run.label for run in engine.runs}:
                found = read(engine.summing, place, label)
                runs = [run for run in engine.runs if run.label == label]
                counts = [run.num_tokens - 1 for run in runs]
                rows = [row_of(r.key, p, layer) for r in runs for p in range(r.num_tokens - 1)]
                if not rows:
                    assert found is None
                    continue
                x = np.array(rows, np.float64)
                y = np.repeat([run.target for run in runs], counts)
                assert found.count == len(x)
                np.testing.assert_allclose(found.x, x.sum(0), rtol=1e-9, atol=1e-9)
                np.testing.assert_allclose(found.xx, x.T @ x, rtol=1e-9, atol=1e-9)
                np.testing.assert_allclose(found.xy, y @ x, rtol=1e-9, atol=1e-9)
                np.testing.assert_allclose((found.y, found.yy), (y.sum(), y @ y))


@given(
    parts=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    offset=st.sampled_from([0.0, 1e3, -3e5]), seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_sums_of_parts_are_exact_to_the_rounding_of_float64(parts, offset, seed, dtype):
    """Rows with a large mean lose nothing, as they would in float32."""
    rng = np.random.default_rng(seed)
    width = 3
    rows = torch.from_numpy(rng.standard_normal((sum(parts), width)) + offset).to(dtype)
    targets = rng.standard_normal(len(rows))
    sums, first = device_sums(width, dtype, True, True), 0
    for count in parts:
        at = np.arange(first, first + count)
        sums.add(lambda some: rows[torch.from_numpy(some)], at, targets[at])
        first += count
    found = Sums.of_packed(sums.read())
    exact = [[Fraction(float(v)) for v in row] for row in rows.double().numpy()]
    ys = [Fraction(float(y)) for y in targets]
    assert found.count == len(rows)
    near = {"rtol": 1e-13, "atol": 1e-9}
    for i in range(width):
        np.testing.assert_allclose(found.x[i], float(sum(row[i] for row in exact)), **near)
        xy = sum(row[i] * y for row, y in zip(exact, ys, strict=True))
        np.testing.assert_allclose(found.xy[i], float(xy), rtol=1e-10, atol=1e-9)
        for j in range(width):
            products = float(sum(row[i] * row[j] for row in exact))
            np.testing.assert_allclose(found.xx[i, j], products, rtol=1e-13)


@pytest.mark.parametrize("at_once", [100, 300], ids=["rows-wait", "more-than-wait"])
def test_products_in_blocks_are_those_of_all_rows(monkeypatch, at_once):
    """More columns than a block, and more rows than wait."""
    monkeypatch.setattr(batch_sums, "BLOCK", 7)
    monkeypatch.setattr("vllm_scope.worker.device_sums.COPY_BYTES", 8 * 20 * 10)
    rows = torch.randn(700, 20)
    sums = device_sums(20, torch.float32, True, False)
    for first in range(0, 700, at_once):
        at = np.arange(first, min(700, first + at_once))
        sums.add(lambda some: rows[torch.from_numpy(some)], at, np.zeros(len(at)))
    found, exact = Sums.of_packed(sums.read()), rows.double().numpy()
    np.testing.assert_allclose(found.xx, exact.T @ exact, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.scatter, len(rows) * np.cov(exact.T, bias=True), atol=1e-9)
    assert found.xy is None


def test_the_sums_take_what_is_counted():
    for covariance in (True, False):
        for targets in (True, False):
            sums = device_sums(40, torch.bfloat16, covariance, targets)
            held = [one for one in vars(sums).values() if isinstance(one, torch.Tensor)]
            size = sum(one.numel() * one.element_size() for one in held)
            assert len({one.untyped_storage().data_ptr() for one in held}) == 1
            assert (
                size
                == held[0].untyped_storage().nbytes()
                == sums.num_bytes
                == bytes_of(40, 2, covariance, targets)
            )
    assert num_waiting(40) == 256


def test_dropped_sums_get_nothing_more_and_no_more_than_the_bound_is_made(caplog):
    engine = Engine(0, 0, False, np.random.default_rng(0))
    size = 2 * bytes_of(WIDTH, 4, True, True)
    engine.summing = Summing(torch.float32, CPU, WIDTHS, size)
    engine.add(0, 3, 8, "a", 1.0)
    engine.step(9)
    assert engine.summing.names("m") == [(place, "a") for place in PLACES]
    assert engine.summing.held() == ["m"]
    assert engine.summing.drop("m")
    for _ in range(9):
        engine.step(9)
    assert engine.runs[0].over
    assert engine.summing.names("m") == []
    engine.add(1, 3, 8, "a", 1.0)
    engine.add(2, 3, 8, "b", 1.0)
    for _ in range(9):
        engine.step(9)
    assert engine.summing.names("m") == [(place, x) for place in PLACES for x in "ab"]
    for label in "ab":
        kept, lost = (read(engine.summing, place, label) for place in PLACES)
        assert (kept.count, kept.missing) == (7, 0)
        assert (lost.count, lost.missing) == (0, 7)
        assert lost.x.shape == (WIDTH,)
    assert engine.summing._requests == {}
    assert "rows are missing from the sums" in caplog.text


def test_requests_that_have_ended_are_forgotten():
    """Also if nothing is asked, and no row waits."""
    engine = Engine(0, 0, False, np.random.default_rng(0))
    for key in range(600):
        engine.add(key, 2, 3 + key % 2, "a", 1.0)
        for _ in range(4):
            engine.step(9)
    assert len(engine.summing._requests) <= summing.MOST_STEPS + 1
    assert read(engine.summing).count == 300 * 2 + 300 * 3
    assert engine.summing._requests == {}


def test_rows_for_which_the_device_has_no_room_are_counted_as_missing(monkeypatch):
    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError

    engine = Engine(0, 0, False, np.random.default_rng(0))
    engine.add(0, 4, 9, "a", 1.0)
    # Of the prompt, the first three tokens; of generated ones, the second.
    for chunk, fails in ((3, True), (3, False), (3, False), (3, True), *[(3, False)] * 6):
        with monkeypatch.context() as patch:
            if fails:
                for name in ("rows_at", "rows_of"):
                    patch.setattr(f"vllm_scope.worker.summed_rows.StepRows.{name}", full)
            engine.step(chunk)
    assert engine.runs[0].over
    for layer, place in enumerate(PLACES):
        found = read(engine.summing, place)
        kept = [row_of(0, position, layer).astype(np.float64) for position in (3, 4, 6, 7)]
        assert (found.count, found.missing) == (4, 4)
        np.testing.assert_allclose(found.x, sum(kept))


def test_rows_are_settled_once_in_so_many_steps(monkeypatch):
    """However many layouts and taps a step has, and each event is asked once."""
    monkeypatch.setattr(summing, "MOST_STEPS", 16)
    asked: list[int] = []
    engine = Engine(0, 0, True, np.random.default_rng(0))
    settle = engine.summing._settle
    monkeypatch.setattr(engine.summing, "_settle", lambda: (asked.append(1), settle()))
    for key in range(6):
        engine.add(key, 2, 80, "a", 1.0)
    for _ in range(60):
        engine.step(9)
    assert len(asked) == 3
