"""An operator's code that acts on what the model computes: between tokens, and across requests.

policy.py          what a policy is, and what it decides about a request's later tokens
policy_options.py  the operator's options of policies, and their plugins
running.py         one request under a policy
activity.py        what monitors have found since they were set, in the form for callers
tally.py           counts what one monitor finds, in bounded memory
background.py      base classes of objects that all requests share: vLLM does not copy them
backlog.py         work that answers do not wait for, such as the counts
controller.py      server-wide edits that follow what monitors find, with rate and bounds
bounded_edits.py   a controller's edits, whose scales stay within bounds
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
