"""The code that runs in vLLM's HTTP server.

serving.py  adds a scope to each answer, and adds our routes
calls.py    the calls by which the routes use the engine
sweeps.py   the running sweeps, and each sweep's part of the batch
"""
