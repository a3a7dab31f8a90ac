"""An operator's code that acts on what the model computes: between tokens, and across requests.

policy.py          what a policy is, and what it decides about a request's later tokens
policy_options.py  the operator's options of policies, and their plugins
running.py         one request under a policy
activity.py        what monitors have found since they were set, in bounded memory
controller.py      server-wide edits that follow what monitors find, with rate and bounds
"""

from vllm_scope.control.controller import Change, Controller, Observation, ServerEdits
from vllm_scope.control.policy import (
    Decided,
    Decision,
    PolicyPlugin,
    RunningPolicy,
    Start,
)

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
