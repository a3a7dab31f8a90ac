"""In vLLM's EngineCore: what requests mean, when they run, and which KV they share.

entry.py      what a new request means, and the keys of its edited KV blocks
entered.py    EngineCore's data of a request that reads, probes or edits
scheduler.py  when such a request starts, which cached KV it uses, how it ends
scores.py     scores that the workers store for KV blocks
verdicts.py   scores that stop a request, begin its next stage, or change its scales
outputs.py    the workers' reports in a step's output, and joined answers of variants
variants.py   one request that stands for several requests with different edits
clearing.py   KV blocks that must be zeroed before a request uses them again
"""
