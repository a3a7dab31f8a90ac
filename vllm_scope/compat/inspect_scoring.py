"""For Inspect: a solver that reads the model, and a scorer that checks a probe's decision.

Owns:  `reading`, `probe_scorer`, `auroc`.
To:    inspect.py, from which callers import these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from statistics import fmean
from typing import Literal

from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    Metric,
    SampleScore,
    Score,
    Scorer,
    Target,
    accuracy,
    metric,
    scorer,
    stderr,
)
from inspect_ai.solver import Generate, Solver, TaskState, solver

from vllm_scope.errors import SpecError, checked_word, shown

Pooling = Literal["last", "mean", "max"]
#: Maps each pooling to the function that computes one score from a completion's scores.
POOLS: dict[Pooling, Callable[[list[float]], float]] = {
    "last": itemgetter(-1), "mean": fmean, "max": max,
}  # fmt: skip


@solver
def reading(spec: Mapping[str, object]) -> Solver:
    """A solver that generates an answer, and reads or steers the model during generation.

    Args:
        spec: the result of `vllm_scope.scope(...)`.

    Raises:
        SpecError: `spec` is not a mapping, for example because an action was passed without
            `scope`.
    """
    if not isinstance(spec, Mapping):
        raise SpecError(
            f"reading takes the result of scope(...), not {shown(spec)}; write "
            "reading(scope(Add(...))) or reading(scope(Probe(...), Read(...)))."
        )

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await generate(state, extra_body={"extra_args": dict(spec)})

    return solve


@metric
def auroc() -> Metric:
    """The metric AUROC, which compares samples with the concept and samples without the concept.

    Each sample with the concept makes a pair with each sample without the concept. The metric is
    the share of the pairs in which the sample with the concept has the higher score. A pair
    with equal scores counts as half a pair. Random scores give about 0.5. Without pairs: NaN.
    """

    def measure(scores: list[SampleScore]) -> float:
        found = [each.score.metadata or {} for each in scores]
        pairs = [
            (p["score"] > n["score"]) + 0.5 * (p["score"] == n["score"])
            for p in found if p["present"]
            for n in found if not n["present"]
        ]  # fmt: skip
        return sum(pairs) / len(pairs) if pairs else float("nan")

    return measure


@scorer(metrics=[accuracy(), stderr(), auroc()])
def probe_scorer(
    probe: str, positive: str, threshold: float = 0.0, pooling: Pooling = "last"
) -> Scorer:
    """A scorer that compares a probe's decision with a sample's target.

    A sample with the target `positive` is correct if the probe's pooled score is above
    `threshold`. A sample with another target is correct if its score is not above `threshold`.

    Args:
        probe: the probe's name.
        positive: the target of samples that have the concept.
        threshold: a pooled score above this number means that the sample has the concept.
        pooling: whether the pooled score is the "last", the "mean" or the "max" of the scores.

    Raises:
        SpecError: `pooling` is not one of these words, or the output has no scores of the probe.
    """
    checked_word(pooling, POOLS, "pooling")

    async def score(state: TaskState, target: Target) -> Score:
        scores = (state.output.metadata or {}).get("scores", {})
        if not scores.get(probe, {}).get("scores"):
            raise SpecError(
                f"this sample has no scores of {shown(probe)}; it has {shown(sorted(scores))}. "
                "Use reading(scope(Probe(...))) as the solver."
            )
        pooled = float(POOLS[pooling](scores[probe]["scores"]))
        fired, present = pooled > threshold, target.text == positive
        return Score(
            value=CORRECT if fired == present else INCORRECT,
            answer=positive if fired else f"not {positive}",
            metadata={"probe": probe, "score": pooled, "present": present},
        )

    return score
