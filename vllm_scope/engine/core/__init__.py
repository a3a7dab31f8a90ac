"""In vLLM's EngineCore: what requests mean, when they run, which KV they share.

entry.py      what a request that enters means, and the keys of its edited KV blocks
entered.py    what EngineCore keeps about a request that reads, probes or edits
scheduler.py  when the request may run, and the message that it is over
scores.py     scores that are kept with KV blocks
verdicts.py   requests that a probe or a policy stops, whose next stage begins, or with new scales
outputs.py    what workers tell with a step's output
variants.py   one request that stands for several, each with edits of its own
clearing.py   KV blocks that must be zeroed before they are used again
"""
