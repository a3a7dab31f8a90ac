"""What EngineCore keeps for requests. Does not import vLLM.

registry.py   steering modules by name, and server-wide edits
sent_ahead.py vectors that tickets name by digest
news.py       what EngineCore tells its workers with a step
admission.py  which requests have places in the workers' tables, and which wait for room
"""
