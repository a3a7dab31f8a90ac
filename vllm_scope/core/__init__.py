"""EngineCore's data about requests. This folder does not import vLLM.

registry.py     steering modules by name, and server-wide edits
sent_ahead.py   vectors that front-ends sent before the requests that use the vectors
news.py         the message that EngineCore sends to all workers with a step
admission.py    counts the table entries of requests, and lets requests wait for free entries
score_index.py  the KV blocks whose scores the workers store
sums_room.py    the sums that the workers store for Moments, and the free memory for more sums
"""
