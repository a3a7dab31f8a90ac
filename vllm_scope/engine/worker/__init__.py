"""vLLM's workers.

attach.py     the seams: what is hung on a worker and on its model runner
worker.py     what a worker holds of us
attention.py  which attention layers can be tapped
sizes.py      how large the arena and the rings are
canary.py     one row of every tap, read at the start
runners.py    the two model runners
steps.py      one forward: its plan, and its rows
faults.py     rows that are not finite
delivery.py   ring, drain and sinks
"""
