"""Runs an operator's code, which acts on a model's numbers between tokens and across requests.

policy.py          the protocols of a policy, and a policy's decisions about later tokens
policy_options.py  the operator's options of policies, and the plugins of policies
running.py         the running policy of one completion
activity.py        the findings of monitors, in the form for callers
tally.py           counts the findings of one monitor, in bounded memory
background.py      base classes of objects that all requests share and vLLM must not copy
backlog.py         does work on a thread, such as counting findings; no answer waits for the work
controller.py      changes server-wide edits after findings of monitors, within a rate and bounds
bounded_edits.py   a controller's edits, and the bounds of the edits' scales
"""

from vllm_scope.control.controller import Change, Controller, Observation, ServerEdits
from vllm_scope.control.policy import Decided, Decision, PolicyPlugin, RunningPolicy, Start

__all__ = [
    "Change",
    "Controller",
    "Decided",
    "Decision",
    "Observation",
    "PolicyPlugin",
    "RunningPolicy",
    "ServerEdits",
    "Start",
]
