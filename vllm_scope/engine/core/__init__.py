"""In vLLM's EngineCore: what requests mean, when they run, which KV they share.

entry.py      what a request that enters means, and the keys of its edited KV blocks
entered.py    what EngineCore keeps about a request that reads, probes or edits
scheduler.py  when such a request starts, which cached KV it uses, how it ends
scores.py     scores that are kept with KV blocks
verdicts.py   scores that stop a request, begin its next stage, or change its scales
outputs.py    what workers report with a step's output, and joined answers of variants
variants.py   one request that stands for several, each with edits of its own
clearing.py   KV blocks that must be zeroed before they are used again
"""
