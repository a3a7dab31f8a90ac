"""A solver that reads, and a scorer that compares whether a probe fires with the target.

Owns:  `reading`, `probe_scorer`, `auroc`.
To:    inspect, by whose name callers import them.
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

from vllm_scope.errors import SpecError, shown

Pooling = Literal["last", "mean", "max"]
#: Pooling -> the one score of a completion's scores.
POOLS: dict[Pooling, Callable[[list[float]], float]] = {
    "last": itemgetter(-1), "mean": fmean, "max": max,
}  # fmt: skip


@solver
def reading(spec: Mapping[str, object]) -> Solver:
    """Generate, and read or steer while the model does.

    Args:
        spec: what `vllm_scope.scope(...)` returns.
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await generate(state, extra_body={"extra_args": dict(spec)})

    return solve


@metric
def auroc() -> Metric:
    """How often a sample with the concept scores above one without; 0.5 is chance."""

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
    """Whether a probe's score is above a threshold if, and only if, the target is `positive`.

    Args:
        probe: its name.
        positive: the target of samples that have the concept.
        threshold: of the pooled score.
        pooling: the last score of the probe, the mean of all, or the largest.

    Raises:
        SpecError: the sample's output has no scores of that probe.
    """
    if pooling not in POOLS:
        raise SpecError(f"pooling is {shown(pooling)}; it is one of {', '.join(POOLS)}.")

    async def score(state: TaskState, target: Target) -> Score:
        scores = (state.output.metadata or {}).get("scores", {})
        if not scores.get(probe, {}).get("scores"):
            raise SpecError(
                f"this sample has no scores of {shown(probe)}; it has {shown(sorted(scores))}. "
                "Let the solver be reading(scope(Probe(...)))."
            )
        pooled = float(POOLS[pooling](scores[probe]["scores"]))
        fired, present = pooled > threshold, target.text == positive
        return Score(
            value=CORRECT if fired == present else INCORRECT,
            answer=positive if fired else f"not {positive}",
            metadata={"probe": probe, "score": pooled, "present": present},
        )

    return score
