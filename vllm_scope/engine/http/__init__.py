"""The code that runs in vLLM's HTTP server.

serving.py  adds a scope to each answer, and adds this package's routes
calls.py    calls the engine for the routes
sweeps.py   runs the sweeps of an API server, and divides the share of a step among them
"""
