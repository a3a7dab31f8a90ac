"""What EngineCore keeps for requests. This folder does not import vLLM.

registry.py     steering modules by name, and server-wide edits
sent_ahead.py   vectors that tickets name by digest
news.py         what EngineCore tells its workers with a step
admission.py    which requests have places in the workers' tables, and which wait for room
score_index.py  which KV blocks' scores the workers hold
sums_room.py    which sums the workers keep for Moments, and whether there is room for more
"""
