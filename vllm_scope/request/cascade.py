"""Cascades: probes that score only after the verdict of another probe, the first stage.

Owns:  `begins` (the first position that a stage scores), `check_cascades`.
Runs:  in every process. No torch.
From:  actions.probing (`after`).   To: spec and engine.monitors (the checks), resolved (the
       position).

A cascade is a chain of probes (stages). The first stage scores from the start. Each later stage
begins to score after the verdict of the stage before it. A verdict is the first position at which a
probe's value is above its threshold.

Promise: the first position of a later stage depends only on the position of the verdict, the
prompt's length and the engine's configuration. How the scheduler splits tokens into steps does not
change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import Probe
from vllm_scope.request.actions.probing import MONITOR

#: The largest number of stages of one cascade.
MOST_STAGES = 4


def begins(verdict: int, num_prompt: int, step_tokens: int) -> int:
    """The first position that a later stage scores. A worker always has the verdict before it
    computes this position.

    The scheduler receives a verdict with the output of the step that computes the verdict's
    position. With async scheduling, the next step has then already started. With drafts, the
    scheduler receives the verdict one step later, because the token must first be accepted. A step
    processes at most `step_tokens` generated tokens of a request, but can process many tokens of a
    prompt. Therefore a stage never begins inside a prompt.

    Args:
        verdict: the position of the verdict of the stage before.
        step_tokens: 1 plus the number of draft tokens in a step (Sites.step_tokens).
    """
    in_flight = 1 if step_tokens == 1 else 2
    return max(num_prompt, verdict + step_tokens) + in_flight * step_tokens


def check_cascades(probes: Sequence[Probe], where: Callable[[int], str], what: str) -> None:
    """Check the cascades of some probes. Raises SpecError if the probe that `after` names is
    missing or cannot be an earlier stage, if probes wait for each other in a circle, or if there
    are too many stages.

    Args:
        where: a function that takes the index of a probe, and returns the probe's path for error
            messages.
        what: the word that error messages use for the probes, "probe" or "monitor".
    """
    index_of = {probe.name: i for i, probe in enumerate(probes)}
    for i in range(len(probes)):
        chain = [i]
        while (after := probes[chain[-1]].after) is not None:
            path, name = f"{where(chain[-1])}.after", shown(after.removeprefix(MONITOR))
            if after not in index_of:
                raise SpecError(f"{path} is {name}, and no {what} has this name; name another one.")
            first = probes[index_of[after]]
            if index_of[after] in chain:
                raise SpecError(
                    f"{path} is {name}, which waits for this {what} itself; the first stage of a "
                    "cascade has no 'after'."
                )
            if first.threshold is None or first.action == "stop" or not first.tokens.uniform:
                raise SpecError(
                    f"{path} is {name}, which cannot be a first stage; a first stage must have "
                    "a threshold, an action that does not stop the request, and tokens that are "
                    "'all', 'prompt' or 'generated'."
                )
            chain.append(index_of[after])
            if len(chain) > MOST_STAGES:
                raise SpecError(
                    f"{where(i)}.after makes a cascade of more than {MOST_STAGES} stages; leave "
                    "some out."
                )
