"""The code that runs in vLLM's EngineCore: it resolves requests, and handles their KV and outputs.

entry.py      resolves a new request, and makes the keys of its edited KV blocks
entered.py    EngineCore's data about a request that reads, probes or edits
scheduler.py  decides when a request starts, and which cached KV the request uses
scores.py     scores that the workers store for KV blocks
verdicts.py   lets scores stop a request, begin its next stage, or change its scales
outputs.py    handles a step's output: the workers' reports, and the answers of variants
variants.py   makes several requests with different edits from one request
clearing.py   KV blocks that must be zeroed before a request uses them again
"""
