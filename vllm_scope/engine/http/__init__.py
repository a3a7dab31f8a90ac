"""What runs in vLLM's HTTP server.

serving.py  a scope in each answer, and our routes beside vLLM's
calls.py    the engine, as the routes call it
sweeps.py   the sweeps that run, and what part of the batch each may take
"""
