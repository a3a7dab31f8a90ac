"""Cascades: a probe that scores only after the verdict of another probe, its first stage.

Owns:  `begins` (the first position that a stage scores), `check_cascades`.
Runs:  in every process. No torch.
From:  actions.probing (`after`).   To: spec, engine.monitors (the checks); resolved (the position).

Promise: the first position of a later stage depends on the position of the verdict, on the prompt's
length and on the engine's configuration, not on the steps in which tokens were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import Probe
from vllm_scope.request.actions.probing import MONITOR

#: The largest number of stages of one cascade.
MOST_STAGES = 4


def begins(verdict: int, num_prompt: int, step_tokens: int) -> int:
    """The first position that a later stage scores: the first position that the worker certainly
    computes after it has received the verdict.

    The scheduler receives a verdict with the output of the verdict's step. With async scheduling it
    has then started one more step. With drafts it receives the verdict one step later, when the
    token is known to be accepted. Each step advances by at most `step_tokens` positions. A prompt's
    steps have as many tokens as fit, so no stage begins inside a prompt.

    Args:
        verdict: the position of the first stage's verdict.
        step_tokens: as in Sites.
    """
    in_flight = 1 if step_tokens == 1 else 2
    return max(num_prompt, verdict + step_tokens) + in_flight * step_tokens


def check_cascades(probes: Sequence[Probe], where: Callable[[int], str], what: str) -> None:
    """Raises SpecError for a first stage that is missing or has no verdict that a worker can find,
    for a cycle, and for too many stages.

    Args:
        where: index of a probe -> its path in error messages, in the caller's words.
        what: "probe" or "monitor".
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
                    f"{path} is {name}, which cannot be a first stage; a first stage has a "
                    "threshold, an action that does not stop the request, and tokens that are "
                    "'all', 'prompt' or 'generated'."
                )
            chain.append(index_of[after])
            if len(chain) > MOST_STAGES:
                raise SpecError(
                    f"{where(i)}.after makes a cascade of more than {MOST_STAGES} stages; leave "
                    "some out."
                )
